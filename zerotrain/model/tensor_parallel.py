"""Whether a model can be split among the ranks of a tensor-parallel group by DeepSpeed's AutoTP,
which follows transformers' plan for the model.
"""

from typing import Any

from deepspeed.module_inject.autotp_config import PartitionType
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from torch import nn

from zerotrain.config.ds_config import gpu_keys, offload_devices, zero_stage
from zerotrain.config.schema import Config
from zerotrain.model.architecture import text_config_of
from zerotrain.model.trained import Counts
from zerotrain.runtime.errors import UserError


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
    text = text_config_of(skeleton.config)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    others = gpu_keys(ds_config)
    if config.model.compile:
        others.append("model.compile")
    if ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
        others.append("zero_optimization.zero_hpz_partition_size")
    if "nvme" in offload_devices(ds_config):
        others.append("offload to nvme")
    if zero_stage(ds_config) == 0:
        problem = "is not supported at ZeRO stage 0; set the stage to 1"
    elif others:
        problem = f"is not supported together with {others[0]}; remove one of them"
    elif counts.trained < counts.total:
        problem = "needs all weights to be trained; remove model.lora and model.trainable, or it"
    elif not _can_be_split(skeleton):
        problem = (
            f"is not possible for {name}: DeepSpeed cannot follow transformers' plan; remove it"
        )
    elif heads % size:
        problem = f"has to divide the {heads} heads of keys and values of {name}; change it"
    else:
        return
    raise UserError(f"{config.ds_config}: tensor_parallel.autotp_size {size} {problem}")


def _can_be_split(skeleton: nn.Module) -> bool:
    """Whether transformers has a plan for the model's layers, in terms that DeepSpeed knows."""
    try:
        plan = TPPlanConverter.convert(_get_hf_tp_plan(skeleton)) or []
    except ValueError:  # for example, of a mixture of experts
        return False
    return any(layer.partition_type == PartitionType.ROW for layer in plan)
