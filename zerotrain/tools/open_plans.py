"""The data plans of a config, without a process group."""

import torch
from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan, make_budget, make_plans
from zerotrain.model.architecture import check_model_fits, linear_cost, meta_model
from zerotrain.model.load import load_model_config, load_tokenizer
from zerotrain.model.packing import resolve_batching


def open_plans(
    config: Config, world_size: int
) -> tuple[Config, PreTrainedTokenizerBase, DataPlan, dict[str, DataPlan]]:
    """The config with data.batching resolved as on CPU, the tokenizer, the training plan and that
    of each held-out set of a run on `world_size` ranks: to inspect the data without a process
    group.

    Raises:
        UserError: whatever train.py would refuse.
    """
    tokenizer, model_config = load_tokenizer(config), load_model_config(config)
    skeleton = meta_model(model_config, config.model.trust_remote_code)
    check_model_fits(config, skeleton, tokenizer)
    config, _ = resolve_batching(config, skeleton, torch.device("cpu"), "fp32")
    budget = make_budget(config.data, world_size, linear_cost(model_config))
    return config, tokenizer, *make_plans(config, tokenizer, budget)
