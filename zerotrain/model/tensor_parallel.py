"""Whether a model can be split among the ranks of a tensor-parallel group by DeepSpeed's AutoTP,
which follows transformers' plan for the model.

DeepSpeed 0.19.8 also splits models that it then runs or trains wrongly: Apertus, whose activations
have parameters, Doge and Youtu.
"""

from typing import Any

from torch import nn

from zerotrain.config.ds_config import gpu_keys, offload_devices, secondary_ranks, zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import heads_divide
from zerotrain.model.trained import Counts
from zerotrain.runtime.errors import UserError

SUPPORTED_TYPES = """
    arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text granite helium jais2 llama
    ministral ministral3 mistral nanochat nemotron olmo phi qwen2 qwen3 qwen3_5_text seed_oss
    smollm3 starcoder2 vaultgemma
"""
"""Values of model_type whose models may be split; test_tensor_parallel.py compares a split model of
each with the whole one.
"""


def check_tensor_parallel(
    config: Config, ds_config: dict[str, Any], skeleton: nn.Module, counts: Counts, size: int
) -> None:
    """Refuse what could not be split, or would not be trained as the whole model is.

    Args:
        skeleton: the model on the meta device.
        size: ranks of a group.

    Raises:
        UserError: says why, and what to change.
    """
    if size == 1:
        return
    name = type(skeleton).__name__
    others = gpu_keys(ds_config)
    if config.model.compile:
        others.append("model.compile")
    if secondary_ranks(ds_config) > 1:
        others.append("zero_optimization.zero_hpz_partition_size")
    if "nvme" in offload_devices(ds_config).values():
        others.append("offload to nvme")
    if zero_stage(ds_config) == 0:
        problem = "is not supported at ZeRO stage 0; set the stage to 1"
    elif others:
        problem = f"is not supported together with {others[0]}; remove one of them"
    elif counts.trained < counts.total:
        problem = "needs all weights to be trained; remove model.lora and model.trainable, or it"
    elif skeleton.config.model_type not in SUPPORTED_TYPES.split():
        problem = f"has not been tried with {name}; remove it"
    elif not heads_divide(skeleton, size):
        problem = f"has to divide the heads of keys and values of {name}; change it"
    else:
        return
    raise UserError(f"{config.ds_config}: tensor_parallel.autotp_size {size} {problem}")
