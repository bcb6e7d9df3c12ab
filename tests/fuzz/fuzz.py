"""Fuzzes what reads files of others: a damaged or hostile file ends in a UserError of one line, and
runs no code.

    python tests/fuzz/fuzz.py                          every target, 10,000 cases each
    python tests/fuzz/fuzz.py rows --cases 100000      one target

Cases are valid files with random changes, the same in each run. A target ends at its first failure:
another exception than a UserError, a crash, 10 s of CPU time or 4 GiB for one case, or
code of the file that ran. The folder with the files of that case is kept; exit code 1.
"""

import argparse
import functools
import gzip
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
CPU_SECONDS, MEMORY_BYTES = 10, 4 << 30
CANARY = "canary"
"""A folder that only code of a case creates."""

Files = dict[str, bytes]
Target = tuple[Callable[[random.Random], Files], Callable[[Path], Any]]
"""Makes the files of a case, by path; and reads them, given their folder."""


class RunsCode:
    """An object whose pickle creates the canary when it is loaded."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (CANARY,)


DEEP: list = functools.reduce(lambda inner, _: [inner], range(90), [])
ODD = (
    None, True, 0, -1, 2**63, 10**400, 0.5, math.inf, math.nan, "", "x", "-1", "1e999", "\0",
    "\ud800", "a" * 20_000, "..", "/dev/null", "~", "a\nb", "<|im_end|>", "<img src=x>",
    [], {}, [None], {"": None}, DEEP, [0] * 5000, {"class_path": "os.mkdir", "init_args": [CANARY]},
)  # fmt: skip
WORDS = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\\ud800", b",", b":", b"1e999",
    b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"\n", b"\r", b"\x85", b"\t", b"&a ",
    b"!!python/object/apply:os.mkdir [canary]", b"*a", b"---\n", b"slots=", b"#",
)  # fmt: skip


def changed(rng: random.Random, tree: Any, odd: tuple = ODD) -> Any:
    """`tree` with one node replaced, removed, added or in a list."""
    if not isinstance(tree, dict | list | tuple) or not tree or rng.random() < 0.1:
        return rng.choice([rng.choice(odd), [tree]])
    if isinstance(tree, dict):
        key, how = rng.choice(list(tree)), rng.random()
        if how < 0.1:
            return {other: value for other, value in tree.items() if other != key}
        if how < 0.2:
            return {**tree, rng.choice(["x", "", "a\nb", "__class__"]): rng.choice(odd)}
        return {**tree, key: changed(rng, tree[key], odd)}
    items, at = list(tree), rng.randrange(len(tree))
    items[at] = changed(rng, items[at], odd)
    return type(tree)(items)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """`content` cut off, with a part removed or repeated, with other bytes, or with a word more."""
    at, length = rng.randrange(len(content) + 1), rng.choice([1, 1, 4, 8, 64, 4096])
    before, here, after = content[:at], content[at : at + length], content[at + length :]
    number = rng.choice([-1, 0, 100, 2**31 - 1, 2**40]) % 2**64
    return rng.choice([
        before, before + after, before + here * 200 + after,
        before + rng.choice(WORDS) + here + after,
        before + number.to_bytes(8, "little") + content[at + 8 :],
        before + bytes(byte ^ 1 for byte in here) + after,
    ])  # fmt: skip


def to_json(tree: Any) -> bytes:
    return json.dumps(tree, default=str).encode()


def with_changes(rng: random.Random, change: Callable, value: Any, *more: Any) -> Any:
    """`value` after no, one or two changes."""
    for _ in range(rng.randrange(3)):
        value = change(rng, value, *more)
    return value


# --------------------------------------------------------------------------------------------------
# Targets


def hostfile_target() -> Target:
    from zerotrain.launch import hostfile

    content = b"node-1 slots=8\n# comment\n\nnode-2 slots=4 max_slots=8 # GPUs\n10.0.0.1 slots=1\n"

    def read(folder: Path) -> None:
        for host in hostfile.read_hostfile(folder / "hostfile"):
            assert not host.name.startswith("-") and ".." not in host.name, host.name
            assert len(host.slots) <= 65536

    return lambda rng: {"hostfile": with_changes(rng, damaged, content)}, read


def config_target() -> Target:
    from zerotrain.config.ds_config import resolve_ds_config
    from zerotrain.config.parse import dump_config, parse_command_line
    from zerotrain.config.schema import Config, DataConfig, ModelConfig, TrainConfig
    from zerotrain.runtime.machine import Machine

    train = TrainConfig(learning_rate=1e-3, global_batch_size=8, steps=10)
    data = DataConfig(train_sources=["rows.jsonl"])
    whole = Config(output_dir="run", model=ModelConfig(name_or_path="m"), data=data, train=train)
    tree = {**yaml.safe_load(dump_config(whole)), "ds_config": "ds.json"}
    ds_tree = json.loads((REPO / "ds_configs" / "zero2.json").read_text())
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(9))

    def make(rng: random.Random) -> Files:
        text = yaml.safe_dump(with_changes(rng, changed, tree)).encode("utf-8", "surrogatepass")
        if rng.random() < 0.3:
            text = damaged(rng, text)
        text = bomb.encode() + text if rng.random() < 0.02 else text
        return {"config.yaml": text, "ds.json": to_json(with_changes(rng, changed, ds_tree))}

    def read(folder: Path) -> None:
        config = parse_command_line(["--config", "config.yaml"]).config
        dump_config(resolve_ds_config(config, Machine(1, 1), 64)[0])

    return make, read


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS: tuple[dict[str, Any], ...] = (
    {"text": "one"},
    {"prompt": "1+1?", "completion": "2"},
    {"instruction": "add", "input": "1 1", "output": "2", "system": "s"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 1, "reasoning_content": "r"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "b"}]},
)  # fmt: skip


def rows_target() -> Target:
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    from zerotrain.config.schema import DataConfig, Source
    from zerotrain.data import sources
    from zerotrain.data.render import cut_to_length, tokenize_row

    tokenizer = AutoTokenizer.from_pretrained(REPO / "data" / "sample" / "model")
    binary = []
    for row in ROWS:
        table = pyarrow.Table.from_pylist([row] * 3)
        arrow, parquet = io.BytesIO(), io.BytesIO()
        with pyarrow.ipc.new_file(arrow, table.schema) as writer:
            writer.write_table(table)
        pyarrow.parquet.write_table(table, parquet)
        binary += [("rows.arrow", arrow.getvalue()), ("rows.parquet", parquet.getvalue())]

    def make(rng: random.Random) -> Files:
        row = with_changes(rng, changed, rng.choice(ROWS))
        name, content = rng.choice([
            ("rows.jsonl", to_json(row) + b"\n"), ("rows.json", to_json([row] * 2)),
            ("rows.csv", b"prompt,completion\n" + to_json(row) + b',"2"\n'), rng.choice(binary),
        ])  # fmt: skip
        content = with_changes(rng, damaged, content)
        if rng.random() < 0.3 and name.endswith(("jsonl", "json", "csv")):
            content = with_changes(rng, damaged, gzip.compress(content, 1, mtime=0))
            name += ".gz"
        return {name: content}

    def read(folder: Path) -> None:
        [file] = folder.glob("rows.*")
        for _, raw in sources.read_rows(Source(path=str(file))):
            for as_chat in (False, True):
                try:
                    row = sources.parse_row(raw, {})
                    form = sources.detect_format(row)
                    config = DataConfig(["x"], as_chat=as_chat, max_length=64, on_too_long="split")
                    ids, mask, _ = tokenize_row(row, tokenizer, form, config)
                    for piece, targets in cut_to_length(ids, mask, config)[0]:
                        assert len(piece) == len(targets) <= 64
                except sources.BadRow:  # tokenizing counts it, or raises a UserError
                    pass

    return make, read


STATE = {
    "run": {
        "world_size": 2, "zero_stage": 2, "precision": "fp32",
        "plan": {"version": 4, "content": "5302444610fda9dc", "seed": 42, "global_batch_size": 16,
                 "global_batch_tokens": None},
        "settings": {"train.weight_decay": 0.01, "train.adam_betas": [0.9, 0.98]},
    },
    "progress": {
        "step": 4, "examples": 63, "tokens": 5132, "eval_loss": 1.25, "wandb_id": "5f3a91c2",
        "plan_start": {"step": 0, "epoch": 0, "position": 0},
        "best": {"value": 1.25, "step": 2},
        "skipped_in_a_row": 0,
    },
}  # fmt: skip


def manifest_of(files: Files) -> dict[str, Any]:
    import xxhash

    made_by = {"world_size": 2, "versions": {"torch": "2.13.0"}}
    entries = {
        name: {"bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
        for name, content in files.items()
    }
    return {"save_id": "68e2", "made_by": made_by, "files": entries}


def state_target() -> Target:
    from zerotrain.checkpoint import start, state
    from zerotrain.config.schema import CheckpointConfig

    settings = CheckpointConfig()

    shards = {f"shards/rank_0000{rank}.pt": b"rank" for rank in range(2)}

    def make(rng: random.Random) -> Files:
        files = {**shards, "trainer_state.json": to_json(with_changes(rng, changed, STATE))}
        manifest = manifest_of(files)
        if rng.random() < 0.3:
            manifest = changed(rng, manifest)
        files |= {"manifest.json": to_json(manifest), "COMPLETE": b"complete\n"}
        if rng.random() < 0.2:
            name = rng.choice(["manifest.json", "trainer_state.json"])
            files[name] = damaged(rng, files[name])
        return {f"checkpoints/step_00000004/{name}": content for name, content in files.items()}

    def read(folder: Path) -> None:
        views = [start.inspect_on_this_node(settings, folder / "checkpoints")]
        found, _ = start.find_checkpoint(settings, folder / "checkpoints", views)
        if found is not None:
            read = state.read_state(found)
            state.write_state(folder, read)
            assert repr(state.read_state(folder)) == repr(read)

    return make, read


def shards_target() -> Target:
    import torch

    from zerotrain.checkpoint.shards import Shards
    from zerotrain.tools.saved import whole_weight

    flat = torch.arange(6.0)
    whole = {
        "parts": {n: (0, {"fp32": f, "exp_avg": f}) for n, f in (("a", flat), ("b", flat[:4]))},
        "shapes": {"a": [2, 3], "b": [4], "c": [2]},
        "tensor": 1, "split": {},
        "trained": ["a", "b"], "buffers": {}, "updates": 4, "loss_scaler": {},
        "rng": {"cuda": None},
        "base": {"name_or_path": "base", "revision": None, "fingerprint": "0123456789abcdef"},
    }  # fmt: skip
    odd = (*ODD, torch.empty(0), torch.ones(3, dtype=torch.int8), *[RunsCode()] * 5)

    def make(rng: random.Random) -> Files:
        ranks = rng.choice([1, 2])  # that have the pieces of "a"
        files = {}
        for rank in range(ranks):
            shard = whole | {"tensor_rank": rank}
            if ranks == 2:
                shard |= {"tensor": 2, "split": {"a": 1}}
            out = io.BytesIO()
            try:
                torch.save(with_changes(rng, changed, shard, odd), out)
            except RecursionError:  # DEEP
                torch.save(shard, out)
            content = damaged(rng, out.getvalue()) if rng.random() < 0.4 else out.getvalue()
            if rng.random() < 0.1:
                content = pickle.dumps(RunsCode())
            files[f"shards/rank_0000{rank}.pt"] = content
        files["manifest.json"] = to_json(manifest_of(files))
        files["shards/rank_00007.pt"] = pickle.dumps(RunsCode())  # not in the manifest
        return {f"checkpoint/{name}": content for name, content in files.items()}

    def read(folder: Path) -> None:
        shards = Shards(folder / "checkpoint")
        for name, shape in shards.first.shapes.items():
            if shards.holds(name):
                weight = whole_weight(shards, name)
                assert name in shards.first.split or list(weight.shape) == shape
                for key in ("fp32", "exp_avg"):
                    shards.read(name, key, 0, math.prod(shape))

    return make, read


def metrics_target() -> Target:
    from zerotrain.runtime.errors import UserError
    from zerotrain.tools.report import read_run, report_page

    records = [
        {"kind": "train", "step": 1, "time": 1.8e9, "loss": 2.0, "step_seconds": 0.5},
        {"kind": "start", "step": 0, "world_size": 2, "hosts": ["a"], "devices": {"x": 2}},
        {"kind": "eval", "step": 2, "loss/a": 1.0, "score/a": 0.5, "eval_loss": 1.0},
        {"kind": "event", "step": 2, "time": 1.8e9, "name": "hang", "text": "rank 1"},
        {"kind": "generations", "step": 2, "set": "a", "rows": [{"prompt": "a", "score": 1.0}]},
        {"kind": "ranks", "step": 2, "probe_seconds": [0.1, 0.2], "hosts": ["a", "b"],
         "gpu": [{"temperature_celsius": 1.0}, None]},
    ]  # fmt: skip

    def make(rng: random.Random) -> Files:
        chosen = [with_changes(rng, changed, record) for record in rng.sample(records, 2)]
        content = b"\n".join(map(to_json, [records[0], *chosen]))
        content = damaged(rng, content) if rng.random() < 0.3 else content
        configs = {"resolved_config.yaml": b"{}", "resolved_ds_config.json": b"{}"}
        return {"metrics.jsonl": content, **configs}

    def read(folder: Path) -> None:
        page = report_page([folder]).partition("<h1>")[2]  # behind plotly
        assert "<img" not in page, "a text could load something"
        if problems := read_run(folder).problems:
            raise UserError(f"left out: {problems[0]}")

    return make, read


TARGETS: dict[str, Callable[[], Target]] = {  # hostfiles may have been left out
    **({"hostfile": hostfile_target} if find_spec("zerotrain.launch") else {}),
    "config": config_target,
    "rows": rows_target,
    "state": state_target,
    "shards": shards_target,
    "metrics": metrics_target,
}


# --------------------------------------------------------------------------------------------------
# Running cases


def run_cases(name: str, cases: int, folder: Path) -> None:
    """Run a target in a child process, whose working directory is the folder of each case."""
    from zerotrain.runtime.errors import UserError

    make, read = TARGETS[name]()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rng, accepted = random.Random(0), 0
    for _ in range(cases):
        shutil.rmtree(folder)
        folder.mkdir()
        os.chdir(folder)
        for path, content in make(rng).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        try:
            with redirect_stdout(io.StringIO()):
                read(folder)
            accepted += 1
        except UserError as error:
            assert "\n" not in str(error), error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert not Path(CANARY).exists(), "code of the case ran"
    print(f"{name}: {cases} cases, {accepted} accepted", flush=True)


def main() -> None:
    sys.path.insert(0, str(REPO))
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each target")
    args = parser.parse_args()
    failed = False
    for name in args.targets or TARGETS:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz_{name}_"))
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=run_cases, args=(name, args.cases, folder))
        child.start()
        child.join()
        if child.exitcode:
            failed = True
            print(f"FAILED {name}: exit code {child.exitcode}; the files of the case: {folder}")
        else:
            shutil.rmtree(folder)
    sys.exit(failed)


if __name__ == "__main__":
    main()
