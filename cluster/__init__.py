"""A job over many hosts: hostfile, agents on the hosts, launch, preflight."""
