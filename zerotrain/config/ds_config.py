"""The DeepSpeed config file merged with the run config.

`ds_configs/*.json` set ZeRO stage, offload and communication, and have "auto" where the value comes
from the run config. The same files work with transformers' Trainer and accelerate, and files made
for those work here. Where both configs set a value, the values must agree.
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError, describe, similar
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import Machine

# DeepSpeed's schedulers and the schedules of transformers that are used in their place.
SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
# Supported keys of DeepSpeed 0.19.8, in the blocks where it ignores unknown ones, or where not all
# are supported here. Other blocks are pydantic models of DeepSpeed, which refuse unknown keys.
KEYS = {
    "": """
        aio bf16 checkpoint comet comms_logger communication_data_type compile csv_monitor
        data_types disable_python_gc dump_state flops_profiler fp16 gradient_accumulation_steps
        gradient_clipping gradient_predivide_factor log_level memory_breakdown optimizer
        prescale_gradients sequence_parallel_size steps_per_print tensor_parallel tensorboard
        timers train_micro_batch_size_per_gpu wandb wall_clock_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        """,
    "optimizer": "type legacy_fusion params",
    "checkpoint": "checkpoint_serialization tag_validation parallel_write",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "tensor_parallel": "autotp_size vocab_parallel_lm_head",
}
BLOCKS = (
    "bf16", "fp16", "zero_optimization", "checkpoint", "compile", "data_types", "tensor_parallel",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params",
)  # fmt: skip
OPTIONAL_BLOCKS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
# The only values that train correctly and can be resumed from, and what others would do.
ONLY = {
    "zero_optimization.compute_grad_norm": (True, "infinite gradients would be applied"),
    "zero_optimization.cpu_offload": (False, "offload_optimizer has taken its place"),
    "zero_optimization.cpu_offload_param": (False, "offload_param has taken its place"),
    "zero_optimization.offload_optimizer.ratio": (1, "what stays on the GPU would not be trained"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed refuses it"),
    "prescale_gradients": (False, "DeepSpeed refuses it from stage 2 on"),
    "gradient_predivide_factor": (1, "DeepSpeed refuses it from stage 2 on"),
    "optimizer.params.max_grad_norm": (None, "train.gradient_clipping sets it"),
    "bf16.check_grad_overflow": (True, "infinite gradients would be applied"),
    "bf16.bf16_master_weights_and_grads": (False, "master weights are in fp32"),
    "fp16.fp16_master_weights_and_grads": (False, "master weights are in fp32"),
}
# What needs an NVIDIA GPU, whatever its value if it is not false.
ON_GPU = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.offload_optimizer.super_offload",
    "compile.deepcompile",
)
EPSILON = 1e-8  # of AdamW, where optimizer.params.eps does not set another


def resolve_ds_config(
    config: Config, machine: Machine, hidden_size: int
) -> tuple[Config, str, dict[str, Any]]:
    """Read the DeepSpeed config file, resolve what it shares with the run config, and check it.

    Args:
        machine: gives the precision where neither config does, and the ranks of a node.
        hidden_size: of the model; Hugging Face derives ZeRO-3's bucket sizes from it.

    Returns:
        The run config with train.lr_schedule; the precision; and the merged DeepSpeed config, in
        which no value is "auto".

    Raises:
        UserError: an unreadable file, a key or value that is not supported, or a value that
            contradicts the run config; names both.
    """
    file = config.ds_config
    merged = read_ds_config(file)
    config = _with_schedule(config, merged.pop("scheduler"))
    precision = config.train.precision
    if precision == "auto":
        stated = [name for name in ("bf16", "fp16") if merged[name].get("enabled") is True]
        precision = [*stated, machine.precision][0]
    _merge(merged, config, precision, machine.local_ranks, hidden_size)
    _check(merged, config, precision)
    return config, precision, merged


def zero_stage(ds_config: dict[str, Any]) -> int:
    """ZeRO stage, 0 to 3."""
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def group_sizes(ds_config: dict[str, Any]) -> tuple[int, int]:
    """Ranks that share each linear layer, and ranks that share each row."""
    tensor_parallel = ds_config.get("tensor_parallel", {}).get("autotp_size", 1)
    return tensor_parallel, ds_config.get("sequence_parallel_size", 1)


def offload_devices(ds_config: dict[str, Any]) -> dict[str, str]:
    """Where ZeRO-Offload keeps optimizer and parameters: cpu, nvme, or none, on the GPU."""
    zero = ds_config.get("zero_optimization", {})
    return {
        what: (zero.get(f"offload_{what}") or {}).get("device", "none")
        for what in ("optimizer", "param")
    }


def gpu_keys(ds_config: dict[str, Any]) -> list[str]:
    """The dotted paths of what needs an NVIDIA GPU."""
    return [path for path, value in _leaves(ds_config) if path in ON_GPU and value]


def check_ranks(config: Config, ds_config: dict[str, Any], ranks: int) -> None:
    """Refuse a number of ranks that is no multiple of those that share something, or with which
    some have no example.
    """
    group = math.prod(group_sizes(ds_config))
    for size in (group, ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)):
        if ranks % size:
            raise UserError(
                f"{config.ds_config}: {ranks} ranks cannot be divided into groups of {size}, by "
                "autotp_size, sequence_parallel_size or zero_hpz_partition_size; change one of them"
            )
    train = config.train
    if train.global_batch < ranks // group:
        raise UserError(
            f"train.{train.global_batch_key}: {train.global_batch} is smaller than the number of "
            f"ranks with micro-batches of their own ({ranks // group}); raise it or use fewer ranks"
        )


def check_machine(config: Config, ds_config: dict[str, Any], machine: Machine) -> None:
    """Refuse what the machine of this process, or so many ranks, cannot run.

    Args:
        ds_config: of resolve_ds_config.

    Raises:
        UserError: a key that needs a GPU on a machine without one, fp16 where DeepSpeed has none,
            NVMe without libaio, or as in check_ranks.
    """
    check_ranks(config, ds_config, machine.ranks)
    for path in gpu_keys(ds_config) if machine.device != "cuda" else ():
        raise UserError(f"{config.ds_config}: {path} needs an NVIDIA GPU; remove it")
    if ds_config["fp16"]["enabled"] and not get_accelerator().is_fp16_supported():
        raise UserError(
            f"{config.ds_config}: DeepSpeed does not compute in fp16 on this machine; set "
            'train.precision to fp32 or bf16, and fp16.enabled to "auto"'
        )
    if "nvme" in offload_devices(ds_config).values() and not AsyncIOBuilder().is_compatible():
        raise UserError(
            f"{config.ds_config}: device nvme needs libaio and a C++ compiler; install the "
            "packages libaio-dev and g++"
        )


def read_ds_config(file: str) -> dict[str, Any]:
    """The file's values, with the blocks that are read here.

    Raises:
        UserError: it cannot be read, or is not a DeepSpeed config.
    """
    try:
        raw = json.loads(
            read_text(file, "ds_config: "), object_pairs_hook=dict_raise_error_on_duplicate_keys
        )
    except (ValueError, RecursionError) as error:
        cure = "JSON has neither comments nor commas after the last value"
        if Path(file).suffix in (".yaml", ".yml"):
            cure = (
                "--config takes a recipe; of a config of accelerate, give the file that its "
                "deepspeed_config_file names, or the one of ds_configs/ with its zero_stage and "
                "offload devices"
            )
        raise UserError(f"{file}: not JSON: {describe(error)}; {cure}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file}: a DeepSpeed config has to be an object {{...}}")
    for path in (*BLOCKS, *OPTIONAL_BLOCKS):
        parent, _, name = path.rpartition(".")
        blocks = _at(raw, parent)
        block = blocks.setdefault(name, {}) if path in BLOCKS else blocks.get(name) or {}
        if not isinstance(block, dict):
            raise UserError(f"{file}: {path} is {json.dumps(block)}, not an object {{...}}")
    return raw


def _with_schedule(config: Config, block: dict[str, Any]) -> Config:
    """The config with train.lr_schedule: as given, else the scheduler block's, else cosine.

    Raises:
        UserError: the block has no equal schedule, or contradicts the run config.
    """
    own = config.train.lr_schedule
    name = own or "cosine"
    if "type" in block:
        name = SCHEDULES.get(str(block["type"]))
        set_here = [key for key, value in block["params"].items() if value != "auto"]
        if name is None or own not in (None, name) or set_here:
            raise UserError(
                f"{config.ds_config}: scheduler is {json.dumps(block)}, but the run config sets "
                f"the schedule (train.lr_schedule is {own}): remove the block, or make its type "
                f'{" or ".join(SCHEDULES)}, the same schedule, and its params "auto"'
            )
    return replace(config, train=replace(config.train, lr_schedule=name))


def _merge(
    merged: dict[str, Any], config: Config, precision: str, local_ranks: int, hidden_size: int
) -> None:
    """Fill in what follows from the run config.

    Raises:
        UserError: the file has another value.
    """
    file = config.ds_config
    train = config.train

    def fill(path: str, value: Any, source: str) -> None:
        """Set `path`; the file may state the same value or "auto"."""
        *parents, leaf = path.split(".")
        block = merged
        for parent in parents:
            block = block.setdefault(parent, {})
        stated = block.get(leaf, "auto")
        if stated not in ("auto", value):
            raise UserError(
                f"{file}: {path} is {json.dumps(stated)}, but {source}; set it to "
                '"auto" in the file, or change one of the two'
            )
        block[leaf] = value

    if "type" not in merged["optimizer"]:
        merged["optimizer"]["type"] = "AdamW"
        params = merged["optimizer"]["params"]
        if params.setdefault("torch_adam", True):
            params.setdefault("fused", True)
    # Micro-batches are limited by tokens, so their number differs between steps and train.py tells
    # the engine where a step ends. 1 x 1 disables DeepSpeed's own batch arithmetic.
    for path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        fill(path, 1, "micro-batches follow from data.micro_batch_tokens")
    for name in ("bf16", "fp16"):
        fill(f"{name}.enabled", precision == name, f"the run's precision is {precision}")
    # train.py sets the scaled and scheduled rate before each step
    for path, key in (
        ("train_batch_size", train.global_batch_key),
        ("gradient_clipping", "gradient_clipping"),
        ("optimizer.params.lr", "learning_rate"),
        ("optimizer.params.weight_decay", "weight_decay"),
        ("optimizer.params.betas", "adam_betas"),
    ):
        value = getattr(train, key)
        value = list(value) if isinstance(value, tuple) else value
        fill(path, value, f"train.{key} is {value}")
    if merged["tensor_parallel"]:
        fill("tensor_parallel.vocab_parallel_lm_head", False, "the loss is that of all logits")
    del merged["train_batch_size"]  # DeepSpeed would require it to be 1 x 1 x ranks
    defaults = {
        "optimizer.params": {"eps": EPSILON},
        "zero_optimization": {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "zero_hpz_partition_size": local_ranks,
            "stage3_gather_16bit_weights_on_model_save": False,  # no weights are saved that way
        },
    }
    for path, values in defaults.items():
        parent, _, name = path.rpartition(".")
        block = _at(merged, parent).get(name) or {}
        for name, value in values.items():
            if block.get(name) == "auto":
                block[name] = value
    run = Path(config.output_dir).absolute()
    for path in OPTIONAL_BLOCKS:
        block = merged["zero_optimization"].get(path.rpartition(".")[2]) or {}
        folder = block.get("nvme_path")
        # a folder of the run's own: DeepSpeed's files there have the same names in every run
        if isinstance(folder, str) and str(run) not in folder:
            own = run / "nvme" if folder == "auto" else Path(folder, *run.parts[1:])
            block["nvme_path"] = str(own)


def _check(merged: dict[str, Any], config: Config, precision: str) -> None:
    """Raise UserError for the first problem of the merged config."""
    for problem in chain(_problems(merged, config, precision), _refusals(merged)):
        raise UserError(f"{config.ds_config}: {problem}")


def _problems(merged: dict[str, Any], config: Config, precision: str) -> Iterator[str]:
    """What DeepSpeed would silently ignore or train wrongly, or what is not supported."""
    stage = zero_stage(merged)
    zero = merged["zero_optimization"]
    copies = zero.get("zero_hpz_partition_size", 1)
    tensor, sequence = group_sizes(merged)
    for path, value, least in (
        ("zero_optimization.stage", stage, 0),
        ("zero_optimization.zero_hpz_partition_size", copies, 1),
        ("sequence_parallel_size", sequence, 1),
        ("tensor_parallel.autotp_size", tensor, 1),
    ):
        if type(value) is not int or value < least:  # DeepSpeed would convert "3" and true
            yield f"{path} is {json.dumps(value)}; use a whole number from {least} on"
            return
    if min(sequence, tensor) > 1:
        yield (
            f"sequence_parallel_size is {sequence} and tensor_parallel.autotp_size {tensor}; set "
            "one of them to 1"
        )
    for block, text in KEYS.items():
        for name in _at(merged, block):
            if name not in text.split():
                path = f"{block}.{name}".removeprefix(".")
                cure = similar(name, text.split())
                yield f"{path}: unknown, or not supported here; remove it{cure}"
    for path, value in _leaves(merged):
        if value == "auto":
            yield f'{path} is "auto", but the run config has no value for it'
        only, why = ONLY.get(path, (value, ""))
        if value != only:
            yield f"{path} is {json.dumps(value)}: {why}; remove it"
    if "zenflow" in zero:
        yield "zero_optimization.zenflow: it corrupts weights; remove it"
    devices = offload_devices(merged)
    at_stage_3 = {
        "device nvme": devices["optimizer"] == "nvme",
        "zero_optimization.offload_param": devices["param"] != "none",
        "zero_optimization.zero_hpz_partition_size": copies > 1,
        **{path: path.startswith("zero") for path in gpu_keys(merged)},
    }
    for path, is_set in at_stage_3.items():
        if is_set and stage < 3:  # DeepSpeed would ignore it
            yield f"{path} needs zero_optimization.stage 3; remove it"
    if copies > 1 and set(devices.values()) != {"none"}:
        yield (
            "zero_optimization.zero_hpz_partition_size does not work with offload; remove one of "
            "the two"
        )
    offloaded = zero.get("offload_optimizer") or {}
    if offloaded.get("super_offload") and not config.train.gradient_clipping:
        yield (
            "zero_optimization.offload_optimizer.super_offload updates in the backward pass where "
            "gradients are not clipped; set train.gradient_clipping"
        )
    if config.model.compile and merged["compile"].get("deepcompile"):
        yield "compile.deepcompile: model.compile is true; remove one of them"
    kind = merged["optimizer"].get("type")
    if str(kind).lower() not in ("adam", "adamw"):
        yield f"optimizer.type is {json.dumps(kind)}: use AdamW or Adam"
    if precision == "fp16" and stage == 0:
        yield (
            "fp16 at zero_optimization.stage 0: DeepSpeed divides gradients there by a loss scale "
            "that it has not multiplied with; set the stage to 1, or use bf16"
        )
    if config.model.quantization and stage == 3:
        yield (
            "zero_optimization.stage is 3, which cannot partition the 4-bit weights of "
            "model.quantization; use a stage from 0 to 2, or LoRA without quantization"
        )


def _refusals(merged: dict[str, Any]) -> Iterator[str]:
    """What DeepSpeed's own parser refuses."""
    try:
        DeepSpeedConfig(copy.deepcopy(merged))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        path = next((path for path, _ in _leaves(merged) if path.endswith(f".{name}")), name)
        problem = f"{first['msg']}, got {first['input']!r}"
        if first["type"] == "extra_forbidden":
            problem = f"unknown key; remove it{similar(name, [*DeepSpeedZeroConfig.model_fields])}"
        yield f"{path}: {problem}"
    except Exception as error:  # its own errors and assertions, all of them about `merged`
        yield f"DeepSpeed refuses it: {describe(error)}"


def _at(merged: dict[str, Any], path: str) -> dict[str, Any]:
    """The block at a dotted path."""
    for name in path.split(".") if path else ():
        merged = merged[name]
    return merged


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of every value that is not itself a block."""
    found = []
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found += _leaves(value, f"{prefix}{key}.") if nested else [(prefix + key, value)]
    return found
