"""Train a small copy of a run under each ds_config and compare it with plain torch, for
`prove.py equivalence`.

Tolerances are relative. In fp32 it is 1e-5, the effect of another order of summation, for losses,
gradient norms and the L2 distance of each weight tensor. Two kinds of elements need care:

- AdamW divides a gradient by its magnitude plus eps. With the usual eps of 1e-8, a gradient near 0
  in the first step moves its element by a share of the learning rate that is only rounding. One
  such element can use up the tolerance of a whole tensor. So eps is as large as the gradients here.
- An element is left out if its gradient never exceeds 2^-24 of the largest gradient: it is only
  rounding. An example is the bias of keys, which softmax ignores.

In bf16 the plain loop begins with the same masters, and computes in fp32 with weights rounded to
bf16. Only losses and gradient norms are compared, within 1e-2: some 80 roundings by at most 2^-9
lie between the weights and a gradient of the small copy.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn

from zerotrain.checkpoint.masters import points_in_cells
from zerotrain.checkpoint.run_folder import checkpoints_folder, list_complete
from zerotrain.checkpoint.shards import Shards
from zerotrain.config.ds_config import read_ds_config
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import MAX_INT, Config, DataConfig, Source
from zerotrain.model.architecture import auto_class, meta_model
from zerotrain.model.hub import summarize
from zerotrain.model.load import DTYPES, load_model_config
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.model.trained import freeze_and_adapt
from zerotrain.rows.sources import read_rows
from zerotrain.runtime.errors import EXIT_USER_MISTAKE, UserError
from zerotrain.runtime.seeding import seed_everything
from zerotrain.tools.local_ranks import Ended, run_local_ranks
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import PlainRun, train_plainly
from zerotrain.tools.records import read_metrics
from zerotrain.tools.saved import whole_weight
from zerotrain.tools.small_config import small_config

ROWS = 200  # rows per source
MAX_LENGTH = 512
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
EPSILON = 1e-3  # eps of AdamW


def prove_equivalence(
    config: Config, ds_configs: list[str], ranks: int, precision: str, work: Path
) -> bool:
    """Train a small copy of a run with each ds_config, bucketed and packed, on `ranks` ranks with
    one micro-step and on one rank with several. Print a line for each.

    Args:
        config: a run of a few steps, see short_run.
        precision: fp32 or bf16.
        work: folder for models, rows and runs.

    Returns:
        Whether every finished run equals plain torch.

    Raises:
        UserError: the model or the data do not fit, or nothing could run.
    """
    config = cut_down(config, work, ranks, precision)
    cases = list(_cases(config, ranks))
    tokenizer, dtype = load_tokenizer(config.model), DTYPES[precision]
    plain = train_plainly(config, tokenizer, lambda m: _prepared(m, config), EPSILON, dtype)
    tolerance = TOLERANCES[precision]
    names = ["loss", *["router loss"] * bool(plain.router_losses), "norm"]
    names += ["weights"] * (precision == "fp32")
    _print_row("", "micro-steps", *names)
    _print_row(f"tolerance, {precision}", "", *[f"{tolerance:.1e}"] * len(names))
    verdicts = []
    for ds_config in ds_configs:
        stem = Path(ds_config).stem
        copy = work / f"{stem}.json"
        content = read_ds_config(ds_config)
        content["optimizer"]["params"]["eps"] = EPSILON
        del content["scheduler"]  # The plain loop's schedule is linear.
        copy.write_text(json.dumps(content), encoding="utf-8")
        for data, world in cases:
            folder = work / f"{stem}_{data.batching}_{world}"
            run = replace(config, ds_config=str(copy), data=data, output_dir=str(folder))
            ended = start_training(run, world)
            name = f"{stem}, {data.batching}, {world} ranks"
            if ended.code == EXIT_USER_MISTAKE:
                problem = ended.output.partition("error: ")[2].partition("\n")[0]
                _print_row(name, f"not run: {problem}")
                if world == ranks:
                    break  # The file is refused on any number of ranks.
            elif ended.code:
                verdicts.append(False)
                _print_row(name, f"FAILED, exit code {ended.code}: see {folder}.log")
            else:
                micro_steps, differences = _differences(plain, folder)
                differences = differences[: len(names)]
                verdicts.append(all(each <= tolerance for each in differences))  # NaN fails too
                cells = [f"{each:.1e}" for each in differences]
                _print_row(name, micro_steps, *cells, "equal" if verdicts[-1] else "REFUTED")
    if not verdicts:
        raise UserError("nothing could be run on this machine; the lines above have the reasons")
    print(f"{sum(verdicts)} of {len(verdicts)} runs are equal")
    return all(verdicts)


def _print_row(name: str, *cells: str) -> None:
    print(f"{name:<36}" + " ".join(f"{cell:>11}" for cell in cells))


def start_training(config: Config, ranks: int) -> Ended:
    """Run train.py on this machine in a new output_dir. Its output is also in OUTPUT_DIR.log."""
    folder = config.output_dir
    shutil.rmtree(folder, ignore_errors=True)
    file = Path(f"{folder}.yaml")
    file.write_text(dump_config(config), encoding="utf-8")
    trust = (
        f"--model.trust_remote_code={config.model.trust_remote_code}"  # No config file may have it.
    )
    return run_local_ranks(ranks, ["train.py", "--config", file, trust], Path(f"{folder}.log"))


def _differences(plain: PlainRun, folder: Path) -> tuple[str, list[float]]:
    """Return a run's numbers of micro-steps, and the largest relative differences of its losses,
    gradient norms and weights from the plain loop's.
    """
    steps = read_metrics(folder)
    found = []
    measured = {"loss": plain.losses, "grad_norm": plain.grad_norms}
    if plain.router_losses:
        measured = {"loss": plain.losses, "router_loss": plain.router_losses, **measured}
    for name, expected in measured.items():
        values = np.array([step[name] for step in steps], dtype=float)
        found.append(np.max(np.abs(values / expected - 1)))
    shards = Shards(list_complete(checkpoints_folder(str(folder)))[-1])
    distances = []
    largest = max(peak.max().item() for peak in plain.peaks.values())
    for name, peak in plain.peaks.items():
        compared = (peak == 0) | (peak > largest / 2**24)
        expected = plain.weights[name].detach()
        distance = (whole_weight(shards, name) - expected)[compared].norm().item()
        distances.append(distance / max(expected.norm().item(), 1e-30))
    micro_steps = " or ".join(str(n) for n in sorted({step["micro_steps"] for step in steps}))
    return micro_steps, [*found, np.max(distances)]


# --------------------------------------------------------------------------------------------------
# The small copy


def cut_down(config: Config, work: Path, ranks: int, precision: str) -> Config:
    """Return the config of a small copy of the run, and write its model and rows into `work`.

    The model has the same architecture and random weights, but no dropout. The copy has the first
    rows of each source. Warm-up and quantization, which change the losses on purpose, are left out.

    Raises:
        UserError: the model has no small copy, or a source cannot be read.
    """
    model_folder = work / "model"
    model_config = small_config(load_model_config(config.model))
    trust = config.model.trust_remote_code
    meta_model(model_config, trust)  # also corrects the config
    torch.manual_seed(config.train.seed)
    try:
        model = auto_class(model_config).from_config(model_config, trust_remote_code=trust)
    except Exception as error:  # A model's own constructor can raise anything.
        raise UserError(f"the model has no small copy: {summarize(error)}") from error
    model.to(DTYPES[precision]).save_pretrained(model_folder)
    sources = []
    for i, source in enumerate(config.data.train_sources):
        rows = work / f"rows_{i}.jsonl"
        lines = [row.text.replace("\n", " ") + "\n" for row in islice(read_rows(source), ROWS)]
        rows.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
        sources.append(
            Source(
                str(rows),
                format=source.format,
                columns=source.columns,
                on_bad_row="skip",
                loss_weight=source.loss_weight,
            )
        )
    return replace(
        config,
        model=replace(
            config.model,
            name_or_path=str(model_folder),
            tokenizer=config.model.tokenizer or config.model.name_or_path,
            from_config=False,
            quantization=None,
            lora=config.model.lora and replace(config.model.lora, dropout=0.0),
            # Kernels such as FlashAttention's need 16 bits.
            attn_implementation=None if precision == "fp32" else config.model.attn_implementation,
        ),
        data=replace(
            config.data,
            train_sources=sources,
            max_length=min(config.data.max_length, MAX_LENGTH),
            on_too_long="truncate",
            cache_dir=str(work / "cache"),
        ),
        train=replace(
            config.train,
            learning_rate=3e-3,
            global_batch_size=max(16, 4 * ranks),
            global_batch_tokens=None,
            lr_scaling="none",
            lr_schedule="linear",
            lr_schedule_args={},
            warmup_examples=1,
            precision=precision,
            masters="spread",
        ),
    )


def _prepared(model: nn.Module, config: Config) -> nn.Module:
    """Freeze parts of the model, insert adapters and spread the masters, as train.py does, and
    return the model.
    """
    train = config.train
    seed_everything(train.seed)
    freeze_and_adapt(model, config.model)
    if train.precision != "fp32":
        dtype = DTYPES[train.precision]
        for name, p in model.named_parameters():
            p.data = p.data.to(dtype).float()
            if p.requires_grad and ".lora_" not in name:
                index, key = range(p.numel()), f"{train.seed} {name}"
                values = p.data.flatten()
                p.data = points_in_cells(values, None, index, key, dtype).view_as(p)
    return model


def _cases(config: Config, ranks: int) -> Iterator[tuple[DataConfig, int]]:
    """Yield (data settings, number of ranks): each kind of batching that the model supports, on
    `ranks` ranks with a token budget for the whole step, and on one with a budget for its longest
    example.
    """
    for batching in ("bucketed", "packed"):
        data = replace(config.data, batching=batching, micro_batch_tokens=MAX_INT)
        try:
            _, _, plan, _ = open_plans(replace(config, data=data), ranks)
        except UserError as error:
            print(f"{batching}: {error}")
            continue
        longest = plan.with_budget(0).budget.micro_batch_tokens
        for world, tokens in {ranks: MAX_INT, 1: longest}.items():
            yield replace(data, micro_batch_tokens=tokens), world
