"""Find what DeepSpeed would refuse or silently ignore in the merged DeepSpeed config, and report it
in one line before anything is loaded.

There is no list of valid keys here: DeepSpeed's own parser (DeepSpeedConfig) is observed while it
reads the config, and a key that it never asks for is unknown.
"""

import difflib
import inspect
import json
import typing
from collections.abc import Iterable, Iterator
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
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ValidationError

from config.ds_config import leaves, zero_stage
from config.schema import Config
from runtime.errors import UserError

# Features of DeepSpeed that this trainer does not support: path of the key, whether a value asks
# for the feature, and what to do instead.
UNSUPPORTED = {
    "tensor_parallel.autotp_size": (
        lambda v: v > 1,
        "tensor parallelism is not supported; use ZeRO 3",
    ),
    "tensor_parallel.tp.tp_size": (
        lambda v: v > 1,
        "tensor parallelism is not supported; use ZeRO 3",
    ),
    "sequence_parallel_size": (lambda v: v > 1, "sequence parallelism is not supported; remove it"),
    "expert_parallel.enabled": (bool, "expert parallelism is not supported; use ZeRO 3"),
    "gradient_allreduce_op": (
        lambda v: str(v).lower() != "mean",
        "the loss is scaled for the mean over ranks; remove it",
    ),
    "managed_gradient_accumulation": (
        lambda v: not v,
        "train.py sets the accumulation boundaries; remove it",
    ),
    "torch_autocast.enabled": (bool, "train.precision sets the precision; remove it"),
    "data_efficiency.enabled": (bool, "data/plan.py plans the examples of each step; remove it"),
    "hybrid_engine.enabled": (bool, "it is for generation between updates; remove it"),
    "autotuning.enabled": (bool, "it ends the run after a few steps; remove it"),
    "compile.deepcompile": (bool, "compiling the engine is not supported; remove it"),
    "zero_optimization.zenflow": (bool, "DeepSpeed 0.19.8 corrupts weights with it; remove it"),
    "checkpoint.writer": (bool, "its checkpoints cannot be loaded; use checkpoint.async_save"),
    "checkpoint.load_universal": (bool, "train.py converts checkpoints if needed; remove it"),
    "datastates_ckpt": (bool, "train.py writes the checkpoints; use checkpoint.async_save"),
}
# Keys of older versions that public files still have; they have no effect on training.
NO_LONGER_READ = {"aio.thread_count", "fp32_allreduce", "allreduce_always_fp32"}
ADAMS = ("adam", "adamw")
# Blocks that cannot make building an engine fail, but open files or sessions.
LEFT_OUT_OF_TRIAL = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")


def check_with_deepspeed(config: Config, merged: dict[str, Any]) -> list[str]:
    """Check the merged config with DeepSpeed's own parser, before anything is built or written.

    Returns:
        A line for every key that is ignored without harm.

    Raises:
        UserError: a key that DeepSpeed does not know, a value that it refuses, an "auto" without
            a value for it, or a feature that this trainer does not support.
    """
    file = config.ds_config
    watched = _Watched(json.loads(json.dumps(merged)))
    try:
        deepspeed_config.DeepSpeedConfig(watched)
    except ValidationError as error:
        raise UserError(f"{file}: {_of_model(error, watched)}") from error
    except Exception as error:  # its own errors and assertions, all of them about `merged`
        raise UserError(f"{file}: DeepSpeed refuses it: {_one_line(error)}") from error
    removed = deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    notes = []
    for path, name, known in watched.never_asked():
        if path in NO_LONGER_READ:
            notes.append(f"{file}: {path}: DeepSpeed {deepspeed.__version__} does not read it")
            continue
        raise UserError(f"{file}: {path}: {_unknown(name, set(known) - set(removed))}")
    for path, value in leaves(merged):
        if value == "auto" and not watched.drops_auto(path):
            raise UserError(f'{file}: {path} is "auto", but the run config has no value for it')
    for path, (asks_for_it, advice) in UNSUPPORTED.items():
        value = _at(merged, path)
        if value is not None and asks_for_it(value):
            raise UserError(f"{file}: {path} is {json.dumps(value)}: {advice}")
    _check_precision(file, merged)
    _check_zero(file, merged)
    _check_optimizer(file, merged)
    return notes


def try_engine(config: Config, merged: dict[str, Any]) -> None:
    """Build DeepSpeed's engine around a model of eight weights, to see whether it refuses the
    config; called by all ranks.

    Uses torch's AdamW, which needs no compiler. Does nothing with NVMe offload, which would write.

    Raises:
        UserError: with DeepSpeed's message.
    """
    trial = {k: v for k, v in merged.items() if k not in LEFT_OUT_OF_TRIAL}
    if "nvme" in (_offload(merged, "optimizer"), _offload(merged, "param")):
        return
    trial["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
    model = torch.nn.Linear(4, 2, bias=False)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=trial
        )
    except Exception as error:  # any error is about the config, since the model is valid
        raise UserError(f"{config.ds_config}: DeepSpeed refuses it: {_one_line(error)}") from error
    engine.destroy()


class _Watched(dict):
    """A block of the config that records which of its keys were read."""

    def __init__(self, block: dict[str, Any]) -> None:
        super().__init__(
            (key, _Watched(value) if isinstance(value, dict) else value)
            for key, value in block.items()
        )
        self.given = list(block)
        self.asked: set[str] = set()
        self.taken_whole = False
        """Read by a pydantic model, which itself refuses unknown keys."""

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> "_Watched":  # so that `in block.keys()` is recorded as well
        return self

    def __iter__(self) -> Iterator[str]:
        self.taken_whole = True
        return super().__iter__()

    def items(self) -> Iterable[tuple[str, Any]]:
        self.taken_whole = True
        return super().items()

    def __copy__(self) -> "_Watched":
        return self

    def never_asked(self, prefix: str = "") -> Iterator[tuple[str, str, set[str]]]:
        """(path, key, the keys that were read in its block) of every key that was not read."""
        if self.taken_whole or (prefix and not self.asked) or prefix == "optimizer.params.":
            return  # optimizer.params is checked in _check_optimizer
        for key in self.given:
            if key not in self.asked:
                yield prefix + key, key, self.asked
            elif isinstance(block := dict.get(self, key), _Watched):
                yield from block.never_asked(f"{prefix}{key}.")

    def drops_auto(self, path: str) -> bool:
        """Whether DeepSpeed replaces "auto" at `path` by a default, as its pydantic models do.
        False for keys whose default would change the run.
        """
        block = dict.get(self, path.split(".")[0])
        decides = path.rpartition(".")[2] in ("stage", "enabled", "device")
        return isinstance(block, _Watched) and block.taken_whole and not decides


def _of_model(error: ValidationError, watched: _Watched) -> str:
    """The first error of one of DeepSpeed's pydantic models."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    blocks = [name for name in watched.given if isinstance(dict.get(watched, name), dict)]
    prefix = next(
        (f"{name}." for name in blocks if _at(dict.get(watched, name), ".".join(where)) is not None
         and dict.get(watched, name).taken_whole), "",
    )  # fmt: skip
    path = prefix + ".".join(where)
    if first["type"] == "extra_forbidden":
        return f"{path}: {_unknown(where[-1], _fields(error.title, where[:-1]))}"
    if not where:
        return f"DeepSpeed refuses it: {_one_line(first['msg'])}"
    return f"{path} is {json.dumps(first['input'], default=str)}: {first['msg']}"


def _fields(title: str, where: list[str]) -> set[str]:
    """The keys of the pydantic model with that name, or of the model nested in it at `where`."""
    models, found = [DeepSpeedConfigModel], None
    while models:
        model = models.pop()
        models += model.__subclasses__()
        found = model if model.__name__ == title else found
    for part in where:
        field = found.model_fields.get(part) if found else None
        kinds = [field.annotation, *typing.get_args(field.annotation)] if field else []
        found = next((k for k in kinds if inspect.isclass(k) and issubclass(k, BaseModel)), None)
    if found is None:
        return set()
    return {field.alias or name for name, field in found.model_fields.items()}


def _unknown(name: str, known: Iterable[str]) -> str:
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[near[0]]}?" if near else "remove it"
    return f"unknown key, DeepSpeed {deepspeed.__version__} does not read it; {hint}"


def _check_precision(file: str, merged: dict[str, Any]) -> None:
    """Check that device, data types and ZeRO stage support the precision."""
    enabled = [name for name in ("bf16", "fp16") if _at(merged, f"{name}.enabled") is True]
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
    if _at(merged, "bf16.check_grad_overflow") is False:
        raise UserError(
            f"{file}: bf16.check_grad_overflow is false, so that gradients which are not finite "
            "would be applied; remove it"
        )
    owned = {"data_types.param_dtype": "remove it"}
    if stage == 0:
        owned["data_types.grad_accum_dtype"] = "remove it, or set zero_optimization.stage to 1"
    for path, cure in owned.items():
        value = _at(merged, path)
        if value is not None and _dtype(file, path, value) != _DTYPES[precision]:
            raise UserError(
                f"{file}: {path} is {json.dumps(value)}, but the run's precision is {precision}, "
                f"at ZeRO stage {stage}; {cure}"
            )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _dtype(file: str, path: str, value: Any) -> torch.dtype:
    try:
        return deepspeed_config.DtypeEnum(value).value
    except ValueError as error:
        raise UserError(
            f"{file}: {path} is {json.dumps(value)}, which is none of {', '.join(_DTYPES)}"
        ) from error


def _check_zero(file: str, merged: dict[str, Any]) -> None:
    """Refuse what the ZeRO optimizers would refuse when they are built."""
    stage, zero = zero_stage(merged), merged.get("zero_optimization", {})
    if stage >= 2 and zero.get("reduce_scatter", True) is True:
        for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if merged.get(key, default) != default:
                raise UserError(
                    f"{file}: {key} is {json.dumps(merged[key])}, which ZeRO stages 2 and 3 do not "
                    "support with reduce_scatter; remove it (the mean is the same)"
                )
    for name in ("bf16", "fp16"):
        key = f"{name}_master_weights_and_grads"
        if _at(merged, f"{name}.{key}"):
            raise UserError(
                f"{file}: {name}.{key} is true: only fp32 master weights are supported; remove it"
            )
    for part in ("optimizer", "param"):
        path = f"zero_optimization.offload_{part}"
        if _offload(merged, part) == "nvme" and not _at(merged, f"{path}.nvme_path"):
            raise UserError(f"{file}: {path}.device is nvme, but {path}.nvme_path is missing")


def _check_optimizer(file: str, merged: dict[str, Any]) -> None:
    """Check that it is AdamW or Adam, with parameters of the class that DeepSpeed builds for it."""
    optimizer, kind = merged["optimizer"], merged["optimizer"].get("type")
    if str(kind).lower() not in ADAMS:
        raise UserError(
            f"{file}: optimizer.type is {json.dumps(kind)}: only AdamW and Adam are supported "
            '(DeepSpeed\'s FusedAdam and CPU Adam are AdamW without "torch_adam"); use AdamW'
        )
    params = optimizer["params"]
    builder = torch.optim.AdamW
    if not params.get("torch_adam"):
        offloaded = _offload(merged, "optimizer") in ("cpu", "nvme")
        builder = getattr(deepspeed.ops.adam, "DeepSpeedCPUAdam" if offloaded else "FusedAdam")
        if not offloaded:
            _check_nvcc(file)
    first, *known = inspect.signature(builder).parameters
    # the engine removes torch_adam, adam_w_mode and fp32_optimizer_states and sets adamw_mode
    known = {*known, "torch_adam", "adam_w_mode", "fp32_optimizer_states"} - {"adamw_mode", first}
    for name in params:
        if name == "max_grad_norm":
            raise UserError(
                f"{file}: optimizer.params.max_grad_norm: remove it; train.gradient_clipping sets "
                "the maximum norm"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise UserError(
                f"{file}: optimizer.params.{name}: {builder.__name__} has no such parameter; {hint}"
            )
    common = {n: params[n] for n in ("lr", "betas", "eps", "weight_decay") if n in params}
    try:
        torch.optim.AdamW([torch.zeros(1)], **common)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: optimizer.params: {_one_line(error)}") from error


def _check_nvcc(file: str) -> None:
    """Check that FusedAdam can be compiled on a GPU, unless DeepSpeed was installed with it."""
    on_cuda = get_accelerator().device_name() == "cuda" and torch.version.cuda is not None
    if not on_cuda or installed_ops.get("fused_adam"):
        return
    try:
        assert_no_cuda_mismatch()
    except (MissingCUDAException, CUDAMismatchException) as error:
        raise UserError(
            f"{file}: FusedAdam is compiled by nvcc at the first start: {_one_line(error)}; "
            f"install the toolkit of CUDA {torch.version.cuda}, or set "
            "optimizer.params.torch_adam to true"
        ) from error


def _offload(merged: dict[str, Any], part: str) -> str:
    """cpu, nvme or none: where the state of `part` (optimizer or param) is offloaded to."""
    old_name = part == "optimizer" and _at(merged, "zero_optimization.cpu_offload")
    default = "cpu" if old_name else "none"
    return str(_at(merged, f"zero_optimization.offload_{part}.device") or default)


def _at(tree: Any, path: str) -> Any:
    """The value at a dotted path, or None."""
    for key in path.split("."):
        tree = dict.get(tree, key) if isinstance(tree, dict) else None
    return tree


def _one_line(error: Exception | str) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
