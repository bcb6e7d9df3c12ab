"""Check an exported folder against its run.

A process that has only the folder and transformers (ask_export.py) must get the run's last
evaluation loss. From the messages of some rows it must get the token ids that were trained on. It
must stop at the end tokens that were trained.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from zerotrain.checkpoint.state import TrainerState
from zerotrain.config.schema import Config, Source
from zerotrain.data.cache import TokenizedRows
from zerotrain.data.data_plan import DataPlan
from zerotrain.model.load import DTYPES
from zerotrain.rows.messages import canonical_row
from zerotrain.rows.sources import BadRow, is_cache, parse_row, read_rows
from zerotrain.rows.turns import FIXED_DATE, with_arguments_as_text, with_reasoning
from zerotrain.tools import ask_export

SAMPLED_ROWS = 20
FIRST_EXAMPLES = 10_000  # The sample is drawn from these, to read only part of a large file.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Tolerance of the evaluation loss, relative, or in nats below 1. Rounding and the order of sums
differ: half a unit in the last place of a logit near 10 is 5e-7, 4e-3 and 3e-2. Over the held-out
tokens most such errors cancel.
"""


class VerificationFailed(Exception):
    """The folder differs from the run. `str(error)` is one line that names the difference."""


class Request(NamedTuple):
    """A request to a server, and the token ids that it must get."""

    place: str
    """FILE:LINE of the row, and the part of the row."""
    arguments: dict[str, Any]
    """Arguments of ask_export.prompt_ids."""
    trained: list[int]
    """Ids of the row's example. They begin with the request's ids, or equal them if the request has
    no generation prompt.
    """


def verify_export(
    folder: Path,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainerState,
    train_plan: DataPlan,
    eval_plans: dict[str, DataPlan],
) -> dict[str, str]:
    """Compare an exported folder with the run whose checkpoint has `state`.

    Args:
        tokenizer: the run's tokenizer.
        eval_plans: plans of the held-out sets. The checkpoint's first set is compared.

    Returns:
        The result of each comparison, by its name.

    Raises:
        VerificationFailed: something differs, or transformers cannot load the folder.
        UserError: a row can no longer be read.
    """
    eval_plan = next(iter(eval_plans.values()), None)
    data = (eval_plan or train_plan).data
    requests = list(sample_requests(data, config, held_out=bool(eval_plan)))
    expected = state.progress.eval_loss if eval_plan else None
    # A resumed run may have other sets than the run had at this checkpoint.
    was = next(iter((state.run.held_out or {}).values()), None)
    measured = [p.data for p in eval_plans.values() if was in (None, p.data.meta.content)][:1]
    questions = {"prompts": [request.arguments for request in requests], "examples": []}
    for held_out in measured if expected is not None else ():
        for ids, mask in held_out.fetch(np.arange(len(held_out))):
            questions["examples"].append([ids.tolist(), np.flatnonzero(mask).tolist()])
    answers = _answers(folder, questions)

    result = {"weights": f"{answers['architecture']}, {answers['dtype']}: all present"}
    if names := answers["unmatched"]:
        raise VerificationFailed(f"weights: {len(names):,} are missing or left over: {names[0]}")
    if expected is not None and not measured:
        result["evaluation loss"] = "not compared: the first held-out set has changed since then"
    elif expected is not None:
        dtypes = DTYPES[state.run.precision], getattr(torch, answers["dtype"])
        tolerance = max(LOSS_TOLERANCE[dtype] for dtype in dtypes)
        examples = f"{len(questions['examples']):,} examples"
        text = f"{answers['loss']:.6f} over {examples}; the run's: {expected:.6f}"
        if not abs(answers["loss"] - expected) <= tolerance * max(1.0, expected):  # NaN fails too
            raise VerificationFailed(f"evaluation loss: {text}")
        result["evaluation loss"] = text
    result["prompts"] = check_prompts(answers["prompts"], requests, tokenizer)
    ends = tokenizer.convert_ids_to_tokens(answers["end_tokens"])
    trained = tokenizer.convert_ids_to_tokens(train_plan.data.meta.end_tokens)
    if not {*trained} <= {*ends}:
        raise VerificationFailed(
            f"end tokens: generate() stops at {ends}, but answers were trained to end in {trained}"
        )
    return {**result, "end tokens": f"generate() stops at {', '.join(ends) or 'none'}"}


def _answers(folder: Path, questions: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of a process that has only the folder."""
    finished = subprocess.run(
        [sys.executable, "-I", ask_export.__file__, str(folder.resolve())],
        input=json.dumps(questions),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        last = finished.stderr.strip().rpartition("\n")[2]
        raise VerificationFailed(f"transformers alone cannot use the folder: {last or 'killed'}")
    return json.loads(finished.stdout.strip().rpartition("\n")[2])


def sample_requests(data: TokenizedRows, config: Config, held_out: bool) -> Iterator[Request]:
    """Yield requests from SAMPLED_ROWS rows, evenly spaced among the first ones. Each row gives the
    messages before each supervised answer, and all of its messages. Cut rows are left out.

    Args:
        held_out: `data` is the first held-out set, not the training data.

    Raises:
        UserError: a source cannot be read.
    """
    sources = config.data.train_sources
    if held_out:
        sources = next(iter(config.data.eval_sources.values()), sources)
    numbers, firsts = np.unique(data.column("row")[:FIRST_EXAMPLES], return_index=True)
    picks = np.linspace(0, len(numbers) - 1, min(SAMPLED_ROWS, len(numbers))).astype(int)
    sampled = dict(zip(numbers[picks].tolist(), firsts[picks].tolist(), strict=True))
    for number, (place, row) in enumerate(canonical_rows(sources, data, config)):
        if number > max(sampled):
            break
        if number in sampled:
            [(ids, _)] = data.fetch(np.array([sampled[number]]))
            if len(ids) < config.data.max_length:
                for part, arguments in _requests(row, config.data.supervise):
                    yield Request(f"{place}: {part}", arguments, ids.tolist())


def _requests(row: dict[str, Any], supervise: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (part of the row, arguments of prompt_ids) of a canonical row."""
    if "input_ids" in row:  # The row has no text to ask with.
        return
    if "messages" not in row:
        yield "its text", {"text": row["prompt"] or row["completion"]}
        return
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in row["messages"]]
    messages = with_reasoning(messages)
    parts = {
        f"the prompt of message {i + 1}": i for i in supervised_answers(row["messages"], supervise)
    }
    for part, end in {**parts, "its messages": len(messages)}.items():
        arguments = {
            "conversations": [messages[:end], with_arguments_as_text(messages[:end])],
            "before_template": FIXED_DATE,
            "tools": row.get("tools"),
            "add_generation_prompt": part in parts,
        }
        yield part, arguments


def check_prompts(
    served: list[list[int] | str], requests: list[Request], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Compare the exported tokenizer's answers to `requests` with the trained token ids."""
    for ids, request in zip(served, requests, strict=True):
        if isinstance(ids, str):
            raise VerificationFailed(f"{request.place}: the exported tokenizer rejects it: {ids}")
        is_whole = request.arguments.get("add_generation_prompt") is False
        trained = request.trained if is_whole else request.trained[: len(ids)]
        if ids != trained:
            same = [*map(eq, ids, trained), False].index(False)
            tokens = [tokenizer.convert_ids_to_tokens(i[same : same + 1]) for i in (ids, trained)]
            raise VerificationFailed(
                f"{request.place}: token {same + 1} is {tokens[0]} in the export, {tokens[1]} in "
                "training"
            )
    return f"{len(requests):,} requests give the trained token ids"


# --------------------------------------------------------------------------------------------------
# Rows, read again


def canonical_rows(
    sources: Sequence[Source], data: TokenizedRows, config: Config
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (FILE:LINE, row) for all rows of the sources from which `data` was tokenized. A
    rejected row is empty. A source that is a token cache has no rows.
    """
    for source, kind in zip(sources, data.meta.formats, strict=True):
        if is_cache(source):
            continue
        for raw in read_rows(source):
            row = {}
            with contextlib.suppress(BadRow):
                parsed = parse_row(raw, source.columns, config.data.ignore_keys)
                row = canonical_row(parsed, replace(source, format=kind), config.data)
            yield f"{raw.file}:{raw.place}", row


def supervised_answers(messages: list[dict[str, Any]], supervise: str) -> list[int]:
    """Return the indices of the messages that data.supervise and their own weights supervise."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if supervise == "last" else answers
    return [i for i in wanted if messages[i].get("weight") != 0]
