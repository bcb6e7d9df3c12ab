"""Keys by which transformers 4 reads a folder that transformers 5 has written. Without them it has
neither the tokenizer's class nor the rotary embeddings, for which it takes defaults in silence.

With 4.57.6 the logits of small models of 50 architectures were the same, with each kind of rotary
embeddings. Others do not load, except ModernBERT's decoder, which is a different model there.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORIGINAL_LENGTH = "original_max_position_embeddings"
NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of most models in transformers 4, and GPT-NeoX's."""


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the object of a JSON file."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values, indent=2))


def add_class(config: dict[str, Any]) -> None:
    """Edit a tokenizer_config.json. All of the tokenizer is in tokenizer.json, to which the classes
    of some models add a bos token in transformers 4.
    """
    for key in ("is_local", "local_files_only"):  # how it was loaded here
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [])


def add_rope(config: dict[str, Any]) -> None:
    """Edit a config.json, where transformers 5 reads the same values from both names."""
    for part in (config, config.get("text_config", {})):
        rope = part.get("rope_parameters") or {}
        by_layer = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
        scaling = dict(by_layer.get("full_attention", rope))
        is_neox = config["model_type"].startswith("gpt_neox")
        for name, of_neox in NAMES.items():
            if name in scaling:
                part[of_neox if is_neox else name] = scaling.pop(name)
        if "sliding_attention" in by_layer:
            part["rope_local_base_freq"] = by_layer["sliding_attention"]["rope_theta"]
        if scaling.get("rope_type") == "longrope":  # Phi-3 takes these three keys, and no others
            part[ORIGINAL_LENGTH] = scaling.pop(ORIGINAL_LENGTH)
            scaling["type"] = scaling.pop("rope_type")
        if scaling:
            part["rope_scaling"] = scaling if len(scaling) > 1 else None  # default: its type alone
