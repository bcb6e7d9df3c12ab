"""What a model folder gives to whoever loads it with transformers alone, for verify.py.

    python -I stranger.py MODEL_FOLDER FOLDER

Imports nothing of this repository; with -I, it could not. FOLDER has

    prompts.json    [{"conversation": messages, "tools": ..., "add_generation_prompt": bool}
                    or {"text": ...}]; before_template: what sets the date in the template
    examples.npz    ids int32 [tokens], mask bool [tokens]: which of them carry loss,
                    lengths int32 [examples]
    answers.json    is written: see `answer`
    done            gets a byte for each example whose loss has been computed
"""

import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model_folder: str, folder: Path) -> dict[str, Any]:
    """Load the model and answer what `folder` asks.

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
    ends = model.generation_config.eos_token_id if model.can_generate() else None
    answers = {
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "missing": sorted(found["missing_keys"]),
        "unexpected": sorted(found["unexpected_keys"]),
        "end_tokens": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "prompts": [
            prompt_ids(tokenizer, **prompt)
            for prompt in json.loads((folder / "prompts.json").read_text())
        ],
    }
    with np.load(folder / "examples.npz") as arrays:
        ids, mask, lengths = (arrays[name] for name in ("ids", "mask", "lengths"))
    with (folder / "done").open("ab", buffering=0) as done:
        return answers | mean_loss(model.eval(), ids, mask, lengths, done)


def prompt_ids(tokenizer: Any, before_template: str = "", **prompt: Any) -> list[int] | str:
    """What a server makes of a request: int [tokens], or the error."""
    try:
        if "text" in prompt:
            return tokenizer(prompt["text"])["input_ids"]
        if before_template:
            own = tokenizer.get_chat_template(tools=prompt["tools"])
            prompt["chat_template"] = before_template + own
        encoded = tokenizer.apply_chat_template(**prompt, tokenize=True, return_dict=True)
        return encoded["input_ids"]
    except Exception as error:  # templates raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def mean_loss(
    model: Any, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, done: BinaryIO
) -> dict[str, float]:
    """`loss` and `sensitivity` over all targets, one example at a time, so without padding."""
    loss = sensitivity = 0.0
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        example = torch.from_numpy(ids[start:end].astype(np.int64)).to(model.device)
        targets = np.flatnonzero(mask[start:end])
        logits = model(input_ids=example[None], use_cache=False).logits[0, targets - 1].float()
        nats = torch.nn.functional.cross_entropy(
            logits, example[targets].to(logits.device), reduction="none"
        )
        loss += nats.double().sum().item()
        largest = logits.abs().amax(-1)
        sensitivity += ((1 - torch.exp(-nats)) * largest).double().sum().item()
        done.write(b".")
    count = max(1, int(mask.sum()))
    return {"loss": loss / count, "sensitivity": sensitivity / count}


if __name__ == "__main__":
    output = Path(sys.argv[2])
    text = json.dumps(answer(sys.argv[1], output))
    (output / "answers.json").write_text(text)
