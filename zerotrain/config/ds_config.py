"""Merge the DeepSpeed config file with the run config.

`ds_configs/*.json` set ZeRO stage, offload and communication, and have "auto" where the value comes
from the run config. The same files work with transformers' Trainer and accelerate, and their files
work here. Where both configs set a value, the values must agree.
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from zerotrain.config.parse import likely, plain_config
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError, describe
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import Machine

# DeepSpeed's schedulers, by the names that transformers' pages give them. DeepSpeed's warm-up
# differs: it begins with two updates at a rate of 0, and is logarithmic by default.
SCHEDULERS = {
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}
# Supported keys of DeepSpeed 0.19.8, in the blocks where DeepSpeed ignores unknown keys or where
# this repository does not support all. DeepSpeed itself refuses unknown keys in the other blocks.
KEYS = {
    "": """
        aio bf16 checkpoint comms_logger communication_data_type compile csv_monitor
        data_types disable_python_gc dump_state flops_profiler fp16 gradient_accumulation_steps
        gradient_clipping gradient_predivide_factor log_level memory_breakdown optimizer
        prescale_gradients sequence_parallel_size steps_per_print tensor_parallel tensorboard
        timers train_micro_batch_size_per_gpu wall_clock_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        """,
    "optimizer": "type legacy_fusion params",
    "optimizer.params": """
        adam_w_mode betas eps foreach fused lr max_grad_norm torch_adam weight_decay
        """,
    "checkpoint": "checkpoint_serialization tag_validation parallel_write",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "tensor_parallel": "autotp_size vocab_parallel_lm_head",
}
# Features of DeepSpeed that are not supported, or that it has removed. It refuses some of them even
# if they are off, so they are left out then.
FEATURES = """
    activation_checkpointing amp autotuning comet compression_training curriculum_learning
    data_efficiency eigenvalue elasticity expert_parallel graph_harvesting hybrid_engine nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients torch_autocast wandb
"""
COMMENT = ("_", "/", "#", "$")
"""How keys of comments begin, which are left out: "_comment", "//" ..."""
BLOCKS = (
    "bf16", "fp16", "zero_optimization", "checkpoint", "data_types", "tensor_parallel",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params",
)  # fmt: skip
OPTIONAL_BLOCKS = (
    "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "comms_logger",
    "compile",
)  # fmt: skip
# The only values that train correctly and can be resumed from, and why others do not.
SUPPORTED_VALUES = {
    "zero_optimization.compute_grad_norm": (True, "infinite gradients would be applied"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has removed it"),
    "zero_optimization.cpu_offload": (False, "offload_optimizer has taken its place"),
    "zero_optimization.cpu_offload_param": (False, "offload_param has taken its place"),
    "zero_optimization.offload_optimizer.ratio": (1, "the share on the GPU would not be trained"),
    "zero_optimization.offload_optimizer.super_offload": (False, "its moments cannot be saved"),
    "zero_optimization.zero_quantized_weights": (False, "the losses would change"),
    "zero_optimization.zero_quantized_gradients": (False, "the losses would change"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "the losses would change"),
    "compile.deepcompile": (False, "model.compile compiles each block instead"),
    "gradient_predivide_factor": (1, "the stage alone decides what is divided when"),
    "optimizer.params.max_grad_norm": (None, "train.gradient_clipping sets it"),
    "bf16.check_grad_overflow": (True, "infinite gradients would be applied"),
    "bf16.bf16_master_weights_and_grads": (False, "master weights are in fp32"),
    "fp16.fp16_master_weights_and_grads": (False, "master weights are in fp32"),
}
# Keys that DeepSpeed ignores below stage 3, and their values there.
AT_STAGE_3 = {
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.zero_hpz_partition_size": 1,
}


def resolve_ds_config(
    config: Config, machine: Machine, hidden_size: int
) -> tuple[Config, dict[str, Any]]:
    """Read the DeepSpeed config file, merge it with the run config, and check the result.

    Args:
        machine: gives the precision if neither config does, and the ranks per node.
        hidden_size: of the model; Hugging Face derives ZeRO-3's bucket sizes from it.

    Returns:
        The run config, whose train.precision and train.lr_schedule are no longer auto, and the
        merged DeepSpeed config, in which no value is "auto".

    Raises:
        UserError: the file cannot be read, a key or value is not supported, or a value contradicts
            the run config.
    """
    file = config.ds_config
    merged = read_ds_config(file)
    train = config.train
    chosen = {}
    if train.precision == "auto":
        enabled = (name for name in ("bf16", "fp16") if merged[name].get("enabled") is True)
        chosen["precision"] = next(enabled, machine.precision)
    scheduler, named = merged["scheduler"], train.lr_schedule
    kind = scheduler.get("type", "auto")
    if named == "auto" or kind in (named, SCHEDULERS.get(named)):
        # make_schedule fills in "auto", as Trainer does. A last_batch_iteration of -1 means none.
        own = {n: value for n, value in scheduler["params"].items() if value not in ("auto", -1)}
        chosen["lr_schedule"] = "cosine" if kind == "auto" else kind
        chosen["lr_schedule_args"] = train.lr_schedule_args | own
    try:
        config = replace(config, train=replace(train, **chosen))
    except ValidationError as error:
        raise UserError(
            f"{file}: scheduler: {json.dumps(scheduler)} is not supported; use WarmupLR, "
            "WarmupDecayLR or WarmupCosineLR, or remove it and choose a train.lr_schedule"
        ) from error
    _fill_from_run(merged, config)
    merged = _with_defaults(merged, config.output_dir, machine.local_ranks, hidden_size)
    if problem := _find_problem(merged, config):
        raise UserError(f"{file}: {problem}")
    return config, merged


def zero_stage(ds_config: dict[str, Any]) -> int:
    """Return the ZeRO stage, 0 to 3."""
    return ds_config["zero_optimization"].get("stage", 0)


def group_sizes(ds_config: dict[str, Any]) -> tuple[int, int]:
    """Return the sizes of a tensor-parallel and of a sequence-parallel group."""
    tensor_parallel = ds_config.get("tensor_parallel", {}).get("autotp_size", 1)
    return tensor_parallel, ds_config.get("sequence_parallel_size", 1)


def secondary_ranks(ds_config: dict[str, Any]) -> int:
    """Return the size of hpZ's secondary group (ZeRO++); 1 if hpZ is off."""
    return ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)


def offload_devices(ds_config: dict[str, Any]) -> dict[str, str]:
    """Return where ZeRO keeps `optimizer` and `param`: cpu, nvme, or none for the GPU."""
    zero = ds_config["zero_optimization"]
    return {
        what: (zero.get(f"offload_{what}") or {}).get("device", "none")
        for what in ("optimizer", "param")
    }


def adam_rule(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return what of Adam's rule the optimizer block alone decides, whichever implementation runs:
    key -> value.
    """
    optimizer = ds_config["optimizer"]
    params = optimizer["params"]
    # DeepSpeed's Adam is AdamW unless adam_w_mode is false.
    decoupled = optimizer["type"].lower() == "adamw" or params.get("adam_w_mode", True)
    return {
        "optimizer.params.eps": params.get("eps", 1e-8),
        "optimizer.params.adam_w_mode": bool(decoupled),
    }


def check_ranks(config: Config, ds_config: dict[str, Any], ranks: int) -> None:
    """Check the number of ranks.

    Raises:
        UserError: the groups of ranks do not divide it, or it exceeds the global batch.
    """
    group = math.prod(group_sizes(ds_config))
    for size in (group, secondary_ranks(ds_config)):
        if ranks % size:
            raise UserError(
                f"{config.ds_config}: {ranks} ranks cannot be divided into groups of {size}; "
                "change autotp_size, sequence_parallel_size or zero_hpz_partition_size"
            )
    train = config.train
    if train.global_batch < ranks // group:
        raise UserError(
            f"train.{train.global_batch_key}: {train.global_batch} is smaller than the number of "
            f"micro-batches that run at the same time ({ranks // group}); raise it or use fewer "
            "ranks"
        )


def check_machine(config: Config, ds_config: dict[str, Any], machine: Machine) -> None:
    """Check that this machine can run the config.

    Args:
        ds_config: returned by resolve_ds_config.

    Raises:
        UserError: it needs a GPU, fp16 or libaio, which the machine lacks; or as in check_ranks.
    """
    check_ranks(config, ds_config, machine.ranks)
    # On some CPUs bitsandbytes 0.50 trains until the first evaluation, which packs the weights
    # differently.
    if config.model.quantization and machine.device != "cuda":
        raise UserError("model.quantization: needs an NVIDIA GPU; remove it")
    if ds_config["fp16"]["enabled"] and not get_accelerator().is_fp16_supported():
        raise UserError(
            f"{config.ds_config}: fp16.enabled: this machine has no fp16 in DeepSpeed; "
            'set train.precision to fp32 or bf16, and fp16.enabled to "auto"'
        )
    if "nvme" in offload_devices(ds_config).values() and not AsyncIOBuilder().is_compatible():
        raise UserError(
            f"{config.ds_config}: zero_optimization: device nvme needs libaio and a C++ compiler; "
            "install the packages libaio-dev and g++"
        )


def read_ds_config(file: str) -> dict[str, Any]:
    """Return the file's values. BLOCKS that it lacks are added, empty.

    Raises:
        UserError: the file cannot be read, or is not a DeepSpeed config.
    """
    try:
        raw = json.loads(
            read_text(file, "ds_config: "),
            object_pairs_hook=_without_comments,
        )
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: not JSON, which has neither comments nor commas after the last value: "
            f"{describe(error)}; convert YAML with python -c 'import json, sys, yaml; "
            f"print(json.dumps(yaml.safe_load(sys.stdin)))' < {file} > ds.json; give a recipe with "
            "--config; in place of accelerate's config, give the file that its "
            "deepspeed_config_file names, or the file of ds_configs/ with the same zero_stage and "
            "offload devices"
        ) from error
    if not isinstance(raw, dict):
        raise UserError(f"{file}: is not a DeepSpeed config, which is an object {{...}}")
    for name in FEATURES.split():
        if name in raw and raw[name] != {} and _is_off(raw[name]):
            del raw[name]
    for path in (*BLOCKS, *OPTIONAL_BLOCKS):
        parent, _, name = path.rpartition(".")
        blocks = _at(raw, parent)
        block = blocks.setdefault(name, {}) if path in BLOCKS else blocks.get(name) or {}
        if not isinstance(block, dict):
            raise UserError(f"{file}: {path}: is {json.dumps(block)}; use an object {{...}}")
    return raw


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict_raise_error_on_duplicate_keys(pairs)
    return {name: value for name, value in values.items() if not name.startswith(COMMENT)}


def _is_off(value: Any) -> bool:
    """Return whether a value or a block switches a feature off. A block has "enabled": false,
    or its values are all false, null or numbers, which switch nothing on.
    """
    if not isinstance(value, dict):
        return value in (False, None)
    if "enabled" in value:
        return value["enabled"] is False
    return all(_is_off(v) or type(v) in (int, float) for v in value.values())


def _fill_from_run(merged: dict[str, Any], config: Config) -> None:
    """Fill in the values that the run config sets.

    Raises:
        UserError: the file has a different value, and not "auto".
    """
    if "type" not in merged["optimizer"]:
        merged["optimizer"]["type"] = "AdamW"
        params = merged["optimizer"]["params"]
        # DeepSpeed's own Adam needs a compiler.
        if params.setdefault("torch_adam", True):
            params.setdefault("fused", True)
    # The number of micro-batches differs between steps, and train.py tells the engine where a step
    # ends. 1 x 1 disables DeepSpeed's own batch arithmetic.
    values = {
        "train_micro_batch_size_per_gpu": (1, "data.micro_batch_tokens"),
        "gradient_accumulation_steps": (1, "data.micro_batch_tokens"),
        "bf16.enabled": (config.train.precision == "bf16", "train.precision"),
        "fp16.enabled": (config.train.precision == "fp16", "train.precision"),
    }
    # train.py sets the scaled and scheduled rate before each step.
    for path, key in (
        ("scheduler.type", "lr_schedule"),
        ("train_batch_size", config.train.global_batch_key),
        ("gradient_clipping", "gradient_clipping"),
        ("optimizer.params.lr", "learning_rate"),
        ("optimizer.params.weight_decay", "weight_decay"),
        ("optimizer.params.betas", "adam_betas"),
    ):
        values[path] = plain_config(config)["train"][key], f"train.{key}"
    if merged["tensor_parallel"]:
        values["tensor_parallel.vocab_parallel_lm_head"] = False, "the loss, of all logits,"
    for path, (value, source) in values.items():
        parent, _, name = path.rpartition(".")
        block = _at(merged, parent)
        stated = block.get(name, "auto")
        if stated not in ("auto", value):
            raise UserError(
                f"{config.ds_config}: {path}: is {json.dumps(stated)}, but {source} makes it "
                f'{json.dumps(value)}; set it to "auto", or make the two equal (train.lr_schedule '
                "and train.precision may be auto)"
            )
        block[name] = value
    del merged["scheduler"]  # zerotrain/training/optimizer.py makes the schedule
    del merged["train_batch_size"]  # DeepSpeed would require 1 x 1 x ranks


def _with_defaults(
    merged: dict[str, Any], output_dir: str, local_ranks: int, hidden_size: int
) -> dict[str, Any]:
    """Return the config with Hugging Face's sizes or DeepSpeed's defaults in place of "auto", and
    with a folder for NVMe that no other run has: DeepSpeed's files have the same names in all runs.
    """
    defaults = {
        "stage": "auto",  # refused by _find_problem, because Trainer and accelerate differ
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
        "zero_hpz_partition_size": local_ranks,
    }
    run = Path(output_dir).absolute()
    for name in ("offload_optimizer", "offload_param"):
        block = merged["zero_optimization"].get(name) or {}
        folder = block.get("nvme_path")
        if isinstance(folder, str) and str(run) not in folder:
            own = run / "nvme" if folder == "auto" else Path(folder, *run.parts[1:])
            block["nvme_path"] = str(own)

    return json.loads(
        json.dumps(merged),
        object_hook=lambda block: {
            name: defaults[name] if value == "auto" else value
            for name, value in block.items()
            if value != "auto" or name in defaults
        },
    )


def _find_problem(merged: dict[str, Any], config: Config) -> str | None:
    """Return the first key that DeepSpeed would ignore, refuse or train wrongly with, or that is
    not supported here, and why; None if there is none. Later checks rely on earlier ones.
    """
    tensor, sequence = group_sizes(merged)
    stage = zero_stage(merged)
    for path, value, least in (
        ("zero_optimization.stage", stage, 0),
        ("zero_optimization.zero_hpz_partition_size", secondary_ranks(merged), 1),
        ("sequence_parallel_size", sequence, 1),
        ("tensor_parallel.autotp_size", tensor, 1),
    ):
        if type(value) is not int or value < least:  # DeepSpeed would convert "3" and true
            return f"{path}: is {json.dumps(value)}; use a whole number, at least {least}"
    for block, text in KEYS.items():
        for name in _at(merged, block):
            if name not in text.split():
                path = f"{block}.{name}".removeprefix(".")
                hint = likely(name, text.split())
                return f"{path}: unknown, or not supported here; remove it{hint}"
    eps = merged["optimizer"]["params"].get("eps", 1e-8)
    if type(eps) not in (int, float) or not 0 <= eps < 1:  # DeepSpeed's own Adam takes any
        return f"optimizer.params.eps: is {json.dumps(eps)}; use a number from 0 to 1, such as 1e-8"
    numbers = merged.keys() - {"communication_data_type", "log_level"}
    for path, value in _leaves(merged):
        is_number = path in numbers or path.startswith("optimizer.params.")
        if is_number and isinstance(value, str):
            return f"{path}: is {json.dumps(value)}; use a number, true or false"
        only, why = SUPPORTED_VALUES.get(path, (value, ""))
        if value != only:
            return f"{path}: is {json.dumps(value)}, but {why}; remove it"
        if stage > 1 and path == "prescale_gradients" and value:
            return f"{path}: DeepSpeed refuses it from stage 2 on; remove it"
        if stage < 3 and (value != AT_STAGE_3.get(path, value) or value == "nvme"):
            return f"{path}: {json.dumps(value)} needs zero_optimization.stage 3; remove it"
    kind = merged["optimizer"]["type"]
    if min(tensor, sequence) > 1:
        return "sequence_parallel_size: does not work with autotp_size; set one of them to 1"
    if "zenflow" in merged["zero_optimization"]:
        return "zero_optimization.zenflow: it corrupts weights; remove it"
    if secondary_ranks(merged) > 1 and set(offload_devices(merged).values()) != {"none"}:
        return "zero_optimization.zero_hpz_partition_size: does not work with offload; remove one"
    if str(kind).lower() not in ("adam", "adamw"):
        return f"optimizer.type: is {json.dumps(kind)}; use AdamW or Adam"
    if config.train.precision == "fp16" and stage == 0:
        return (
            "zero_optimization.stage: is 0, where DeepSpeed scales fp16 gradients wrongly; set the "
            'stage to 1, or train.precision to bf16 and fp16.enabled to "auto"'
        )
    if config.model.quantization and stage == 3:
        return (
            "zero_optimization.stage: is 3, which cannot partition the 4-bit weights of "
            "model.quantization; use a stage from 0 to 2, or LoRA without quantization"
        )
    try:
        parsed = DeepSpeedConfig(copy.deepcopy(merged))  # it changes its argument
        if parsed.monitor_config.tensorboard.enabled:
            import torch.utils.tensorboard  # noqa: F401  DeepSpeed imports it after the start
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))  # without its block
        path = next((path for path, _ in _leaves(merged) if path.endswith(f".{key}")), key)
        hint = likely(key.rpartition(".")[2], [*DeepSpeedZeroConfig.model_fields])
        got = json.dumps(first["input"])
        return f"{path}: {first['msg']}, got {got}; change or remove it{hint}"
    except Exception as error:  # DeepSpeed's assertions and errors, all of them about `merged`
        return f"DeepSpeed refuses it: {describe(error)}"
    return None


def _at(merged: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the block at a dotted path."""
    for name in path.split(".") if path else ():
        merged = merged[name]
    return merged


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of everything that is not itself a block."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
