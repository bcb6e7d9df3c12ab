"""Keys that let transformers 4.57 read a folder that transformers 5 has written.

Without them it silently takes defaults for the tokenizer's class and the rotary embeddings. With
them, small models of 50 architectures had the same loss in 4.57.6. Tried kinds of rotary
embeddings: default, llama3, yarn, longrope (also with `factor`), partial (GPT-NeoX) and by layer
type (Gemma 3, Olmo 3). The losses of Gemma 2, VaultGemma and Apertus differ by up to 6e-4.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig

ORIGINAL_LENGTH = "original_max_position_embeddings"
NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of most models in transformers 4, and GPT-NeoX's."""
DERIVED = {"type", "attention_factor"}
"""Keys of rotary embeddings that follow from the others in transformers 5."""


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the object of a JSON file."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values, indent=2))


def add_class(config: dict[str, Any]) -> None:
    """Edit a tokenizer_config.json. In transformers 4, some models' own classes would add a bos
    token to what tokenizer.json says.
    """
    for key in ("is_local", "local_files_only"):  # how the tokenizer was loaded here
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [])


def add_rope(file: Path) -> None:
    """Edit a config.json. It stays as it is if transformers 5 would then read other values: in some
    of its newer models rope_scaling is another name of rope_parameters.
    """
    text = file.read_text()
    was = _read(file)
    config = json.loads(text)
    for part in (config, config.get("text_config") or {}):
        part |= _older_rope(part, config["model_type"])
    file.write_text(json.dumps(config, indent=2))
    with suppress(Exception):  # A config's own checks can raise anything.
        if _is_same(_read(file), was):
            return
    file.write_text(text)


def _read(file: Path) -> dict[str, Any]:
    """Return the values that transformers 5 reads from a config.json."""
    return AutoConfig.from_pretrained(file, trust_remote_code=False).to_dict()


def _is_same(now: Any, was: Any) -> bool:
    """Return whether transformers 5 computes the same with the values `now`. A config may have more
    keys, which no code reads, and rotary embeddings those that transformers 5 derives.
    """
    if not (isinstance(now, dict) and isinstance(was, dict)):
        return now == was
    is_config = "model_type" in was
    more = now.keys() - was.keys()
    return (is_config or more <= DERIVED) and all(
        name in now and _is_same(now[name], value) for name, value in was.items()
    )


def _older_rope(part: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return the keys that say in transformers 4 what rope_parameters says in transformers 5."""
    older: dict[str, Any] = {}
    rope = part.get("rope_parameters") or {}
    by_layer = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    scaling = dict(by_layer.get("full_attention", {}) if by_layer else rope)
    is_neox = model_type.startswith("gpt_neox")
    for name, of_neox in NAMES.items():
        if name in scaling:
            older[of_neox if is_neox else name] = scaling.pop(name)
    if "sliding_attention" in by_layer:
        local = by_layer["sliding_attention"].get("rope_theta")
        if model_type.startswith("gemma3"):
            older["rope_local_base_freq"] = local
        elif local != older.get("rope_theta"):
            older["rope_theta"] = None  # 4.57 has one theta for all layers: let it fail.
    if scaling.get("rope_type") == "longrope":
        older[ORIGINAL_LENGTH] = length = scaling[ORIGINAL_LENGTH]
        if model_type.startswith("phi"):  # It reads the length from there alone.
            del scaling[ORIGINAL_LENGTH]
        if factor := scaling.get("factor"):  # 4.57 ignores it, and reads what follows from it.
            default = math.sqrt(1 + math.log(max(1, factor)) / math.log(length))
            scaling.setdefault("attention_factor", default)
        scaling["type"] = scaling.pop("rope_type")  # Phi-3 needs this name.
    if scaling:
        older["rope_scaling"] = scaling if len(scaling) > 1 else None  # default: its type alone
    return older
