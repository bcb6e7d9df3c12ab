"""What every process of a job needs: errors and exit codes, rank variables, the rendezvous and the
process group, agreement between ranks, preemption, seeding, printed tables, and which
internals of the libraries are used.
May import: nothing of this repository.
"""
