"""What every process of a job needs: errors and exit codes, rank variables, the rendezvous and the
process group, agreement between ranks, preemption, seeding, and printed tables.
May import: nothing of this repository.
"""
