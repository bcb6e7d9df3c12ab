"""Many hosts: hostfile, launch, the node wrapper, preflight. train.py imports nothing
from here: they communicate through environment variables, signals, exit codes and the run folder.
May import: everything but scripts and benchmarks.
"""
