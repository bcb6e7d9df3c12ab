"""What DeepSpeed would refuse or silently ignore in the merged config, told in one line before
anything is loaded.
"""

import difflib
import inspect
import json
import shutil
from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import (
    CUDAMismatchException,
    MissingCUDAException,
    assert_no_cuda_mismatch,
)
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from zerotrain.config.ds_config import leaves, zero_stage
from zerotrain.config.schema import Config
from zerotrain.runtime.errors import UserError

# What DeepSpeed 0.19.8 reads, without what it has removed; tests/test_ds_check.py compares. Other
# blocks are pydantic models of DeepSpeed, which refuse unknown keys themselves.
KEYS = {
    "": """
        activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger
        communication_data_type compile csv_monitor data_efficiency data_types dataloader_drop_last
        datastates_ckpt disable_allgather disable_python_gc dump_state expert_parallel
        flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
        gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation
        memory_breakdown optimizer pipeline prescale_gradients scheduler
        seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel
        tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
        use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
        weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        zero_optimization
        """,
    "optimizer": "type legacy_fusion params",
    "checkpoint": """
        use_node_local_storage checkpoint_serialization tag_validation load_universal writer
        parallel_write
        """,
    "data_types": "buffer_dtype keep_in_fp32_modules param_dtype grad_accum_dtype",
    "aio": "queue_depth intra_op_parallelism use_gds overlap_events block_size single_submit",
}
# Keys without any effect here, and what to set instead.
NO_EFFECT = {
    "activation_checkpointing": "set model.activation_checkpointing of the run config instead",
    "pipeline": "there are no pipeline stages",
    "disable_allgather": "DeepSpeed does not use it",
    "dataloader_drop_last": "an epoch has every row once",
    "aio.thread_count": "DeepSpeed does not read it any more",
    "fp32_allreduce": "set communication_data_type to fp32 instead",
    "allreduce_always_fp32": "set communication_data_type to fp32 instead",
}
ZENFLOW = "DeepSpeed 0.19.8 corrupts weights with it; remove it"
NVME = "checkpoints cannot hold what is on NVMe; use cpu"
PLANNED = "zerotrain/data/plan.py plans the examples of each step; remove it"
# Features of DeepSpeed that are not supported: the values that do not ask for them, and the fix.
UNSUPPORTED = {
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not supported; use ZeRO 3"),
    "tensor_parallel.tp.tp_size": ((0, 1), "tensor parallelism is not supported; use ZeRO 3"),
    "sequence_parallel_size": ((1,), "sequence parallelism is not supported; remove it"),
    "expert_parallel.enabled": ((False,), "expert parallelism is not supported; use ZeRO 3"),
    "gradient_allreduce_op": (("mean",), "the loss is scaled for the mean over ranks; remove it"),
    "managed_gradient_accumulation": ((True,), "train.py sets the boundaries; remove it"),
    "torch_autocast.enabled": ((False,), "train.precision sets the precision; remove it"),
    "data_efficiency.enabled": ((False,), PLANNED),
    "hybrid_engine.enabled": ((False,), "it is for generation between updates; remove it"),
    "autotuning.enabled": ((False,), "it ends the run after a few steps; remove it"),
    "compile.deepcompile": ((False,), "compiling the engine is not supported; remove it"),
    "zero_optimization.compute_grad_norm": (
        (True,),
        "gradients that are not finite would be applied; remove it",
    ),
    "zero_optimization.zenflow": ((), ZENFLOW),
    "zero_optimization.offload_optimizer.device": (("cpu", "none"), NVME),
    "zero_optimization.offload_param.device": (("cpu", "none"), NVME),
    "checkpoint.writer": ((), "its checkpoints cannot be loaded; use checkpoint.async_save"),
    "checkpoint.load_universal": ((False,), "any layout is resumed from; remove it"),
    "datastates_ckpt": ((), "train.py writes the checkpoints; use checkpoint.async_save"),
    "bf16.check_grad_overflow": (
        (True,),
        "gradients that are not finite would be applied; remove it",
    ),
    "bf16.bf16_master_weights_and_grads": ((False,), "master weights are in fp32; remove it"),
    "fp16.fp16_master_weights_and_grads": ((False,), "master weights are in fp32; remove it"),
    "optimizer.params.max_grad_norm": ((), "train.gradient_clipping sets the maximum; remove it"),
}
DTYPES = {
    "fp32": ("fp32", "float32"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")


def check_with_deepspeed(config: Config, merged: dict[str, Any]) -> list[str]:
    """Check the merged config with DeepSpeed's own parser, before anything is built or written.

    Returns:
        A line for every key that has no effect.

    Raises:
        UserError: a key that DeepSpeed does not know, a value that it refuses, an "auto" without
            a value for it, or a feature that is not supported.
    """
    file = config.ds_config
    notes = [f"{file}: {path} has no effect: {advice}" for path, advice in NO_EFFECT.items()
             if _at(merged, path) is not None]  # fmt: skip
    try:
        DeepSpeedConfig(json.loads(json.dumps(merged)))
    except ValidationError as error:
        raise UserError(f"{file}: {_of_model(error, merged)}") from error
    except Exception as error:  # its own errors and assertions, all of them about `merged`
        raise UserError(f"{file}: DeepSpeed refuses it: {_one_line(error)}") from error
    for block, text in KEYS.items():
        prefix = f"{block}." if block else ""
        for name in _at(merged, block) or {} if block else merged:
            if name not in text.split() and prefix + name not in NO_EFFECT:
                raise UserError(f"{file}: {prefix}{name}: {_unknown(name, text.split())}")
    for path, value in leaves(merged):
        block, _, name = path.rpartition(".")
        decides = block.partition(".")[0] in KEYS or name in ("stage", "enabled", "device")
        if value == "auto" and decides and path not in NO_EFFECT:
            raise UserError(f'{file}: {path} is "auto", but the run config has no value for it')
    for path, (without, advice) in UNSUPPORTED.items():
        value = _at(merged, path)
        if value not in (None, *without):
            raise UserError(f"{file}: {path} is {json.dumps(value)}: {advice}")
    _check_precision(file, merged)
    _check_optimizer(file, merged)
    if config.model.quantization and zero_stage(merged) == 3:
        raise UserError(
            f"model.quantization: {file} has ZeRO stage 3, which cannot partition weights in 4 "
            "bits; use a stage from 0 to 2, or LoRA without quantization"
        )
    return notes


def try_engine(config: Config, merged: dict[str, Any]) -> None:
    """Build DeepSpeed's engine around a model of eight weights, to see whether it refuses the
    config; called by all ranks.

    Uses torch's AdamW, which needs no compiler.

    Raises:
        UserError: with DeepSpeed's message.
    """
    trial = json.loads(json.dumps({k: v for k, v in merged.items() if k not in MONITORS}))
    trial["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
    # a part of the optimizer on the GPU (Twin-Flow) needs DeepSpeed's own CPU Adam
    trial.get("zero_optimization", {}).get("offload_optimizer", {}).pop("ratio", None)
    model = torch.nn.Linear(4, 2, bias=False)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=trial
        )
    except Exception as error:  # any error is about the config, since the model is valid
        raise UserError(f"{config.ds_config}: DeepSpeed refuses it: {_one_line(error)}") from error
    engine.destroy()


def _of_model(error: ValidationError, merged: dict[str, Any]) -> str:
    """The first error of one of DeepSpeed's pydantic models."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if not where:
        return f"DeepSpeed refuses it: {_one_line(first['msg'])}"
    blocks = [name for name in merged if _at(merged, ".".join([name, *where])) is not None]
    path = ".".join([*blocks[:1], *where])
    if first["type"] == "extra_forbidden":
        return f"{path}: {_unknown(where[-1], _model_keys(DeepSpeedConfigModel))}"
    return f"{path} is {json.dumps(first['input'], default=str)}: {first['msg']}"


def _model_keys(model: type[DeepSpeedConfigModel]) -> set[str]:
    """The keys of a pydantic model of DeepSpeed and of those that inherit from it."""
    keys = {field.alias or name for name, field in model.model_fields.items()}
    return keys.union(*(_model_keys(inner) for inner in model.__subclasses__()))


def _unknown(name: str, known: Iterable[str]) -> str:
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[near[0]]}?" if near else "remove it"
    return f"unknown key, DeepSpeed {deepspeed.__version__} does not read it; {hint}"


def _check_precision(file: str, merged: dict[str, Any]) -> None:
    """Check that device, data types and ZeRO stage support the precision."""
    enabled = [name for name in ("bf16", "fp16") if merged[name]["enabled"]]
    precision = enabled[0] if enabled else "fp32"
    device, stage = get_accelerator(), zero_stage(merged)
    if precision == "fp16" and stage == 0:
        raise UserError(
            f"{file}: fp16 at zero_optimization.stage 0: DeepSpeed divides gradients there by a "
            "loss scale that it has not multiplied with; set the stage to 1, or use bf16"
        )
    supported = {"bf16": device.is_bf16_supported, "fp16": device.is_fp16_supported}
    if precision in supported and not supported[precision]():
        raise UserError(
            f"{file}: {precision} is enabled, but not supported by the device "
            f"({device.device_name()}); use another train.precision"
        )
    fixes = {"data_types.param_dtype": "remove it"}
    if stage == 0:
        fixes["data_types.grad_accum_dtype"] = "remove it, or set zero_optimization.stage to 1"
    for path, fix in fixes.items():
        value = _at(merged, path)
        if value not in (None, *DTYPES[precision]):
            raise UserError(
                f"{file}: {path} is {json.dumps(value)}, but the run's precision is {precision}, "
                f"at ZeRO stage {stage}; {fix}"
            )


def _check_optimizer(file: str, merged: dict[str, Any]) -> None:
    """Check that it is AdamW or Adam, with parameters of the class that DeepSpeed builds for it,
    which can be compiled here.
    """
    kind, params = merged["optimizer"].get("type"), merged["optimizer"]["params"]
    if str(kind).lower() not in ("adam", "adamw"):
        raise UserError(
            f"{file}: optimizer.type is {json.dumps(kind)}: only AdamW and Adam are supported "
            '(DeepSpeed\'s FusedAdam and CPU Adam are AdamW without "torch_adam"); use AdamW'
        )
    builder = torch.optim.AdamW
    if not params.get("torch_adam"):
        offloaded = _offload(merged, "optimizer") == "cpu"
        builder = getattr(deepspeed.ops.adam, "DeepSpeedCPUAdam" if offloaded else "FusedAdam")
        _check_compiler(file, offloaded)
    first, *known = inspect.signature(builder).parameters
    # the engine removes torch_adam, adam_w_mode and fp32_optimizer_states and sets adamw_mode
    known = {*known, "torch_adam", "adam_w_mode", "fp32_optimizer_states"} - {"adamw_mode", first}
    for name in params:
        if name not in known:
            raise UserError(f"{file}: optimizer.params.{name}: {_unknown(name, known)}")
    common = {n: params[n] for n in ("lr", "betas", "eps", "weight_decay") if n in params}
    try:
        torch.optim.AdamW([torch.zeros(1)], **common)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: optimizer.params: {_one_line(error)}") from error


def _check_compiler(file: str, offloaded: bool) -> None:
    """Check that DeepSpeed's Adam can be compiled, which happens at the first start."""
    fix = "install it, or set optimizer.params.torch_adam to true"
    if offloaded:
        if shutil.which("g++") is None:
            raise UserError(
                f"{file}: CPU Adam is compiled by g++, which is missing; {fix} (slower)"
            )
        return
    on_cuda = get_accelerator().device_name() == "cuda" and torch.version.cuda is not None
    if not on_cuda or installed_ops.get("fused_adam"):
        return
    try:
        assert_no_cuda_mismatch()
    except (MissingCUDAException, CUDAMismatchException) as error:
        raise UserError(
            f"{file}: FusedAdam is compiled by nvcc of CUDA {torch.version.cuda}: "
            f"{_one_line(error)}; {fix}"
        ) from error


def _offload(merged: dict[str, Any], part: str) -> str:
    return str(_at(merged, f"zero_optimization.offload_{part}.device") or "none")


def _at(block: Any, path: str) -> Any:
    """The value at a dotted path; None if there is none."""
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    return block


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
