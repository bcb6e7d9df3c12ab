"""Jobs on many hosts: hostfile, launch.sh, the node wrapper, preflight.

train.py imports nothing from here. The two communicate through environment variables, signals, exit
codes and the run folder. May import: everything except scripts and benchmarks.
"""
