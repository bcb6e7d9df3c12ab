"""The plans of a config, without a process group."""

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config
from zerotrain.data.caches import open_caches
from zerotrain.data.data_plan import DataPlan, make_plans
from zerotrain.rows.tokenize import make_caches
from zerotrain.runtime.machine import Machine
from zerotrain.training.setup import open_run, pin_sources


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config resolved for `world_size` ranks on CPU, the tokenizer, and the plans of the
    training data and of each held-out set.

    Raises:
        UserError: whatever train.py would refuse.
    """
    setup, tokenizer = open_run(config, Machine(world_size, world_size))
    make_caches(setup.config)
    caches = open_caches(setup.config, tokenizer)
    tokenizer.chat_template = caches[0].meta.chat_template
    config = pin_sources(setup, caches).config
    return config, tokenizer, *make_plans(config, caches, setup.budget)
