"""Checks an exported folder against its run, as seen by somebody who has only the folder.

A separate process runs this file as a script, which imports nothing of this repository: it loads
the folder with transformers alone. It has to arrive at the run's last evaluation loss and, from the
messages of some rows, at the token ids that were trained on, and to stop at the end tokens that
were trained.

    python -I verify.py MODEL_FOLDER < questions.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.checkpoint.state import TrainerState
    from zerotrain.config.schema import Config
    from zerotrain.data.data_plan import DataPlan
    from zerotrain.data.tokenize import TokenizedRows

SAMPLED_ROWS = 20
FIRST_EXAMPLES = 10_000  # from which they are taken, so that not all of a large file is read
LOSS_TOLERANCE = 1e-5  # nats, or relative above 1 nat; in fp32 layouts agree within it


class VerificationFailed(Exception):
    """The folder differs from the run. `str(error)` is one line that says in what."""


class Prompt(NamedTuple):
    """A request to the exported tokenizer, and the token ids that it has to give."""

    place: str
    """FILE:LINE of the row, and which part of it."""
    request: dict[str, Any]
    """Arguments of apply_chat_template, or a text."""
    trained: list[int]
    """Ids of the row's example."""
    is_whole: bool
    """Whether the request is all of the row, and not its beginning."""


def verify_export(
    folder: Path,
    config: "Config",
    tokenizer: "PreTrainedTokenizerBase",
    state: "TrainerState",
    train_plan: "DataPlan",
    eval_plans: dict[str, "DataPlan"],
) -> dict[str, str]:
    """Compare an exported folder with the run whose checkpoint has `state`.

    Args:
        tokenizer: the run's.
        eval_plans: of the held-out sets, of which the first is compared.

    Returns:
        What was compared -> with what result.

    Raises:
        VerificationFailed: something differs, or transformers cannot load the folder.
        UserError: a row cannot be read any more.
    """
    from zerotrain.model.load import end_tokens

    eval_plan = next(iter(eval_plans.values()), None)
    data = train_plan.data if eval_plan is None else eval_plan.data
    prompts = sample_prompts(data, config, tokenizer, held_out=eval_plan is not None)
    expected = state.progress.eval_loss
    examples = eval_plan.data if eval_plan is not None and expected is not None else None
    answers = _ask(folder, [prompt.request for prompt in prompts], examples)
    loss = "not checked: the run has no held-out examples, or was not evaluated at this step"
    if examples is not None:
        loss = check_loss(answers, expected, state.run.precision, len(examples))
    trained = end_tokens(tokenizer, train_plan.data.meta["end_tokens"])
    return {
        "weights": _check_weights(answers),
        "evaluation loss": loss,
        "prompts": check_prompts(answers["prompts"], prompts, tokenizer),
        "end tokens": _check_end_tokens(answers["end_tokens"], trained, tokenizer),
    }


def _ask(
    folder: Path, requests: list[dict[str, Any]], examples: "TokenizedRows | None"
) -> dict[str, Any]:
    """The answers of a process that has only the folder.

    Args:
        examples: over which the loss is computed; None for none.
    """
    questions = {"prompts": requests, "examples": []}
    if examples is not None:
        for ids, mask in zip(*examples.fetch(np.arange(len(examples))), strict=True):
            questions["examples"].append([ids.tolist(), np.flatnonzero(mask).tolist()])
    finished = subprocess.run(
        [sys.executable, "-I", __file__, str(folder.resolve())],
        input=json.dumps(questions),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        last = finished.stderr.strip().rpartition("\n")[2]
        raise VerificationFailed(f"transformers alone cannot use the folder: {last or 'killed'}")
    return json.loads(finished.stdout.strip().rpartition("\n")[2])


# --------------------------------------------------------------------------------------------------
# Rows -> requests


def sample_prompts(
    data: "TokenizedRows", config: "Config", tokenizer: "PreTrainedTokenizerBase", held_out: bool
) -> list[Prompt]:
    """What a server would be asked in SAMPLED_ROWS rows, evenly spaced among the first ones: for
    each supervised answer the turns before it, and the whole row. Left out are rows that were cut,
    and those whose own text has special tokens: training escapes these, servers do not.

    Args:
        held_out: `data` are of the first held-out set, not of the training sources.

    Raises:
        UserError: a source cannot be read.
    """
    from zerotrain.data.turns import FIXED_DATE, asks_for_date

    numbers, firsts = np.unique(data.rows["row"][:FIRST_EXAMPLES], return_index=True)
    picks = np.linspace(0, len(numbers) - 1, min(SAMPLED_ROWS, len(numbers))).astype(int)
    wanted = dict(zip(numbers[picks].tolist(), firsts[picks].tolist(), strict=True))
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    date = FIXED_DATE if asks_for_date(str(tokenizer.chat_template)) else ""
    prompts = []
    for number, (place, row) in enumerate(_canonical_rows(data, config, held_out)):
        if number > max(wanted):
            break
        if number not in wanted or any(token in str(row) for token in specials):
            continue
        [ids], _ = data.fetch(np.array([wanted[number]]))
        if len(ids) < config.data.max_length:
            for part, request, is_whole in _requests(row, config.data.supervise):
                request["before_template"] = date
                prompts.append(Prompt(f"{place}: {part}", request, ids.tolist(), is_whole))
    return prompts


def _canonical_rows(
    data: "TokenizedRows", config: "Config", held_out: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(FILE:LINE, row) of all rows, over all sources."""
    from dataclasses import replace

    from zerotrain.data.messages import canonical_row
    from zerotrain.data.options import RenderOptions
    from zerotrain.data.sources import parse_row, read_rows

    sources = config.data.sources("train_sources")
    if held_out:
        sources = next(iter(config.data.eval_sets().values()), sources)
    for source, kind in zip(sources, data.meta["formats"], strict=True):
        options = replace(RenderOptions.of(config.data), format=kind, columns=source.columns)
        for file, row in read_rows(source):
            parsed = parse_row(row, options.columns, options.ignore_keys)
            yield f"{file}:{row.place}", canonical_row(parsed, options)


def _requests(row: dict[str, Any], supervise: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(part, request, whether it is all of the row) of a canonical row."""
    if "messages" not in row:  # no template: the tokenizer alone
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


def _check_weights(answers: dict[str, Any]) -> str:
    for problem in ("missing", "unexpected"):
        if names := answers[problem]:
            raise VerificationFailed(f"weights: {len(names):,} are {problem}, such as {names[0]}")
    return f"{answers['architecture']}, {answers['dtype']}: all are found, and none is left over"


def check_loss(answers: dict[str, Any], expected: float, precision: str, examples: int) -> str:
    """Compare the loss with the run's.

    Both come from the same numbers in another order: with other padding and kernels, and for
    another --dtype with rounded weights. An element z of the logits that is rounded once is off by
    at most u |z|, with u = 2^-8 in bf16, 2^-11 in fp16 and 2^-24 in fp32. To first order
    -log p(target) changes by sum_j p_j dz_j - dz_target, at most 2 (1 - p(target)) u max |z|. These
    errors have either sign, so that their mean over n examples shrinks like 1 / sqrt(n): four times
    that is allowed, and at least a tenth of the bound, since rounded weights are common to all.
    """
    from zerotrain.model.load import DTYPES

    dtypes = DTYPES[precision], getattr(torch, answers["dtype"])
    unit = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    share = min(1.0, max(0.1, 4 / sqrt(examples)))
    tolerance = max(LOSS_TOLERANCE * max(1.0, expected), 2 * unit * answers["sensitivity"] * share)
    difference = abs(answers["loss"] - expected)
    text = (
        f"{answers['loss']:.6f} over {examples:,} examples; the run's: {expected:.6f}; they differ "
        f"by {difference:.1e}, and rounding allows {tolerance:.1e}"
    )
    if not difference <= tolerance:  # also for NaN
        raise VerificationFailed(f"evaluation loss: {text}")
    return text


def check_prompts(
    served: list[list[int] | str], prompts: list[Prompt], tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """Compare the exported tokenizer's answers to `prompts` with the trained token ids."""
    for ids, prompt in zip(served, prompts, strict=True):
        if isinstance(ids, str):
            raise VerificationFailed(f"{prompt.place}: the exported tokenizer refuses it: {ids}")
        trained = prompt.trained if prompt.is_whole else prompt.trained[: len(ids)]
        if ids != trained:
            at = 0
            while ids[at : at + 1] == trained[at : at + 1]:
                at += 1
            tokens = [tokenizer.convert_ids_to_tokens(of[at : at + 1]) for of in (ids, trained)]
            raise VerificationFailed(
                f"{prompt.place}: served token {at + 1} is {tokens[0]}, the trained one {tokens[1]}"
            )
    rows = len({prompt.place.rpartition(": ")[0] for prompt in prompts})
    return f"{len(prompts):,} requests of {rows:,} rows give the trained token ids"


def _check_end_tokens(
    found: list[int], trained: list[int], tokenizer: "PreTrainedTokenizerBase"
) -> str:
    names = tokenizer.convert_ids_to_tokens(found)
    if missing := [token for token in trained if token not in found]:
        wanted = tokenizer.convert_ids_to_tokens(missing)
        raise VerificationFailed(
            f"end tokens: generate() stops at {names}, but answers were trained to end in {wanted}"
        )
    return f"generate() stops at {', '.join(names) or 'none'}"


# --------------------------------------------------------------------------------------------------
# The process that has only the folder


def answer(model_folder: str, questions: dict[str, Any]) -> dict[str, Any]:
    """Load the model and answer.

    Args:
        questions: prompts: arguments of prompt_ids; examples: of each the token ids, and the places
            of those that carry loss.

    Returns:
        architecture, dtype; missing, unexpected: names of tensors; end_tokens: ids at which
        generate() stops; prompts: token ids of each, or a string that says why there are none;
        loss: mean of -log p(target) in nats; sensitivity: mean of (1 - p(target)) max |logit|.
    """
    where = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model, found = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype="auto", output_loading_info=True, **where
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ends = model.generation_config.eos_token_id if model.can_generate() else []
    return {
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "missing": sorted(found["missing_keys"]),
        "unexpected": sorted(found["unexpected_keys"]),
        "end_tokens": [ends] if isinstance(ends, int) else ends or [],
        "prompts": [prompt_ids(tokenizer, **request) for request in questions["prompts"]],
        **mean_loss(model.eval(), questions["examples"]),
    }


def prompt_ids(tokenizer: Any, before_template: str = "", **request: Any) -> list[int] | str:
    """What a server makes of a request: int [tokens], or the error."""
    try:
        if "text" in request:
            return tokenizer(request["text"])["input_ids"]
        own = tokenizer.get_chat_template(tools=request["tools"])
        encoded = tokenizer.apply_chat_template(
            **request, chat_template=before_template + own, tokenize=True, return_dict=True
        )
        return encoded["input_ids"]
    except Exception as error:  # templates raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def mean_loss(model: Any, examples: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """`loss` and `sensitivity` over all targets, one example at a time, so without padding."""
    losses, sensitivities = [torch.zeros(0)], [torch.zeros(0)]
    for ids, targets in examples:
        tokens, places = torch.tensor(ids, device=model.device), torch.tensor(targets)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, places - 1].float().cpu()
        nats = torch.nn.functional.cross_entropy(logits, tokens.cpu()[places], reduction="none")
        losses.append(nats)
        sensitivities.append((1 - torch.exp(-nats)) * logits.abs().amax(-1))
    means = [torch.cat(values).double().mean().item() for values in (losses, sensitivities)]
    return {"loss": means[0], "sensitivity": means[1]}


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], json.load(sys.stdin))))
