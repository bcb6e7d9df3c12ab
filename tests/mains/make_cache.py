"""Makes the cache of a run's rows, for forks.py, before the ranks of the run start."""


def main(config, dry_run):
    """Tokenize the rows that `config` names. Nothing yet: the ranks do so themselves."""
