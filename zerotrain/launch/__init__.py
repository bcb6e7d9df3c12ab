"""Many hosts: hostfile, launch, the node wrapper, preflight. It serves train.py, which does not
know it: they meet in environment variables, signals, exit codes and the run folder.
May import: everything but scripts and benchmarks.
"""
