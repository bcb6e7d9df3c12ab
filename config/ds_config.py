"""The DeepSpeed config file merged with the run config.

`ds_configs/*.json` set ZeRO stage, offload and communication, and have "auto" where the value comes
from the run config. The same files work with transformers' Trainer and accelerate, and files made
for those work here. Where both configs set a value, the values must agree.
"""

import difflib
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from config.batch_math import scaled_learning_rate, warmup_steps
from config.yaml_check import compose, read_config_text
from runtime.errors import UserError

if TYPE_CHECKING:
    from config.schema import Config

# DeepSpeed's schedulers, each with the most similar one of transformers. If train.lr_schedule is
# given, a scheduler block must agree with it; otherwise the block becomes train.lr_schedule. In
# both cases the block is removed from the config that DeepSpeed gets.
DEEPSPEED_SCHEDULERS = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
# Their parameters in deepspeed 0.19.8 (runtime/lr_schedules.py), without last_batch_iteration.
PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": (
        "total_num_steps",
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_num_steps",
        "warmup_type",
    ),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
    ),
}
# Blocks that are read in this file, before DeepSpeed checks them; outer ones first.
BLOCKS = [
    "bf16",
    "fp16",
    "scheduler",
    "scheduler.params",
    "optimizer",
    "optimizer.params",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "checkpoint",
]
# Keys of accelerate's deepspeed_config (accelerate 1.x, DeepSpeedPlugin), each with the path in
# DeepSpeed's config that it sets. Those in ACCELERATE_LAUNCH are for its launcher, or not needed.
ACCELERATE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
ACCELERATE_LAUNCH = (
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "zero3_init_flag",
)
MOST_LEVELS = 50  # of a config's nesting; DeepSpeed's own have 4
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"torch_adam": True}}


def merge_ds_config(
    config: "Config",
    precision: str | None = None,
    hidden_size: int | None = None,
    mean_batch: float | None = None,
) -> dict[str, Any]:
    """The DeepSpeed config with every "auto" filled in that follows from the run config, as in
    Hugging Face's integration; config/ds_check.py checks the rest.

    Without `precision` and `hidden_size`, which need the device and the model, the values that
    follow from them are left as they are; everything else is checked.

    Args:
        precision: fp32, bf16 or fp16, from `resolve_precision`.
        hidden_size: of the model; Hugging Face derives ZeRO-3's bucket sizes from it.
        mean_batch: DataPlan.mean_batch, which scales the learning rate. The file may also state the
            rate for the config's global batch, or any rate as long as train.lr_scaling depends on a
            plan that is not known yet.

    Raises:
        UserError: unreadable file, or a value that contradicts the run config; names both.
    """
    file, train = config.ds_config, config.train
    merged = _read(file)

    # Micro-batches are limited by tokens, so their number differs between steps and train.py tells
    # the engine where a step ends. 1 x 1 disables DeepSpeed's own batch arithmetic.
    budget = "micro-batches follow from data.micro_batch_tokens"
    _fill(merged, file, "train_micro_batch_size_per_gpu", 1, budget)
    _fill(merged, file, "gradient_accumulation_steps", 1, budget)
    for path, name in (
        ("train_batch_size", train.global_batch_key),
        ("gradient_clipping", "gradient_clipping"),
    ):
        value = getattr(train, name)
        _fill(merged, file, path, value, f"train.{name} is {value}")
    del merged["train_batch_size"]  # DeepSpeed would require it to be 1 x 1 x ranks

    lr = scaled_learning_rate(train, mean_batch or train.global_batch)
    is_known = mean_batch is not None or train.lr_scaling == "none"
    other_lrs = [scaled_learning_rate(train, train.global_batch)] if is_known else None
    optimizer = merged.setdefault("optimizer", json.loads(json.dumps(DEFAULT_OPTIMIZER)))
    params = optimizer.setdefault("params", {})
    of_rate = f"train.learning_rate, scaled, is {lr:g}"
    _fill(merged, file, "optimizer.params.lr", lr, of_rate, other_lrs)
    for name, ours in (
        ("weight_decay", "weight_decay"),
        ("betas", "adam_betas"),
        ("eps", "adam_epsilon"),
    ):
        if name in params or "adam" in str(optimizer.get("type")).lower():
            value = getattr(train, ours)
            value = list(value) if isinstance(value, tuple) else value
            _fill(merged, file, f"optimizer.params.{name}", value, f"train.{ours} is {value}")

    # With it, the first rank of each node writes the weights file that all ranks of the node load.
    node_local = config.checkpoint.node_local
    source = f"checkpoint.node_local is {json.dumps(node_local)}"
    _fill(merged, file, "checkpoint.use_node_local_storage", node_local, source)

    if "scheduler" in merged:
        if "warmup_max_lr" in merged["scheduler"].get("params", {}):
            _fill(merged, file, "scheduler.params.warmup_max_lr", lr, of_rate, other_lrs)
        warmup = warmup_steps(train, mean_batch or train.global_batch)
        _check_scheduler(merged, config, lr, warmup)
        del merged["scheduler"]

    _fill_from_model(merged, file, precision, hidden_size)
    return merged


def _fill_from_model(
    merged: dict[str, Any], file: str, precision: str | None, hidden_size: int | None
) -> None:
    """Fill in what follows from device and model, as far as it is given."""
    if precision is not None:
        for name in ("bf16", "fp16"):
            enabled = precision == name
            _fill(merged, file, f"{name}.enabled", enabled, f"the run's precision is {precision}")
    if hidden_size is not None:
        derived = {
            "reduce_bucket_size": hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
        zero = merged.get("zero_optimization", {})
        zero.update({name: value for name, value in derived.items() if zero.get(name) == "auto"})


def resolve_precision(config: "Config", device_default: str) -> str:
    """fp32, bf16 or fp16: from the DeepSpeed config, else train.precision, else the default.

    Raises:
        UserError: the DeepSpeed config and train.precision contradict each other.
    """
    raw = _read(config.ds_config)
    stated = {name: raw.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")}
    on = next((name for name, enabled in stated.items() if enabled is True), None)
    asked = config.train.precision
    if asked == "auto":
        default = "fp32" if stated.get(device_default) is False else device_default
        return on or default
    if (on or asked) != asked or stated.get(asked) is False:
        name = on or asked
        raise UserError(
            f"{config.ds_config}: {name}.enabled is {json.dumps(stated[name])}, "
            f"but train.precision is {asked}"
        )
    return asked


def check_compiler(config: "Config") -> None:
    """Refuse an optimizer that DeepSpeed compiles at its first use if g++ is missing.

    Raises:
        UserError: g++ is needed and missing; the message says what to do.
    """
    raw = _read(config.ds_config)
    device = raw.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    params = raw.get("optimizer", DEFAULT_OPTIMIZER).get("params", {})
    if device != "none" and not params.get("torch_adam") and shutil.which("g++") is None:
        raise UserError(
            f"{config.ds_config}: offloaded AdamW is compiled at the first start, but g++ is "
            "missing; install it, or set optimizer.params.torch_adam to true (slower)"
        )


def zero_stage(ds_config: dict[str, Any]) -> int:
    """ZeRO stage, 0 to 3.

    Raises:
        UserError: it is not a number.
    """
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if not isinstance(stage, int):
        raise UserError(f"zero_optimization.stage is {json.dumps(stage)}, not 0, 1, 2 or 3")
    return stage


def with_schedule(config: "Config") -> "Config":
    """The config with train.lr_schedule resolved: as given, else the scheduler of the DeepSpeed
    config with its parameters, else cosine.

    Raises:
        UserError: train.lr_schedule_args is given together with a scheduler block.
    """
    train = config.train
    if train.lr_schedule is not None:
        return config
    block = _read(config.ds_config).get("scheduler")
    name, arguments = "cosine", train.lr_schedule_args
    if block is not None:
        if arguments:
            raise UserError(
                f"{config.ds_config}: scheduler.type is {block['type']}, which takes its own "
                "parameters, but train.lr_schedule_args is given; set train.lr_schedule as well, "
                "or remove one of the two"
            )
        name, owned = block["type"], {"warmup_max_lr", "total_num_steps"}
        if train.warmup:
            owned.add("warmup_num_steps")
        params = block.get("params", {})
        arguments = {k: v for k, v in params.items() if k not in owned and v != "auto"}
    return replace(config, train=replace(train, lr_schedule=name, lr_schedule_args=arguments))


def _check_scheduler(merged: dict[str, Any], config: "Config", lr: float, warmup: int) -> None:
    """Check that the scheduler block is one of DEEPSPEED_SCHEDULERS and does not contradict the run
    config, whose learning rate is `lr` and whose warm-up takes `warmup` steps.
    """
    file, train = config.ds_config, config.train
    kind, params = merged["scheduler"].get("type"), merged["scheduler"].get("params", {})
    if kind not in DEEPSPEED_SCHEDULERS:
        raise UserError(
            f"{file}: scheduler.type is {json.dumps(kind)}, which is none of "
            f"{', '.join(DEEPSPEED_SCHEDULERS)}; remove the scheduler block and set "
            "train.lr_schedule"
        )
    for key, allowed in (("scheduler", ("type", "params")), ("scheduler.params", PARAMS[kind])):
        for name in merged["scheduler"] if key == "scheduler" else params:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
                hint = f"; did you mean {near[0]}?" if near else ", which has " + ", ".join(allowed)
                raise UserError(f"{file}: {key}.{name}: unknown key of {kind}{hint}")
    if train.lr_schedule not in (None, kind, DEEPSPEED_SCHEDULERS[kind]):
        raise UserError(
            f"{file}: scheduler.type is {kind} ({DEEPSPEED_SCHEDULERS[kind]} in transformers), "
            f"but train.lr_schedule is {train.lr_schedule}; remove train.lr_schedule to use the "
            "scheduler block, or remove the block"
        )
    rate = f"train.learning_rate makes it {lr:g}"
    if train.steps is None:
        rate_steps = "train.epochs determines the number of steps"
    else:
        rate_steps = f"train.steps makes it {train.steps}"
    known = {"warmup_max_lr": (lr, rate), "total_num_steps": (train.steps, rate_steps)}
    if train.warmup or train.lr_schedule == DEEPSPEED_SCHEDULERS[kind]:
        known["warmup_num_steps"] = (warmup, f"train.{train.warmup_key} makes it {warmup}")
    if train.lr_schedule == DEEPSPEED_SCHEDULERS[kind]:
        ours = f"train.lr_schedule is {train.lr_schedule}, which warms up linearly from 0"
        known |= dict.fromkeys(("warmup_min_lr", "warmup_min_ratio"), (0, ours))
        known["warmup_type"] = ("linear", ours)
    for name, (value, source) in known.items():
        if name in params:
            _fill(merged, file, f"scheduler.params.{name}", value, source)
    if params.get("warmup_type", "log") not in ("log", "linear", "auto"):
        raise UserError(
            f"{file}: scheduler.params.warmup_type is {json.dumps(params['warmup_type'])}, which "
            "is neither log nor linear"
        )


def _fill(
    merged: dict[str, Any],
    file: str,
    path: str,
    value: Any,
    source: str,
    also: Sequence[Any] | None = (),
) -> None:
    """Set `path` to `value`. The file may state that value, "auto" or one of `also`; with `also`
    None, any value.

    Raises:
        UserError: the file states another value.
    """
    *parents, leaf = path.split(".")
    block = merged
    for parent in parents:
        block = block.setdefault(parent, {})
    stated = block.get(leaf, "auto")
    expected = [value, "auto", *(also or ())]
    if also is not None and not any(_same(stated, v) for v in expected):
        raise UserError(
            f'{file}: {path} is {json.dumps(stated)}, but {source}; set it to "auto" in the file, '
            "or change one of the two"
        )
    block[leaf] = value


def _same(stated: Any, value: Any) -> bool:
    numbers = all(isinstance(v, int | float) for v in (stated, value))
    return math.isclose(stated, value, rel_tol=1e-6) if numbers else stated == value


def _read(file: str, named_by: str | None = None) -> dict[str, Any]:
    text = read_config_text(file, "ds_config: ")
    try:
        if is_yaml := Path(file).suffix in (".yaml", ".yml"):
            compose(text, file)
            raw = yaml.safe_load(text)
        else:
            raw = json.loads(
                text,
                object_pairs_hook=partial(_plain_object, file),
                parse_constant=partial(_refuse_constant, file),
            )
            _check_depth(raw)
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a number of 5,000 digits
        raise UserError(f"{file}: not JSON: {error}") from error
    except RecursionError:
        raise UserError(f"{file}: not a DeepSpeed config: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: a DeepSpeed config has to be an object, not {type(raw).__name__}")
    if is_yaml or "deepspeed_config" in raw:
        if named_by is not None:  # possibly by itself
            raise UserError(f"{named_by}: deepspeed_config_file: {file} is not a DeepSpeed config")
        raw = _from_accelerate(file, raw)
    if "bfloat16" in raw:  # DeepSpeed's old name for bf16, which it still reads
        if "bf16" in raw:
            raise UserError(f"{file}: bfloat16 is the old name of bf16; keep only one of the two")
        raw["bf16"] = raw.pop("bfloat16")
    for path in BLOCKS:
        parent, _, name = path.rpartition(".")
        owner = raw
        for part in parent.split(".") if parent else []:
            owner = owner.get(part, {})
        if owner.get(name) is None:
            owner.pop(name, None)  # null means the same as a missing block
        elif not isinstance(owner[name], dict):
            raise UserError(f"{file}: {path} is {json.dumps(owner[name])}, not an object {{...}}")
    for name in ("bf16", "fp16"):
        enabled = raw.get(name, {}).get("enabled")
        if str(enabled).lower() in ("true", "false"):  # DeepSpeed also accepts the string
            raw[name]["enabled"] = str(enabled).lower() == "true"
    if raw.get("scheduler", {}).get("params", {}).get("last_batch_iteration") == -1:
        del raw["scheduler"]["params"]["last_batch_iteration"]  # the default: from the start
    return raw


def _plain_object(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without its comments.

    Raises:
        UserError: a key occurs twice, of which json.loads would silently keep the last.
    """
    pairs = [(key, value) for key, value in pairs if not key.startswith(("_", "//", "#"))]
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise UserError(f"{file}: key {twice[0]} occurs twice in one object; remove one")
    return dict(pairs)


def _refuse_constant(file: str, name: str) -> None:
    """Raise UserError for NaN and Infinity, which are not JSON, but which json.loads accepts."""
    raise UserError(f"{file}: {name} is not JSON; give a number")


def _check_depth(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raise RecursionError for a value nested deeper than `levels`."""
    if isinstance(value, dict | list):
        if not levels:
            raise RecursionError
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)


def _from_accelerate(file: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config that accelerate makes from its own config.

    Raises:
        UserError: the config has no deepspeed_config block, or an unknown key in it.
    """
    block = raw.get("deepspeed_config")
    if not isinstance(block, dict):
        raise UserError(
            f"{file}: a YAML file is read as an accelerate config, and this one has no "
            "deepspeed_config block; a DeepSpeed config has to be JSON, e.g. ds_configs/zero2.json"
        )
    if "zero_optimization" in block:
        return block  # DeepSpeed's own
    if named := block.get("deepspeed_config_file"):
        return _read(str(named), named_by=file)
    for key in block:
        if key not in (*ACCELERATE, *ACCELERATE_LAUNCH):
            near = difflib.get_close_matches(str(key), [*ACCELERATE, *ACCELERATE_LAUNCH], n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise UserError(f"{file}: deepspeed_config.{key}: unknown key; {hint}")
    made: dict[str, Any] = {"zero_optimization": {"stage": 2}}  # accelerate's default
    for key, path in ACCELERATE.items():
        if block.get(key) not in (None, "none"):
            *parents, leaf = path.split(".")
            owner = made
            for parent in parents:
                owner = owner.setdefault(parent, {})
            owner[leaf] = block[key]
    precision = raw.get("mixed_precision")
    if precision in ("no", False, "bf16", "fp16"):  # YAML reads a bare no as False
        made |= {name: {"enabled": name == precision} for name in ("bf16", "fp16")}
    return made


def leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of every value that is not itself a block."""
    found = []
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found += leaves(value, f"{prefix}{key}.") if nested else [(prefix + key, value)]
    return found
