"""Two ranks with different plans, for test_data_commands.py."""

import math
from dataclasses import replace

import pytest

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.process_group import process_group
from zerotrain.training.setup import open_run_on_all_ranks


def main(config, dry_run):
    """Check what ranks say about values and plans that differ, and train nothing."""
    with process_group(config.distributed.timeout_seconds) as ranks:
        value = [None, -math.inf, "\udc80ü", {"long": "x" * 10**6 * ranks.rank}]
        assert ranks.gather_json(value)[ranks.rank] == value
        nan, other = ranks.gather_json(math.nan if ranks.is_first else ranks.rank)
        assert math.isnan(nan) and other == 1
        for change, line in (
            ({"learning_rate": 1e-3 * (1 + ranks.rank)}, "learning_rate: 0.002"),
            ({"seed": ranks.rank}, "seed: 1"),
        ):
            own = replace(config, train=replace(config.train, **change))
            with pytest.raises(UserError, match=f"rank 1 @ .*{line}"):
                open_run_on_all_ranks(own, ranks)
        ranks.require_same("the same", "a\nb")
        ranks.require_same("the data plan", "a" if ranks.rank == 0 else "b")
