"""The DeepSpeed config file merged with the run config.

`ds_configs/*.json` set ZeRO stage, offload and communication, and have "auto" where the value comes
from the run config. The same files work with transformers' Trainer and accelerate, and files made
for those work here. Where both configs set a value, the values must agree.
"""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerotrain.config.batch_math import warmup_steps
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import read_text

if TYPE_CHECKING:
    from zerotrain.config.schema import Config

# DeepSpeed's schedulers and the schedules of transformers that are used in their place.
SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
# Blocks that are read here; null means the same as a missing one.
BLOCKS = ("bf16", "fp16", "scheduler", "optimizer", "zero_optimization", "checkpoint", "data_types")
EPSILON = 1e-8  # of AdamW, where optimizer.params.eps does not set another


def resolve_ds_config(
    config: "Config", device_precision: str, hidden_size: int
) -> tuple["Config", str, dict[str, Any]]:
    """Read the DeepSpeed config file and resolve what it shares with the run config.

    Args:
        device_precision: fp32, bf16 or fp16, where neither config sets one.
        hidden_size: of the model; Hugging Face derives ZeRO-3's bucket sizes from it.

    Returns:
        The run config with train.lr_schedule; the precision; and the merged DeepSpeed config, with
        every "auto" filled in that follows from the run config. ds_check.py checks the rest.

    Raises:
        UserError: unreadable file, or a value that contradicts the run config; names both.
    """
    raw = _read(config.ds_config)
    config = _with_schedule(config, raw.pop("scheduler", None))
    precision = _precision(config, raw, device_precision)
    return config, precision, _merged(config, raw, precision, hidden_size)


def zero_stage(ds_config: dict[str, Any]) -> int:
    """ZeRO stage, 0 to 3."""
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of every value that is not itself a block."""
    found = []
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found += leaves(value, f"{prefix}{key}.") if nested else [(prefix + key, value)]
    return found


def _merged(
    config: "Config", merged: dict[str, Any], precision: str, hidden_size: int
) -> dict[str, Any]:
    file, train = config.ds_config, config.train

    def fill(path: str, value: Any, source: str) -> None:
        """Set `path`; the file may state the same value or "auto"."""
        *parents, leaf = path.split(".")
        block = merged
        for parent in parents:
            block = block.setdefault(parent, {})
        stated = block.get(leaf, "auto")
        if stated != "auto" and not _same(stated, value):
            raise UserError(
                f"{file}: {path} is {json.dumps(stated)}, but {source}; set it to "
                '"auto" in the file, or change one of the two'
            )
        block[leaf] = value

    # Micro-batches are limited by tokens, so their number differs between steps and train.py tells
    # the engine where a step ends. 1 x 1 disables DeepSpeed's own batch arithmetic.
    budget = "micro-batches follow from data.micro_batch_tokens"
    fill("train_micro_batch_size_per_gpu", 1, budget)
    fill("gradient_accumulation_steps", 1, budget)
    of_batch = f"train.{train.global_batch_key} is {train.global_batch}"
    fill("train_batch_size", train.global_batch, of_batch)
    del merged["train_batch_size"]  # DeepSpeed would require it to be 1 x 1 x ranks
    fill(
        "gradient_clipping",
        train.gradient_clipping,
        f"train.gradient_clipping is {train.gradient_clipping}",
    )
    for name in ("bf16", "fp16"):
        fill(f"{name}.enabled", precision == name, f"the run's precision is {precision}")

    optimizer = merged.setdefault("optimizer", {"type": "AdamW", "params": {"torch_adam": True}})
    params = optimizer.setdefault("params", {})
    if "adam" in str(optimizer.get("type")).lower():
        # train.py sets the scaled and scheduled rate before each step
        fill(
            "optimizer.params.lr",
            train.learning_rate,
            f"train.learning_rate is {train.learning_rate}",
        )
        fill(
            "optimizer.params.weight_decay",
            train.weight_decay,
            f"train.weight_decay is {train.weight_decay}",
        )
        betas = list(train.adam_betas)
        fill("optimizer.params.betas", betas, f"train.adam_betas is {betas}")
        if params.get("eps", "auto") == "auto":
            params["eps"] = EPSILON

    zero = merged.get("zero_optimization", {})
    derived = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero.update({name: value for name, value in derived.items() if zero.get(name) == "auto"})
    return merged


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) >= 1 << 63:
        raise ValueError(f"the number {text[:20]}... is too large")
    return value


def _same(stated: Any, value: Any) -> bool:
    numbers = all(isinstance(v, int | float) for v in (stated, value))
    return math.isclose(stated, value, rel_tol=1e-6) if numbers else stated == value


def _precision(config: "Config", raw: dict[str, Any], device_precision: str) -> str:
    """fp32, bf16 or fp16: from the DeepSpeed config, else train.precision, else the device's.

    Raises:
        UserError: the two configs contradict each other.
    """
    stated = {name: raw.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")}
    on = [name for name, enabled in stated.items() if enabled is True]
    wanted = config.train.precision
    if wanted == "auto" and on:
        return on[0]
    if wanted == "auto":
        return "fp32" if stated.get(device_precision) is False else device_precision
    contradicting = [
        *(name for name in on if name != wanted),
        *([wanted] if stated.get(wanted) is False else []),
    ]
    for name in contradicting:
        raise UserError(
            f"{config.ds_config}: {name}.enabled is {json.dumps(stated[name])}, but "
            f"train.precision is {wanted}"
        )
    return wanted


def _with_schedule(config: "Config", block: dict[str, Any] | None) -> "Config":
    """The config with train.lr_schedule: as given, else that of the scheduler block, else cosine.

    Raises:
        UserError: the block has no equal schedule, or contradicts the run config.
    """
    file, train = config.ds_config, config.train
    if block is None:
        return replace(config, train=replace(train, lr_schedule=train.lr_schedule or "cosine"))
    kind, params = block.get("type"), dict(block.get("params") or {})
    if kind not in SCHEDULES:
        raise UserError(
            f"{file}: scheduler.type is {json.dumps(kind)}, which is none of "
            f"{', '.join(SCHEDULES)}; remove the scheduler block and set train.lr_schedule"
        )
    name, arguments = SCHEDULES[kind], dict(train.lr_schedule_args)
    lowest = params.pop("cos_min_ratio", None)
    if kind == "WarmupCosineLR" and lowest is not None:
        name, arguments = "cosine_with_min_lr", {"min_lr_rate": lowest, **arguments}
    warmup = warmup_steps(train, train.global_batch) if train.global_batch_size else None
    expected = {
        "warmup_min_lr": (0, "the warm-up begins at 0"),
        "warmup_min_ratio": (0, "the warm-up begins at 0"),
        "warmup_max_lr": (train.learning_rate, f"train.learning_rate is {train.learning_rate}"),
        "warmup_num_steps": (warmup, f"train.warmup_examples makes it {warmup}"),
        "total_num_steps": (train.steps, f"train.steps is {train.steps}"),
        "warmup_type": ("linear", "the warm-up is linear"),
        "last_batch_iteration": (-1, "a schedule begins at its start"),
    }
    for key, value in params.items():
        if key not in expected:
            raise UserError(f"{file}: scheduler.params.{key}: unknown key; remove it")
        if value != "auto" and not _same(value, expected[key][0]):
            raise UserError(
                f"{file}: scheduler.params.{key} is {json.dumps(value)}, but {expected[key][1]}; "
                'set it to "auto", or remove the scheduler block and set train.lr_schedule'
            )
    if train.lr_schedule not in (None, name):
        raise UserError(
            f"{file}: scheduler.type is {kind}, which is {name} here, but train.lr_schedule is "
            f"{train.lr_schedule}; remove one of the two"
        )
    return replace(config, train=replace(train, lr_schedule=name, lr_schedule_args=arguments))


def _read(file: str) -> dict[str, Any]:
    """The file's values, without comments: keys that begin with _, // or #.

    Raises:
        UserError: it cannot be read, is not JSON, or has a key twice.
    """

    def without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs = [(key, value) for key, value in pairs if not key.startswith(("_", "//", "#"))]
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise UserError(f"{file}: key {twice[0]} occurs twice in one object; remove one")
        return dict(pairs)

    text = read_text(file, "ds_config: ")
    accelerate = (
        "an accelerate config is not read; give the JSON file that its deepspeed_config_file "
        "names, or one of ds_configs/"
    )
    try:
        raw = json.loads(text, object_pairs_hook=without_comments, parse_int=_integer)
        leaves(raw if isinstance(raw, dict) else {})
    except json.JSONDecodeError as error:
        if file.endswith((".yaml", ".yml")):
            raise UserError(f"{file}: not JSON: {accelerate}") from error
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a number of 5,000 digits
        raise UserError(f"{file}: not JSON: {error}") from error
    except RecursionError:
        raise UserError(f"{file}: not a DeepSpeed config: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: a DeepSpeed config has to be an object, not {type(raw).__name__}")
    if "deepspeed_config" in raw:
        raise UserError(f"{file}: {accelerate}")
    if "bfloat16" in raw:  # DeepSpeed's old name for bf16, which it still reads
        if "bf16" in raw:
            raise UserError(f"{file}: bfloat16 is the old name of bf16; keep only one of the two")
        raw["bf16"] = raw.pop("bfloat16")
    for name in BLOCKS:
        if raw.get(name) is None:
            raw.pop(name, None)
        elif not isinstance(raw[name], dict):
            raise UserError(f"{file}: {name} is {json.dumps(raw[name])}, not an object {{...}}")
        elif not isinstance(raw[name].get("params", {}), dict):
            raise UserError(f"{file}: {name}.params is not an object {{...}}")
    for name in ("bf16", "fp16"):
        enabled = str(raw.get(name, {}).get("enabled")).lower()
        if enabled in ("true", "false"):  # DeepSpeed also accepts the string
            raw[name]["enabled"] = enabled == "true"
    return raw
