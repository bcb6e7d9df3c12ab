"""Damaged and hostile files end in a UserError of one line, and run no code.

    pytest tests/fuzz                                 100 cases of each kind of file
    CASES=10000 pytest --timeout 0 tests/fuzz         more

A case is a valid file with up to two random changes, the same cases in each run. It fails with any
other exception, after 10 s, above 4 GiB of memory, or if code of the file has run. hypothesis then
looks for the smallest case that fails, and leaves its files in `case` in the test's tmp_path.
"""

import copy
import functools
import gzip
import io
import json
import math
import os
import resource
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
import torch
import yaml
from harness.inputs import read_config, rewrite
from harness.repository import REPO, SAMPLE
from harness.runs import checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.feather import write_feather
from pyarrow.parquet import write_table
from test_messages import AS_THEY_ARE
from test_report import write_run

from zerotrain.checkpoint.run_folder import MANIFEST
from zerotrain.checkpoint.shards import Shards
from zerotrain.checkpoint.state import read_state
from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.parse import dump_config
from zerotrain.config.schema import Config, DataConfig, ModelConfig, Source, TrainConfig
from zerotrain.data.cache import open_cache
from zerotrain.rows.tokenize import make_caches
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.report import read_run, report_page
from zerotrain.tools.saved import checkpoint_problem, whole_weight

CASES = int(os.environ.get("CASES", "100"))
CANARY = "canary"
"""A folder that only code of a case creates."""


class RunsCode:
    """An object whose pickle creates the canary when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)

    def __deepcopy__(self, memo):
        return self


DEEP = functools.reduce(lambda inner, _: [inner], range(90), [])
ODD = (
    None, True, 0, -1, 2**63, 10**400, 0.5, math.inf, math.nan, "", "x", "-1", "1e999", "\0",
    "\ud800", "a" * 20_000, "..", "/dev/null", "~", "a\nb", "<|im_end|>", "<img src=x>",
    [], {}, [None], {"": None}, DEEP, [0] * 5000, {"class_path": "os.mkdir", "init_args": [CANARY]},
)  # fmt: skip
IN_SHARDS = (*ODD, torch.empty(0), torch.ones(3, dtype=torch.int8), *[RunsCode()] * 5)
WORDS = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\\ud800", b",", b":", b"1e999",
    b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"\n", b"\r", b"\x85", b"\t", b"&a ",
    b"!!python/object/apply:os.mkdir [canary]", b"*a", b"---\n", b"slots=", b"#",
)  # fmt: skip
HOSTS = b"node-1 slots=8\n# comment\n\nnode-2 slots=4 max_slots=8 # GPUs\n10.0.0.1 slots=1\n"


def slots(tree):
    """(container, key) of each value in nested dictionaries and lists."""
    values = tree if isinstance(tree, list | tuple) else ()
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(values):
        if not isinstance(tree, tuple):
            yield tree, key
        yield from slots(value)


def changed(draw, tree, odd=ODD):
    """`tree` with up to two values replaced, removed, added or put into a list."""
    root = [copy.deepcopy(tree)]
    for _ in range(draw(st.integers(0, 2))):
        container, key = draw(st.sampled_from(list(slots(root))))
        value, how = copy.deepcopy(draw(st.sampled_from(odd))), draw(st.integers(0, 9))
        if how == 0 and container is not root:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[draw(st.sampled_from(["x", "", "a\nb", "__class__"]))] = value
        else:
            container[key] = [container[key]] if how == 2 else value
    return root[0]


def damaged(draw, content):
    """`content` after up to two cuts, repetitions, insertions and changes of bytes."""
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at, length = draw(st.integers(0, len(content))), draw(st.sampled_from([1, 4, 64, 4096]))
        before, here, after = content[:at], content[at : at + length], content[at + length :]
        number = draw(st.sampled_from([-1, 0, 100, 2**31 - 1, 2**40])) % 2**64
        content = before + draw(st.sampled_from([
            b"", after, here * 200 + after, draw(st.sampled_from(WORDS)) + here + after,
            number.to_bytes(8, "little") + content[at + 8 :],
            bytes(byte ^ 1 for byte in here) + after,
        ]))  # fmt: skip
    return content


def to_json(tree):
    return json.dumps(tree, default=str).encode()


@pytest.fixture
def fuzz(tmp_path, monkeypatch):
    """Runs cases of `make(draw)`, which writes files into the working folder, and `read()`."""
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def run(make, read):
        accepted = []

        @settings(max_examples=CASES, deadline=10_000, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(st.data())
        def check(data):
            os.chdir(tmp_path)
            shutil.rmtree("case", ignore_errors=True)
            Path("case").mkdir()
            os.chdir("case")
            make(data.draw)
            try:
                with redirect_stdout(io.StringIO()):
                    accepted.append(read() is not False)
            except UserError as error:
                accepted.append(False)
                assert "\n" not in str(error), error
            assert not Path(CANARY).exists(), "code of the case ran"

        memory = psutil.Process().memory_info().vms + 4 * GIB
        resource.setrlimit(resource.RLIMIT_AS, (memory, limits[1]))
        check()
        # accepted files are read to their end, and the others are cases of interest
        assert 0 < np.mean(accepted) < 0.95

    yield run
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_damaged_hostfile_is_refused_in_one_line(fuzz):
    read_hosts = pytest.importorskip("zerotrain.launch.hostfile").read_hosts

    def read():
        for host, devices in read_hosts("hostfile").items():
            assert not host.startswith("-") and ".." not in host, host
            assert len(devices) <= 65536

    fuzz(lambda draw: Path("hostfile").write_bytes(damaged(draw, HOSTS)), read)


def test_a_damaged_config_is_refused_in_one_line(fuzz):
    tree = yaml.safe_load(dump_config(read_config(REPO / "recipes" / "demo.yaml")))
    ds_tree = json.loads((REPO / "ds_configs" / "zero2.json").read_text())

    def make(draw):
        text = yaml.safe_dump(changed(draw, tree)).encode("utf-8", "surrogatepass")
        Path("config.yaml").write_bytes(damaged(draw, text))
        Path("ds.json").write_bytes(to_json(changed(draw, ds_tree)))

    def read():
        config = read_config("config.yaml", "--ds_config", "ds.json")
        dump_config(resolve_ds_config(config, Machine(1, 1), 64)[0])

    fuzz(make, read)


def test_damaged_rows_are_refused_in_one_line(fuzz):
    model = ModelConfig(str(SAMPLE / "model"))
    train = TrainConfig(learning_rate=1.0, epochs=1, global_batch_size=1)
    rows = [row for row, *_ in AS_THEY_ARE.values()]
    rows += [{"text": "one"}, {"input_ids": [5, 6], "loss_mask": [0, 1]}]

    def make(draw):
        original = draw(st.sampled_from(rows))
        row, binary = changed(draw, original), io.BytesIO()
        kind = draw(st.sampled_from(["jsonl", "json", "csv", "arrow", "parquet"]))
        if kind in ("arrow", "parquet"):
            write = write_feather if kind == "arrow" else write_table
            write(pyarrow.Table.from_pylist([original] * 3), binary, compression=None)
        contents = {
            "jsonl": to_json(row) + b"\n", "json": to_json([row] * 2),
            "csv": b"prompt,completion\n" + to_json(row) + b',"2"\n',
        }  # fmt: skip
        content = damaged(draw, contents.get(kind, binary.getvalue()))
        if kind in contents and draw(st.integers(0, 2)) == 0:
            kind, content = f"{kind}.gz", damaged(draw, gzip.compress(content, 1, mtime=0))
        Path(f"rows.{kind}").write_bytes(content)

    def read():
        [file] = Path().glob("rows.*")
        source = Source(path=str(file), on_bad_row="skip")
        for as_chat in (False, True):
            config = DataConfig(
                [source], as_chat=as_chat, max_length=64, on_too_long="split", cache_dir="cache"
            )
            [cache] = make_caches(Config("run", model, config, train))
            rows = open_cache(cache)
            assert all(ids.size <= 64 for ids, _ in rows.fetch(np.arange(len(rows))))

    fuzz(make, read)


@pytest.mark.parametrize(
    "ds_config, lora, ranks",
    [("zero2", {"r": 2, "alpha": 2}, 1), ("zero1_autotp", None, 2)],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    fuzz, forks, tiny_config, tmp_path, ds_config, lora, ranks
):
    """Of frozen weights with adapters, and of weights that are split among two ranks."""
    config = tiny_config(ds_config=f"ds_configs/{ds_config}.json", model__lora=lora, train__steps=1)
    forks.finish(config, ranks=ranks)
    [saved] = checkpoints(tmp_path / "run")
    torch.save(RunsCode(), saved / "shards/rank_00007.pt")  # not in the manifest

    def make(draw):
        checkpoint = shutil.copytree(saved, Path("checkpoints", saved.name))
        name = draw(st.sampled_from([MANIFEST, "trainer_state.json", "shards/rank_00000.pt"]))
        if name.endswith(".pt"):
            out = io.BytesIO()
            shard = torch.load(checkpoint / name, weights_only=False)
            torch.save(changed(draw, shard, IN_SHARDS), out)
            content = out.getvalue()
        else:
            content = to_json(changed(draw, json.loads((checkpoint / name).read_text())))
        content = damaged(draw, content)
        if name == MANIFEST:
            (checkpoint / name).write_bytes(content)
        else:
            rewrite(checkpoint, name, content)

    def read():
        checkpoint = Path("checkpoints", saved.name).absolute()
        if problem := checkpoint_problem(checkpoint):
            raise UserError(problem)
        shards = Shards(checkpoint)
        for name, shape in shards.first.shapes.items():
            if shards.holds(name):
                weight = whole_weight(shards, name)
                assert name in shards.first.split or list(weight.shape) == shape
                shards.read(name, "exp_avg", 0, math.prod(shape))
        read_state(checkpoint)

    fuzz(make, read)


def test_damaged_metrics_are_skipped_or_refused_in_one_line(fuzz, tmp_path):
    written = (write_run(tmp_path / "run", 2) / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in written.splitlines()]

    def make(draw):
        chosen = [changed(draw, draw(st.sampled_from(records))) for _ in range(2)]
        content = b"\n".join(map(to_json, [records[1], *chosen]))
        Path("metrics.jsonl").write_bytes(damaged(draw, content))
        for name in ("resolved_config.yaml", "resolved_ds_config.json"):
            Path(name).write_text("{}")

    def read():
        page = report_page([Path()]).partition("<h1>")[2]  # behind plotly
        assert "<img" not in page, "a text could load something"
        return not read_run(Path()).problems

    fuzz(make, read)
