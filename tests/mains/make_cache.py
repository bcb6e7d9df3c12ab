"""Makes the token caches of a run, for forks.py, before the ranks of the run start."""

from zerotrain.rows.tokenize import make_caches


def main(config, dry_run):
    """Tokenize the rows that `config` names."""
    make_caches(config)
