"""The plans of a config, without a process group."""

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, make_plans
from zerotrain.runtime.machine import Machine
from zerotrain.training.setup import open_run


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config resolved for `world_size` ranks on CPU, the tokenizer, and the plans of the
    training data and of each held-out set.

    Raises:
        UserError: whatever train.py would refuse.
    """
    setup, tokenizer = open_run(config, Machine(world_size, world_size))
    return setup.config, tokenizer, *make_plans(setup.config, tokenizer, setup.budget)
