"""Fuzzes what reads files of others: a damaged or hostile file ends in a UserError of one line, and
runs no code.

    python tests/fuzz/fuzz.py                   every target, 10,000 cases each
    python tests/fuzz/fuzz.py 100000 rows       one target

Cases are valid files with random changes, the same in each run. The first failure ends it: another
exception than a UserError, a crash, 10 s of CPU time or 4 GiB for one case, or code of the file
that ran. The folder with the files of that case is kept.
"""

import functools
import gzip
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import psutil
import yaml

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / folder) for folder in (".", "tests", "tests/rows", "tests/tools")]
os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
CPU_SECONDS, MEMORY_BYTES = 10, 4 << 30
CANARY = "canary"
"""A folder that only code of a case creates."""


class RunsCode:
    """An object whose pickle creates the canary when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)


DEEP = functools.reduce(lambda inner, _: [inner], range(90), [])
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


def changed(rng, tree, odd=ODD):
    """`tree` with one node replaced, removed, added or in a list."""
    if not isinstance(tree, dict | list | tuple) or not tree or rng.random() < 0.1:
        return rng.choice([rng.choice(odd), [tree]])
    is_dict = isinstance(tree, dict)
    copy = dict(tree) if is_dict else dict(enumerate(tree))
    key, how = rng.choice(list(copy)), rng.random()
    if how < 0.1:
        del copy[key]
    elif how < 0.2:
        copy[rng.choice(["x", "", "a\nb", "__class__"])] = rng.choice(odd)
    else:
        copy[key] = changed(rng, copy[key], odd)
    return copy if is_dict else type(tree)(copy.values())


def damaged(rng, content):
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


def to_json(tree):
    return json.dumps(tree, default=str).encode()


def with_changes(rng, change, value, *more):
    """`value` after no, one or two changes."""
    for _ in range(rng.randrange(3)):
        value = change(rng, value, *more)
    return value


def perhaps_damaged(rng, content):
    return damaged(rng, content) if rng.random() < 0.3 else content


# --------------------------------------------------------------------------------------------------
# Targets: a function that makes the files of a case, by path, and a function that reads them, given
# their folder


def hostfile_target():
    from zerotrain.launch import hostfile

    content = b"node-1 slots=8\n# comment\n\nnode-2 slots=4 max_slots=8 # GPUs\n10.0.0.1 slots=1\n"

    def read(folder):
        for host, devices in hostfile.read_hosts(str(folder / "hostfile")).items():
            assert not host.startswith("-") and ".." not in host, host
            assert len(devices) <= 65536

    return lambda rng: {"hostfile": with_changes(rng, damaged, content)}, read


def config_target():
    from zerotrain.config.ds_config import resolve_ds_config
    from zerotrain.config.parse import dump_config, parse_command_line
    from zerotrain.runtime.machine import Machine

    def parse(file):
        return parse_command_line(["--config", str(file), "--ds_config", "ds.json"]).config

    tree = yaml.safe_load(dump_config(parse(REPO / "recipes" / "demo.yaml")))
    ds_tree = json.loads((REPO / "ds_configs" / "zero2.json").read_text())

    def make(rng):
        text = yaml.safe_dump(with_changes(rng, changed, tree)).encode("utf-8", "surrogatepass")
        return {
            "config.yaml": perhaps_damaged(rng, text),
            "ds.json": to_json(with_changes(rng, changed, ds_tree)),
        }

    def read(folder):
        dump_config(resolve_ds_config(parse("config.yaml"), Machine(1, 1), 64)[0])

    return make, read


def rows_target():
    import numpy as np
    import pyarrow
    from pyarrow.feather import write_feather
    from pyarrow.parquet import write_table
    from test_messages import AS_THEY_ARE

    from zerotrain.config.schema import Config, DataConfig, ModelConfig, Source, TrainConfig
    from zerotrain.data.cache import open_cache
    from zerotrain.rows.tokenize import make_caches

    model = ModelConfig(str(REPO / "data" / "sample" / "model"))
    train = TrainConfig(learning_rate=1.0, epochs=1, global_batch_size=1)
    rows = [json.loads(text) for text, *_ in AS_THEY_ARE.values()]
    rows += [{"text": "one"}, {"input_ids": [5, 6], "loss_mask": [0, 1]}]
    binary = []
    for row in rows:
        table = pyarrow.Table.from_pylist([row] * 3)
        for name, write in (("rows.arrow", write_feather), ("rows.parquet", write_table)):
            file = io.BytesIO()
            write(table, file, compression=None)
            binary.append((name, file.getvalue()))

    def make(rng):
        row = with_changes(rng, changed, rng.choice(rows))
        name, content = rng.choice([
            ("rows.jsonl", to_json(row) + b"\n"), ("rows.json", to_json([row] * 2)),
            ("rows.csv", b"prompt,completion\n" + to_json(row) + b',"2"\n'), rng.choice(binary),
        ])  # fmt: skip
        content = with_changes(rng, damaged, content)
        if rng.random() < 0.3 and name.endswith(("jsonl", "json", "csv")):
            content = with_changes(rng, damaged, gzip.compress(content, 1, mtime=0))
            name += ".gz"
        return {name: content}

    def read(folder):
        [file] = folder.glob("rows.*")
        source = Source(path=str(file), on_bad_row="skip")
        for as_chat in (False, True):
            config = DataConfig(
                [source], as_chat=as_chat, max_length=64, on_too_long="split", cache_dir="cache"
            )
            [cache] = make_caches(Config("run", model, config, train))
            rows = open_cache(cache)
            assert all(ids.size <= 64 for ids, _ in rows.fetch(np.arange(len(rows))))

    return make, read


def checkpoint_target():
    import torch
    import xxhash

    from zerotrain.checkpoint import state
    from zerotrain.checkpoint.shards import Shards
    from zerotrain.data.data_plan import PlanRecord
    from zerotrain.runtime.errors import UserError
    from zerotrain.tools.saved import checkpoint_problem, whole_weight

    plan = PlanRecord(4, "5302444610fda9dc", 42, 16, None)
    run = state.RunIdentity(plan, 2, 2, "fp32", {"train.weight_decay": 0.01})
    progress = state.Progress(4, 63, 5132, 1.25, state.Best(1.25, 2), wandb_id="5f3a91c2")
    tree = asdict(state.TrainerState(run, progress))
    flat = torch.arange(6.0)
    whole = {
        "parts": {n: (0, {"fp32": f, "exp_avg": f}) for n, f in (("a", flat), ("b", flat[:4]))},
        "shapes": {"a": [2, 3], "b": [4], "c": [2]},
        "tensor": 1, "split": {},
        "trained": ["a", "b"], "buffers": {}, "updates": 4, "loss_scaler": {},
        "rng": {"cuda": None},
        "base": {"name_or_path": "base", "revision": None, "fingerprint": "0123456789abcdef"},
    }  # fmt: skip
    split = whole | {"tensor": 2, "split": {"a": 1}}
    shallow = [value for value in ODD if value is not DEEP]  # which cannot be pickled
    odd = (*shallow, torch.empty(0), torch.ones(3, dtype=torch.int8), *[RunsCode()] * 5)

    def to_shard(tree):
        out = io.BytesIO()
        torch.save(tree, out)
        return out.getvalue()

    def make(rng):
        victim = rng.choice(["trainer_state.json", "manifest.json", "shards/rank_00000.pt"])

        def content(name, write, tree):
            if name != victim:
                return write(tree)
            return perhaps_damaged(rng, write(with_changes(rng, changed, tree, odd)))

        files = {"trainer_state.json": content("trainer_state.json", to_json, tree)}
        for rank, shard in enumerate(rng.choice([[whole], [split, split]])):
            name = f"shards/rank_0000{rank}.pt"
            files[name] = content(name, to_shard, shard)
        entries = {
            name: {"bytes": len(written), "xxh3_64": xxhash.xxh3_64_hexdigest(written)}
            for name, written in files.items()
        }
        manifest = {"save_id": "68e2", "files": entries}
        files |= {
            "manifest.json": content("manifest.json", to_json, manifest),
            "shards/rank_00007.pt": pickle.dumps(RunsCode()),  # not in the manifest
            "COMPLETE": b"complete\n",
        }
        return {f"checkpoints/step_00000004/{name}": written for name, written in files.items()}

    def read(folder):
        checkpoint = folder / "checkpoints/step_00000004"
        if problem := checkpoint_problem(checkpoint):
            raise UserError(problem)
        shards = Shards(checkpoint)
        for name, shape in shards.first.shapes.items():
            if shards.holds(name):
                weight = whole_weight(shards, name)
                assert name in shards.first.split or list(weight.shape) == shape
                shards.read(name, "exp_avg", 0, math.prod(shape))
        state.read_state(checkpoint)

    return make, read


def metrics_target():
    from test_report import write_run

    from zerotrain.tools.report import read_run, report_page

    written = write_run(Path(tempfile.mkdtemp()) / "run", 2) / "metrics.jsonl"
    records = [json.loads(line) for line in written.read_text().splitlines()]

    def make(rng):
        chosen = [with_changes(rng, changed, record) for record in rng.sample(records, 2)]
        content = b"\n".join(map(to_json, [records[1], *chosen]))
        configs = {"resolved_config.yaml": b"{}", "resolved_ds_config.json": b"{}"}
        return {"metrics.jsonl": perhaps_damaged(rng, content), **configs}

    def read(folder):
        page = report_page([folder]).partition("<h1>")[2]  # behind plotly
        assert "<img" not in page, "a text could load something"
        return not read_run(folder).problems

    return make, read


TARGETS = {  # hostfiles may have been left out
    **({"hostfile": hostfile_target} if find_spec("zerotrain.launch") else {}),
    "config": config_target,
    "rows": rows_target,
    "checkpoint": checkpoint_target,
    "metrics": metrics_target,
}


# --------------------------------------------------------------------------------------------------
# Running cases


def run_cases(name, make, read, cases, folder):
    """Run a target's cases, whose working directory is `folder`."""
    from zerotrain.runtime.errors import UserError

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
                accepted += read(folder) is not False
        except UserError as error:
            assert "\n" not in str(error), error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert not Path(CANARY).exists(), "code of the case ran"
    print(f"{name}: {cases} cases, {accepted} accepted", flush=True)


def main():
    cases, *names = sys.argv[1:] or ["10000"]
    targets = {name: TARGETS[name]() for name in names or TARGETS}
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    folder = Path(tempfile.mkdtemp(prefix="fuzz_"))
    print(f"after a failure its files are in {folder}", flush=True)
    for name, target in targets.items():
        run_cases(name, *target, int(cases), folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
