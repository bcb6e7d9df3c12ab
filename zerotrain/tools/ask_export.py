"""Answer questions about an exported folder, with transformers alone.

    python -I ask_export.py MODEL_FOLDER < questions.json

zerotrain/tools/verify.py runs this file as a script. It imports nothing of this repository, so that
it loads the folder as any server would.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer


def answer(model_folder: str, questions: dict[str, Any]) -> dict[str, Any]:
    """Load the model and answer.

    Args:
        questions: `prompts`, arguments of prompt_ids; `examples`, pairs of the token ids of an
            example and the positions of its supervised tokens.

    Returns:
        architecture; dtype; unmatched: names of tensors that are missing or left over; end_tokens:
        ids at which generate() stops; prompts: for each the token ids or an error; loss: mean of
        -log p(target) in nats, NaN without examples.
    """
    where = {"device_map": "auto"} if torch.cuda.is_available() else {}
    [architecture] = AutoConfig.from_pretrained(model_folder).architectures
    model, report = getattr(transformers, architecture).from_pretrained(
        model_folder, dtype="auto", output_loading_info=True, **where
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ends = model.generation_config.eos_token_id if model.can_generate() else []
    return {
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "unmatched": sorted([*report["missing_keys"], *report["unexpected_keys"]]),
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
    """Return the token ids that a server makes of a request, or an error.

    Args:
        text: the request without a chat template; the other arguments are for chats.
        conversations: forms of the messages. The first that the chat template accepts is used.
        before_template: text to put before the chat template.
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
        except Exception as error:  # A template can raise anything.
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return problem


@torch.no_grad()
def mean_loss(model: Any, examples: list[tuple[list[int], list[int]]]) -> float:
    """Return the mean over all targets. Each example runs alone, so without padding."""
    losses = [torch.zeros(0)]
    for ids, targets in examples:
        tokens = torch.tensor(ids, device=model.device)
        positions = torch.tensor(targets)
        output = model(input_ids=tokens[None], use_cache=False)
        logits = output.logits[0, positions - 1].float().cpu()
        wanted = tokens.cpu()[positions]
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(losses).double().mean().item()


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], json.load(sys.stdin))))
