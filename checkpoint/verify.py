"""Checks an exported folder against its run, as seen by somebody who has only the folder.

A separate process, which cannot import this repository, loads the folder with transformers
(stranger.py). It has to arrive at the run's last evaluation loss and, from the messages of some
rows, at the token ids that were trained on, and to stop at the end tokens that were trained.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from checkpoint.state import TrainerState
from config.schema import Config, Source
from data.data_plan import DataPlan
from data.messages import canonical_row
from data.options import RenderOptions
from data.render import render
from data.sources import parse_row, read_rows
from data.tokenize import TokenizedRows
from data.turns import FIXED_DATE, asks_for_date
from model.load import DTYPES, end_tokens
from runtime.errors import UserError, some
from runtime.progress import polled_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STRANGER = Path(__file__).with_name("stranger.py")
SAMPLED_ROWS = 20
FIRST_EXAMPLES = 10_000  # from which they are taken, so that not all of a large file is read
FETCHED_EXAMPLES = 500  # at a time
LOSS_TOLERANCE = 1e-5  # nats, or relative above 1 nat; in fp32 layouts agree within it


class VerificationFailed(Exception):
    """The folder differs from the run. `str(error)` is one line that says in what."""


class Finding(NamedTuple):
    """What was checked, and with what result."""

    name: str
    text: str
    differs: bool = False


class Prompt(NamedTuple):
    """A request to the exported tokenizer, and the token ids that it has to give."""

    place: str
    """FILE:LINE of the row, and which part of it."""
    request: dict[str, Any]
    """As in stranger.py's prompts.json."""
    trained: list[int]
    """Ids of the row's example."""
    is_whole: bool
    """Whether the request is all of the row, and not its beginning."""
    is_cut: bool
    """Whether the example may lack the end of the row."""


def verify_export(
    folder: Path,
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    state: TrainerState,
    train_plan: DataPlan,
    eval_plans: dict[str, DataPlan],
) -> list[Finding]:
    """Compare an exported folder with the run whose checkpoint has `state`.

    Args:
        tokenizer: the run's.
        eval_plans: of the held-out sets, of which the first is compared.

    Raises:
        VerificationFailed: transformers cannot load the folder.
        UserError: a row cannot be read any more.
    """
    eval_plan = next(iter(eval_plans.values()), None)
    data = train_plan.data if eval_plan is None else eval_plan.data
    held_out = list(config.data.eval_sets().values())
    sources = held_out[0] if held_out else config.data.sources("train_sources")
    prompts, escaped = sample_prompts(data, sources, config, tokenizer)
    expected = state.progress.eval_loss
    examples = eval_plan.data if eval_plan is not None and expected is not None else None
    answers = _ask_stranger(folder, [prompt.request for prompt in prompts], examples)
    trained = end_tokens(tokenizer, train_plan.data.meta["end_tokens"])
    return [
        _check_weights(answers),
        check_loss(answers, state, eval_plan),
        check_prompts(answers["prompts"], prompts, escaped, tokenizer),
        _check_end_tokens(answers["end_tokens"], trained, tokenizer),
    ]


def check_same_data(state: TrainerState, train_plan: DataPlan) -> None:
    """Raise UserError if the training examples are not those of the checkpoint."""
    if train_plan.data.meta["content"] != state.run.plan.content:
        raise UserError(
            "--verify: the training data, or the options that they are tokenized with, have "
            "changed since the checkpoint; bring them back, or export without --verify"
        )


def _ask_stranger(
    folder: Path, prompts: list[dict[str, Any]], examples: TokenizedRows | None
) -> dict[str, Any]:
    """The answers of stranger.py.

    Args:
        examples: over which the loss is computed; None for none.
    """
    with TemporaryDirectory() as name:
        work = Path(name)
        (work / "prompts.json").write_text(json.dumps(prompts))
        np.savez(work / "examples.npz", **_arrays(examples))
        done = work / "done"
        done.touch()
        total = 0 if examples is None else len(examples)
        with polled_progress("verifying", total, "examples", lambda: done.stat().st_size):
            finished = subprocess.run(
                [sys.executable, "-I", str(STRANGER), str(folder.resolve()), name],
                cwd=work,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
            )
        if finished.returncode:
            lines = [line for line in finished.stderr.splitlines() if line.strip()]
            raise VerificationFailed(
                f"transformers alone cannot use the folder: {lines[-1] if lines else 'killed'} "
                f"(exit code {finished.returncode})"
            )
        return json.loads((work / "answers.json").read_text())


def _arrays(examples: TokenizedRows | None) -> dict[str, np.ndarray]:
    """The arrays of stranger.py's examples.npz."""
    ids, masks = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
    for start in range(0, 0 if examples is None else len(examples), FETCHED_EXAMPLES):
        rows = np.arange(start, min(start + FETCHED_EXAMPLES, len(examples)))
        for all_of, fetched in zip((ids, masks), examples.fetch(rows), strict=True):
            all_of += fetched
    lengths = np.array([len(example) for example in ids[1:]], np.int64)
    return {"ids": np.concatenate(ids), "mask": np.concatenate(masks), "lengths": lengths}


# --------------------------------------------------------------------------------------------------
# Rows -> requests


def sample_prompts(
    data: TokenizedRows,
    given: Sequence[Source],
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
) -> tuple[list[Prompt], int]:
    """What a server would be asked in SAMPLED_ROWS rows, evenly spaced among the first ones: for
    each supervised answer the turns before it, and the whole row.

    Args:
        given: the sources of `data`.

    Returns:
        The prompts, and the number of rows that are left out because their own text has special
        tokens, which were escaped for training; servers do not escape them.

    Raises:
        UserError: a source cannot be read.
    """
    row_of = np.asarray(data.rows["row"][:FIRST_EXAMPLES])
    firsts = np.flatnonzero(np.diff(row_of, prepend=-1))  # of each row the first example
    picks = np.linspace(0, len(firsts) - 1, min(SAMPLED_ROWS, len(firsts))).astype(int)
    wanted = {int(row_of[example]): int(example) for example in firsts[picks]}
    prompts, escaped = [], 0
    for number, place, row, options in _rows(given, data.meta["formats"], config, max(wanted)):
        if number not in wanted:
            continue
        specials: list[str] = []
        parsed = parse_row(row, options.columns, options.ignore_keys)
        render(parsed, tokenizer, options, specials)
        if specials and options.special_tokens_in_text == "escape":
            escaped += 1
            continue
        [ids], _ = data.fetch(np.array([wanted[number]]))
        is_cut = len(ids) >= options.max_length
        for part, request, is_whole in _requests(canonical_row(parsed, options), options.supervise):
            if "conversation" in request and asks_for_date(str(tokenizer.chat_template)):
                request["before_template"] = FIXED_DATE
            prompts.append(Prompt(f"{place}: {part}", request, ids.tolist(), is_whole, is_cut))
    return prompts, escaped


def _rows(
    given: Sequence[Source], formats: Sequence[str], config: Config, last: int
) -> Iterator[tuple[int, str, Any, RenderOptions]]:
    """(number, FILE:LINE, raw row, options) of rows 0 to `last` over all sources."""
    number = 0
    for source, kind in zip(given, formats, strict=True):
        own = {f.name for f in fields(source)} & {f.name for f in fields(RenderOptions)}
        options = replace(
            RenderOptions.of(config.data), **{name: getattr(source, name) for name in own}
        )
        options = replace(options, format=kind)
        for file, row in read_rows(source, config.data.max_row_characters):
            if number > last:
                return
            yield number, f"{file}:{row.place}", row, options
            number += 1


def _requests(row: dict[str, Any], supervise: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(part, request, whether it is all of the row) of a canonical row."""
    if "messages" not in row:
        yield "its text", {"text": row.get("text", row.get("prompt"))}, False
        return
    given, tools = row["messages"], row.get("tools")
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in given]
    answers = [i for i, message in enumerate(given) if message["role"] == "assistant"]
    for i in answers[-1:] if supervise == "last" else answers:
        if given[i].get("weight") != 0:
            request = {"conversation": messages[:i], "tools": tools, "add_generation_prompt": True}
            yield f"the prompt of message {i + 1}", request, False
    request = {"conversation": messages, "tools": tools, "add_generation_prompt": False}
    yield "its messages", request, True


# --------------------------------------------------------------------------------------------------
# Checks


def _check_weights(answers: dict[str, Any]) -> Finding:
    text = f"{answers['architecture']}, {answers['dtype']}: "
    for problem in ("missing", "unexpected"):
        if names := answers[problem]:
            return Finding("weights", f"{text}{len(names):,} are {problem}: {some(names)}", True)
    return Finding("weights", f"{text}every tensor is found, and none is left over")


def check_loss(answers: dict[str, Any], state: TrainerState, eval_plan: DataPlan | None) -> Finding:
    """Compare the loss with the run's.

    Both come from the same numbers in another order: with other padding and kernels, and for
    another --dtype with rounded weights. An element z of the logits that is rounded once is off by
    at most u |z|, with u = 2^-8 in bf16, 2^-11 in fp16 and 2^-24 in fp32. To first order
    -log p(target) changes by sum_j p_j dz_j - dz_target, at most 2 (1 - p(target)) u max |z|. These
    errors have either sign, so that their mean over n examples shrinks like 1 / sqrt(n): four times
    that is allowed, and at least a tenth of the bound, since rounded weights are common to all.
    """
    name, expected, step = "evaluation loss", state.progress.eval_loss, state.progress.step
    if eval_plan is None:
        return Finding(name, "not checked: the run has no held-out examples")
    if expected is None:
        return Finding(
            name,
            f"not checked: the run was not evaluated at step {step:,} (eval.every_steps)",
        )
    dtypes = DTYPES[state.run.precision], getattr(torch, answers["dtype"])
    unit = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    share = min(1.0, max(0.1, 4 / sqrt(len(eval_plan.data))))
    tolerance = max(LOSS_TOLERANCE * max(1.0, expected), 2 * unit * answers["sensitivity"] * share)
    difference = abs(answers["loss"] - expected)
    tokens = int(eval_plan.data.supervised.sum(dtype=int))
    text = (
        f"{answers['loss']:.6f} over {len(eval_plan.data):,} examples, {tokens:,} supervised "
        f"tokens; the run's at step {step:,}: {expected:.6f}; they differ by {difference:.1e}"
    )
    if difference <= tolerance:  # not for NaN
        return Finding(name, f"{text}, rounding allows {tolerance:.1e}")
    return Finding(
        name,
        f"{text}, but rounding explains no more than {tolerance:.1e}; the weights, the model's "
        "config or the held-out rows are not those of the evaluation",
        True,
    )


def check_prompts(
    served: list[list[int] | str],
    prompts: list[Prompt],
    escaped: int,
    tokenizer: "PreTrainedTokenizerBase",
) -> Finding:
    """Compare the exported tokenizer's answers to `prompts` with the trained token ids.

    Args:
        escaped: number of rows left out, from sample_prompts.
    """
    name = "prompts"
    for ids, prompt in zip(served, prompts, strict=True):
        if problem := _difference(ids, prompt, tokenizer):
            return Finding(name, f"{prompt.place}: {problem}", True)
    skipped = f"{escaped:,} rows whose text has special tokens, which training escapes"
    if not prompts:
        return Finding(name, f"not checked: there are only {skipped}")
    rows = len({prompt.place.rpartition(": ")[0] for prompt in prompts})
    how = "apply_chat_template" if "conversation" in prompts[0].request else "the tokenizer"
    text = f"{how} gives the trained token ids in {len(prompts):,} requests of {rows:,} rows"
    return Finding(name, f"{text}; left out: {skipped}" if escaped else text)


def _difference(
    served: list[int] | str, prompt: Prompt, tokenizer: "PreTrainedTokenizerBase"
) -> str | None:
    if isinstance(served, str):
        return f"the exported tokenizer refuses it: {served}"
    trained = prompt.trained
    shared = min(len(served), len(trained))
    at = next((i for i in range(shared) if served[i] != trained[i]), shared)
    is_longer = len(served) > len(trained) and not prompt.is_cut
    is_shorter = len(served) < len(trained) and prompt.is_whole
    if at == shared and not (is_longer or is_shorter):
        return None
    tokens = [
        repr(tokenizer.convert_ids_to_tokens(ids[at])) if at < len(ids) else "missing"
        for ids in (served, trained)
    ]
    return f"served token {at + 1} is {tokens[0]}, the trained one {tokens[1]}"


def _check_end_tokens(
    found: list[int], trained: list[int], tokenizer: "PreTrainedTokenizerBase"
) -> Finding:
    def names(ids: list[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in ids) or "no token"

    if not trained:
        return Finding("end tokens", "not checked: no token ends the answers of the training data")
    missing = [token for token in trained if token not in found]
    text = f"generate() stops at {names(found)}"
    if missing:
        text += f", but answers were trained to end in {names(missing)}"
    return Finding("end tokens", text, bool(missing))
