"""Trains a small copy of a run under every ds_config and compares it with plain torch, for
`prove.py equivalence`.

Tolerances are relative. In fp32 1e-5, the effect of summing in another order, for losses, gradient
norms and the L2 distance of each tensor of weights. AdamW divides a gradient by its magnitude plus
eps. With the usual eps of 1e-8, an element whose gradient happens to be near 0 in the first step
moves by a share of the learning rate that is rounding alone, and one such element is as far off as
the tolerance allows for a whole tensor. So every run has an eps of the size of the gradients.
Elements whose gradient is never above 2^-24 of the largest one are left out: they are rounding
alone, such as those of the bias of keys, which softmax ignores.

In bf16 the plain loop stays in fp32, and losses and gradient norms are compared, which are off by
what rounding adds. bf16 has 8 significant bits, so one rounding is off by at most 2^-9, and by
2^-9 / sqrt(3) in the root mean square. A value passes about 80 of them: 40 up to the loss (18 in
each of 2 layers, for norms, projections, rotary embedding, scores and residuals, and 4 around
them), and as many back to a gradient. Independent ones add up as the root of their number:
sqrt(80) * 2^-9 / sqrt(3) = 1.0e-2.
"""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.checkpoint.shards import Shards
from zerotrain.config.ds_config import read_ds_config
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import (
    MAX_INT,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    Source,
    TrackingConfig,
)
from zerotrain.data.sources import read_rows
from zerotrain.model.hub import load_pretrained
from zerotrain.model.load import DTYPES, load_model_config, load_tokenizer
from zerotrain.model.trained import choose_trained
from zerotrain.runtime.errors import EXIT_USER_MISTAKE, UserError
from zerotrain.runtime.seeding import seed_everything
from zerotrain.tools.local_ranks import run_local_ranks
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import PlainRun, train_plainly
from zerotrain.tools.report import read_run

STEPS = 4
ROWS = 200  # of each source
MAX_LENGTH = 512
TOLERANCES = {"fp32": 1e-5, "bf16": math.sqrt(80 / 3) / 2**9}
EPSILON = 1e-3  # AdamW's
SMALL = {  # in place of the size of that name, where a model's config has one
    "hidden_size": 32, "intermediate_size": 64, "ffn_hidden_size": 64, "moe_intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "qk_rope_head_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
    "query_pre_attn_scalar": 8, "image_size": 28, "mm_tokens_per_image": 4,
    "initializer_range": 0.1, "output_router_logits": False,
}  # fmt: skip


def prove_equivalence(
    config: Config, ds_configs: list[str], ranks: int, precision: str, work: Path
) -> bool:
    """Train a small copy of a run on `ranks` ranks with one micro-step, and on one rank with as
    many micro-steps, with each ds_config, bucketed and packed; print a line for each.

    Args:
        precision: fp32 or bf16.
        work: folder for what is written.

    Returns:
        Whether everything that ran equals plain torch.

    Raises:
        UserError: the model or the data cannot be used, or nothing could run.
    """
    config = cut_down(config, work, ranks, precision)
    tokenizer = load_tokenizer(config)
    batches = list(_batches(config, ranks))
    plain = train_plainly(config, tokenizer, lambda model: _prepared(model, config), EPSILON)
    compared = ["loss", "norm", "weights"][: 3 if precision == "fp32" else 2]
    print(_line("", " ".join(f"{name:>9}" for name in compared)))
    tolerance = TOLERANCES[precision]
    print(_line(f"tolerance, {precision}", _cells([tolerance] * len(compared))))
    proved = []
    began = time.monotonic()
    for ds_config in ds_configs:
        stem = Path(ds_config).stem
        copy = work / f"{stem}.json"
        content = read_ds_config(ds_config)
        content["optimizer"]["params"]["eps"] = EPSILON
        copy.write_text(json.dumps(content), encoding="utf-8")
        for data, world in product(batches, dict.fromkeys((ranks, 1))):
            folder = work / f"{stem}_{data.batching}_{world}"
            run = replace(config, ds_config=str(copy), data=data, output_dir=str(folder))
            micro_steps = "-"
            code, output, _ = start_training(run, world)
            mistake = re.search(r"(?:^|\] )error: (.*)", output, re.MULTILINE)  # of any rank
            is_refused = code == EXIT_USER_MISTAKE and mistake is not None
            if is_refused:
                text = f"not run: {mistake[1]}"
            elif code:
                proved.append(False)
                text = f"FAILED, exit code {code}: see {folder}.log"
            else:
                micro_steps, differences = _differences(plain, folder)
                differences = differences[: len(compared)]
                proved.append(all(difference <= tolerance for difference in differences))  # no NaN
                text = f"{_cells(differences)}  {'equal' if proved[-1] else 'REFUTED'}"
            name = f"{stem}, {data.batching}, {world} x {micro_steps}"
            print(_line(name, text), flush=True)
            if is_refused and world == ranks:
                break  # as on any number of ranks
    if not proved:
        raise UserError("nothing could be run on this machine, so nothing is proved")
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(proved)} of {len(proved)} runs are equal; {minutes:.0f} minutes")
    return all(proved)


def _line(name: str, text: str) -> str:
    return f"{name:<44}{text}"


def _cells(values: Iterable[float]) -> str:
    return " ".join(f"{value:>9.1e}" for value in values)


def start_training(
    config: Config, ranks: int, python: str = sys.executable
) -> tuple[int, str, float]:
    """Run train.py on this machine, in a new output_dir; its output is also in OUTPUT_DIR.log. For
    arguments and results see run_local_ranks.
    """
    folder = config.output_dir
    shutil.rmtree(folder, ignore_errors=True)
    file = Path(f"{folder}.yaml")
    file.write_text(dump_config(config), encoding="utf-8")
    trust = f"--model.trust_remote_code={config.model.trust_remote_code}"  # in no file
    command = ["train.py", "--config", file, trust]
    return run_local_ranks(ranks, command, Path(f"{folder}.log"), python)


def _differences(plain: PlainRun, folder: Path) -> tuple[str, list[float]]:
    """A run's numbers of micro-steps, and the largest relative differences of its losses, gradient
    norms and weights from those of the plain loop.
    """
    run = read_run(folder).series
    found = []
    for name, expected in (("loss", plain.losses), ("grad_norm", plain.grad_norms)):
        values = run[name].reindex(run["micro_steps"].index).to_numpy()  # a NaN is left out there
        found.append(float(np.max(np.abs(values / expected - 1))))
    shards = Shards(list_complete(checkpoints_folder(str(folder)))[-1])
    distances = []
    largest = max(peak.max().item() for peak in plain.peaks.values())
    for name, peak in plain.peaks.items():
        compared = (peak == 0) | (peak > largest / 2**24)
        expected = plain.weights[name].detach()
        distance = (shards.weight(name) - expected)[compared].norm().item()
        distances.append(distance / max(expected.norm().item(), 1e-30))
    micro_steps = " or ".join(f"{n:.0f}" for n in sorted(set(run["micro_steps"])))
    return micro_steps, [*found, float(np.max(distances))]


# --------------------------------------------------------------------------------------------------
# The small copy


def cut_down(config: Config, work: Path, ranks: int, precision: str) -> Config:
    """The config of a few steps with a small model of the same architecture, with random weights
    and without dropout and router loss, and the first rows of each training source; both are
    written into `work`. What would change the curve on purpose is left out: evaluation, warm-up,
    quantization.

    Raises:
        UserError: the model cannot be made that small, or a source cannot be read.
    """
    model_folder = work / "model"
    model_config = small_config(load_model_config(config))
    torch.manual_seed(config.train.seed)
    trust = config.model.trust_remote_code
    model = load_pretrained(_from_config, model_config, "a small copy of the model", None, trust)
    model.to(DTYPES[precision]).save_pretrained(model_folder)
    sources = []
    for i, source in enumerate(config.data.sources("train_sources")):
        rows = work / f"rows_{i}.jsonl"
        with rows.open("w", encoding="utf-8", errors="surrogateescape") as file:
            for _, row in islice(read_rows(source), ROWS):
                file.write(row.text.replace("\n", " ") + "\n")
        sources.append(Source(str(rows), format=source.format, columns=source.columns))
    short = short_run(config, STEPS)
    lora = config.model.lora and replace(config.model.lora, dropout=0.0)
    # kernels such as FlashAttention's take 16 bits only
    attention = None if precision == "fp32" else config.model.attn_implementation
    return replace(
        short,
        model=replace(
            config.model,
            name_or_path=str(model_folder),
            tokenizer="@".join(filter(None, config.tokenizer_source)),
            revision=None,
            from_config=False,
            quantization=None,
            lora=lora,
            attn_implementation=attention,
        ),
        data=replace(
            short.data,
            train_sources=sources,
            max_length=min(config.data.max_length, MAX_LENGTH),
            on_too_long="truncate",
            on_bad_row="skip",
            cache_dir=str(work / "cache"),
        ),
        train=replace(
            short.train,
            learning_rate=3e-3,
            global_batch_size=max(16, 4 * ranks),
            global_batch_tokens=None,
            lr_scaling="none",
            lr_schedule="linear",
            lr_schedule_args={},
            warmup_examples=1,
            precision=precision,
        ),
    )


def short_run(config: Config, steps: int) -> Config:
    """The config's first steps, without evaluation, W&B and checkpoints before the last one."""
    return replace(
        config,
        train=replace(config.train, steps=steps, epochs=None),
        data=replace(config.data, eval_sources=[], eval_fraction=0.0),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(),
        tracking=TrackingConfig(wandb="disabled"),
        distributed=replace(config.distributed, world_size=None),
    )


def _from_config(model_config: PretrainedConfig, revision: None, **options: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(model_config, **options)


def small_config(model_config: PretrainedConfig) -> PretrainedConfig:
    """The config with SMALL sizes, one layer of each kind and at least two, and no dropout."""
    text = model_config.get_text_config()
    layers = text.num_hidden_layers
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    few = max(2, len(kinds))
    parts = [p for p in vars(model_config).values() if isinstance(p, PretrainedConfig)]
    for part in (model_config, *parts):
        for key, value in part.to_dict().items():
            if isinstance(value, list) and len(value) == layers:  # one for each layer
                setattr(part, key, (kinds * 2)[:few] if key == "layer_types" else value[:few])
            elif isinstance(value, float) and any(n in key for n in ("dropout", "pdrop", "jitter")):
                setattr(part, key, 0.0)
        heads = [getattr(part, f"num_{kind}_heads", None) for kind in ("key_value", "attention")]
        for key, value in SMALL.items():
            with suppress(AttributeError, RuntimeError):  # follows from others, or differs by layer
                if getattr(part, key, None) is not None:
                    setattr(part, key, value)
        if heads[0] and heads[0] == heads[1]:
            part.num_key_value_heads = part.num_attention_heads
        if hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = few
    return model_config


def _prepared(model: nn.Module, config: Config) -> nn.Module:
    """The model as train.py trains it: frozen parts, adapters."""
    seed_everything(config.train.seed)
    choose_trained(model, config.model)
    return model


def _batches(config: Config, ranks: int) -> Iterator[DataConfig]:
    """Each way of batching that the model can be trained with, and the smallest token budget by
    which every step has one micro-step on `ranks` ranks.
    """
    for batching in ("bucketed", "packed"):
        data = replace(config.data, batching=batching, micro_batch_tokens=MAX_INT)
        try:
            _, _, plan, _ = open_plans(replace(config, data=data), ranks)
        except UserError as error:
            print(f"{batching}: {error}")
            continue
        largest = 0
        for step in range(STEPS):
            for examples in chain.from_iterable(plan.step(step).micro_batches):
                padded = plan.budget.padded(plan.data.lengths[examples])
                whole = padded.sum() if batching == "packed" else len(padded) * padded.max()
                largest = max(largest, int(whole))
        yield replace(data, micro_batch_tokens=largest)
