"""The inputs of runs: small models, rows, run configs and ds_configs."""

import json
import shutil
import zlib
from itertools import cycle
from pathlib import Path

import yaml
from harness.repository import REPO

from zerotrain.checkpoint.manifest import measure
from zerotrain.config.parse import parse_command_line

yaml.SafeDumper.add_multi_representer(Path, lambda dumper, path: dumper.represent_str(str(path)))
SMALL_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes of a small model, by transformers' names."""


def strategy(tmp_path, name, changes=None):
    """Copy a file of ds_configs/ with torch's AdamW, which needs no compiler, and return its path.

    Args:
        changes: dotted path -> new value.
    """
    ds_config = json.loads((REPO / "ds_configs" / f"{name}.json").read_text())
    for path, value in {"optimizer.params.torch_adam": True, **(changes or {})}.items():
        set_value(ds_config, path, value)
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(ds_config))
    return str(file)


def read_config(file, *flags):
    """Read a run config as train.py does."""
    return parse_command_line(["--config", str(file), *flags]).config


def flip(file):
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rewrite(checkpoint, name, content):
    """Replace a file of a checkpoint and its entry in the manifest, as an attacker would."""
    (checkpoint / name).write_bytes(content)
    manifest = checkpoint / "manifest.json"
    values = json.loads(manifest.read_text())
    values["files"][name] = measure(checkpoint / name)
    manifest.write_text(json.dumps(values))


def change_json(file, **changes):
    """Replace values of the object in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*texts):
    """A row with messages of the user and the assistant, alternately."""
    turns = zip(cycle(("user", "assistant")), texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def weighted(rows):
    """Copies of chats, most with a weight for the row and one for its last message."""
    return [
        {
            "weight": 1 - i % 2 / 3,
            "messages": [*row["messages"][:-1], {**row["messages"][-1], "weight": 1 / (1 + i % 3)}],
        }
        for i, row in enumerate(rows)
    ]


def mix_of_formats(tmp_path, chat_rows):
    """Write files of five row formats, and return their paths."""
    chats = [{"id": f"row {i}", **row} for i, row in enumerate(chat_rows[:9])]
    chats.append(chat("What is 1+1?", "It is 2.", "And 2+2?", "It is 4."))
    pairs = [{"prompt": f"{i}+1? ", "completion": f"{i + 1}\n"} for i in range(6)]
    tasks = [{"instruction": "Add", "input": f"{i} and 1", "output": "ok"} for i in range(6)]
    files = {"chat": chats, "pairs": pairs, "tasks": tasks, "text": [{"text": "one two"}] * 3}
    files["tokens"] = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 3
    return [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()]


def save_tiny_llama(folder, tokenizer, dropout=0.0, **sizes):
    """Save a Llama with tied embeddings and random weights, and a tokenizer; return the folder.

    Args:
        sizes: replace SMALL_SIZES.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL_SIZES | {"intermediate_size": 64} | sizes, max_position_embeddings=1024,
        tie_word_embeddings=True, attention_dropout=dropout, initializer_range=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def copy_with_code(model, folder, ran):
    """Copy a model, and add code that its config.json names. The code creates the file `ran`."""
    shutil.copytree(model, folder)
    code = (
        "from transformers import LlamaConfig\nclass Evil(LlamaConfig):\n    model_type = 'evil'\n"
    )
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n{code}")
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.Evil"}, model_type="evil")
    return folder


def set_value(tree, path, value):
    """Set the value at a dotted path of nested dictionaries."""
    *parents, leaf = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value


def write_tiny_config(tmp_path, chat_rows, model, name, **changes):
    """Write tiny.yaml with paths and changes, for 2 epochs if no steps are given; return its path.
    `a__b=value` sets the key a.b, to its default if the value is None.

    All tests of a process share the rows and their token caches.
    """
    shared = tmp_path.parent / f"rows_{zlib.crc32(json.dumps(chat_rows).encode())}"
    shared.mkdir(exist_ok=True)
    for file, rows in (("train.jsonl", chat_rows), ("eval.jsonl", chat_rows[:9])):
        if not (shared / file).exists():
            write_rows(shared / file, rows)
        if not (tmp_path / file).exists():
            (tmp_path / file).symlink_to(shared / file)
    values = {
        "output_dir": tmp_path / "run", "model__name_or_path": model,
        "data__train_sources": [tmp_path / "train.jsonl"],
        "data__eval_sources": [tmp_path / "eval.jsonl"],
        "data__cache_dir": shared / "cache",
        "train__epochs": None if "train__steps" in changes else 2,
    }  # fmt: skip
    config = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text())
    for key, value in (values | changes).items():
        set_value(config, key.replace("__", "."), value)
    (tmp_path / name).write_text(yaml.safe_dump(config, sort_keys=False))
    return tmp_path / name
