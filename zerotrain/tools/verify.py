"""Checks an exported folder against its run.

A separate process, which has only the folder, runs this file as a script. It imports nothing of
this repository: it loads the folder with transformers alone. It has to arrive at the run's last
evaluation loss and, from the messages of some rows, at the token ids that were trained on, and to
stop at the end tokens that were trained.

    python -I verify.py MODEL_FOLDER < questions.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerotrain.checkpoint.state import TrainerState
    from zerotrain.config.schema import Config
    from zerotrain.data.cache import TokenizedRows
    from zerotrain.data.data_plan import DataPlan

SAMPLED_ROWS = 20
FIRST_EXAMPLES = 10_000  # from which they are taken, so that not all of a large file is read
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the evaluation loss, relative, or in nats below 1: rounding and the order of sums differ. Half
a unit in the last place of a logit near 10 is 5e-7, 4e-3 and 3e-2; over the held-out tokens such
errors mostly cancel.
"""


class VerificationFailed(Exception):
    """The folder differs from the run. `str(error)` is one line that says in what."""


class Request(NamedTuple):
    """What a server would be asked, and the token ids that it has to arrive at."""

    place: str
    """FILE:LINE of the row, and which part of it."""
    arguments: dict[str, Any]
    """Of prompt_ids."""
    trained: list[int]
    """Ids of the row's example, which begin with the request, or are all of it without a generation
    prompt.
    """


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
    from zerotrain.model.load import DTYPES

    eval_plan = next(iter(eval_plans.values()), None)
    data = (eval_plan or train_plan).data
    requests = list(sample_requests(data, config, held_out=bool(eval_plan)))
    expected = state.progress.eval_loss if eval_plan else None
    questions = {"prompts": [request.arguments for request in requests], "examples": []}
    if expected is not None:
        for ids, mask in data.fetch(np.arange(len(data))):
            questions["examples"].append([ids.tolist(), np.flatnonzero(mask).tolist()])
    answers = _answers(folder, questions)

    result = {"weights": f"{answers['architecture']}, {answers['dtype']}: all are found"}
    if names := answers["unmatched"]:
        raise VerificationFailed(f"weights: {len(names):,} are missing or left over: {names[0]}")
    if expected is not None:
        dtypes = DTYPES[state.run.precision], getattr(torch, answers["dtype"])
        tolerance = max(LOSS_TOLERANCE[dtype] for dtype in dtypes)
        text = f"{answers['loss']:.6f} over {len(data):,} examples; the run's: {expected:.6f}"
        if not abs(answers["loss"] - expected) <= tolerance * max(1.0, expected):  # also for NaN
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
    """The answers of a process that has only the folder."""
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


def sample_requests(data: "TokenizedRows", config: "Config", held_out: bool) -> Iterator[Request]:
    """What a server would be asked in SAMPLED_ROWS rows, evenly spaced among the first ones: for
    each supervised answer the turns before it, and the whole row. Rows that were cut are left out.

    Args:
        held_out: `data` are of the first held-out set, not of the training sources.

    Raises:
        UserError: a source cannot be read.
    """
    from zerotrain.tools.source_rows import canonical_rows

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
    """(part, arguments of prompt_ids) of a canonical row."""
    from zerotrain.rows.turns import FIXED_DATE, with_arguments_as_text
    from zerotrain.tools.source_rows import supervised_answers

    if "input_ids" in row:  # tokens were given: there is no text to ask with
        return
    if "messages" not in row:  # no template: the tokenizer alone
        yield "its text", {"text": row["prompt"] or row["completion"]}
        return
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in row["messages"]]
    parts = {
        f"the prompt of message {i + 1}": i for i in supervised_answers(row["messages"], supervise)
    }
    for part, end in {**parts, "its messages": len(messages)}.items():
        forms = [messages[:end], with_arguments_as_text(messages[:end])]
        yield (
            part,
            {
                "conversations": forms,
                "before_template": FIXED_DATE,
                "tools": row.get("tools"),
                "add_generation_prompt": part in parts,
            },
        )


def check_prompts(
    served: list[list[int] | str], requests: list[Request], tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """Compare the exported tokenizer's answers to `requests` with the trained token ids."""
    for ids, request in zip(served, requests, strict=True):
        if isinstance(ids, str):
            raise VerificationFailed(f"{request.place}: the exported tokenizer refuses it: {ids}")
        is_whole = request.arguments.get("add_generation_prompt") is False
        trained = request.trained if is_whole else request.trained[: len(ids)]
        if ids != trained:
            same = [*map(eq, ids, trained), False].index(False)
            tokens = [tokenizer.convert_ids_to_tokens(i[same : same + 1]) for i in (ids, trained)]
            raise VerificationFailed(
                f"{request.place}: served token {same + 1} is {tokens[0]}, the trained one "
                f"{tokens[1]}"
            )
    return f"{len(requests):,} requests give the trained token ids"


# --------------------------------------------------------------------------------------------------
# The process that has only the folder


def answer(model_folder: str, questions: dict[str, Any]) -> dict[str, Any]:
    """Load the model and answer.

    Args:
        questions: prompts: arguments of prompt_ids; examples: of each the token ids, and the places
            of those that carry loss.

    Returns:
        architecture, dtype; unmatched: names of tensors that are missing or unexpected; end_tokens:
        ids at which generate() stops; prompts: token ids of each, or a string that says why there
        are none; loss: mean of -log p(target) in nats, NaN without examples.
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
        "unmatched": sorted([*found["missing_keys"], *found["unexpected_keys"]]),
        "end_tokens": [ends] if isinstance(ends, int) else ends or [],
        "prompts": [prompt_ids(tokenizer, **request) for request in questions["prompts"]],
        "loss": mean_loss(model.eval(), questions["examples"]),
    }


def prompt_ids(
    tokenizer: Any,
    text: str | None = None,
    conversations: Sequence[list[dict[str, Any]]] = (),
    before_template: str = "",
    **request: Any,
) -> list[int] | str:
    """What a server makes of a request: int [tokens], or the error.

    Args:
        text: in place of the following, which are for chats.
        conversations: forms of the messages, of which the first is taken that the chat template
            does not refuse.
        request: further arguments of apply_chat_template.
    """
    if text is not None:
        return tokenizer(text)["input_ids"]
    problem = ""
    for messages in conversations:
        try:
            template = before_template + tokenizer.get_chat_template(tools=request["tools"])
            return tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, **request
            )["input_ids"]
        except Exception as error:  # templates raise anything
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return problem


@torch.no_grad()
def mean_loss(model: Any, examples: list[tuple[list[int], list[int]]]) -> float:
    """Over all targets, one example at a time, so without padding."""
    losses = [torch.zeros(0)]
    for ids, targets in examples:
        tokens = torch.tensor(ids, device=model.device)
        places = torch.tensor(targets)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, places - 1].float().cpu()
        losses.append(
            torch.nn.functional.cross_entropy(logits, tokens.cpu()[places], reduction="none")
        )
    return torch.cat(losses).double().mean().item()


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], json.load(sys.stdin))))
