"""What fuzz.py reads, and the cases for it: valid files and odd values for their parts."""

import bz2
import csv
import functools
import gzip
import io
import json
import math
import pickle
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import yaml
from fuzz import CANARY, ODD, REPO, RUNS_CODE, Case, Target, changed, damaged, one_of
from hypothesis import strategies as st

JSON_WORDS = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"{", b"}", b"[", b"]", b'"', b"\\", b"\\ud800",
    b",", b":", b"NaN", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"\n", b"\r",
    b"\x85", b"\t",
)  # fmt: skip


def to_json(tree: Any, indent: int | None = None) -> bytes:
    return json.dumps(tree, indent=indent, default=str).encode()


# --------------------------------------------------------------------------------------------------
# hostfile


def hostfile_target() -> Target:
    from cluster import hostfile

    names = st.sampled_from([
        "node-1", "node-2", "10.0.0.1", "localhost", "-oProxyCommand=touch${IFS}canary", "-x", "..",
        "../x", ".", "a/b", "user@node", "a" * 300, "nöde", "node;touch", "$(touch)", "%h", "::1",
    ])  # fmt: skip
    numbers = st.sampled_from([
        "1", "8", "8", "8", "0", "-1", "1025", "65536", "9999999999", "9" * 5000, "1e3", "٣", "",
        "x", "0x8",
    ])  # fmt: skip
    choices = st.sampled_from([
        "", "node-1", "node-1:0,1", "node-1:0@node-2", "node-9", "node-1:99", "@", ":", "node-1:²",
        f"node-1:{'9' * 5000}", "node-1:-1", "node-1:0-3", "node-1: 1 ",
    ])  # fmt: skip
    spaces, keys = st.sampled_from(" \t\u00a0"), st.sampled_from(["slots=", "slots = ", ""])
    more = st.sampled_from(["", " max_slots=8", " max-slots=1", " slots=1", " gpu=1", " # x"])
    line = st.tuples(names, spaces, keys, numbers, more).map("".join)
    ends = st.sampled_from(["\n", "\r\n", "\r", "\x0b", "\u2028"])

    @st.composite
    def cases(draw: Any) -> Case:
        lines = ["node-1 slots=8", "# comment", "", "node-2 slots=4 max_slots=8 # GPUs"]
        for inserted in draw(st.lists(line, max_size=2)):
            lines.insert(draw(st.integers(0, len(lines))), inserted)
        words = (b"#", b"=", b"@", b"\0", b"\xff", b"\xef\xbb\xbf")
        content = draw(ends).join(lines).encode()
        if draw(st.booleans()):
            content = draw(damaged(content, words))
        return Case({"hostfile": content}, (draw(choices), draw(choices)))

    def read(folder: Path, selection: tuple[str, str]) -> None:
        hosts = hostfile.read_hostfile(folder / "hostfile")
        (folder / "again").write_text(hostfile.format_hostfile(hosts))
        assert hostfile.read_hostfile(folder / "again") == hosts
        for host in hosts:
            assert not host.name.startswith("-") and ".." not in host.name, host.name
            assert len(host.slots) <= 65536, f"{len(host.slots)} slots"
        hostfile.select_hosts(hosts, *selection)

    return Target(cases(), read)


# --------------------------------------------------------------------------------------------------
# config

YAML_WORDS = (
    b"&a ", b"*a", b"<<: *a\n", b"!!python/object/apply:os.mkdir [canary]", b"!!binary ", b"!!set ",
    b"!!python/name:os.system", b"? ", b": ", b"- ", b"---\n", b"%YAML 9.9\n---\n", b"\t", b"\0",
    b"\xff", b"\xef\xbb\xbf", b"[" * 2000, b"{", b"'", b'"', b"|\n", b"2026-01-01", b"1_000",
    b"0o17", b"1:30", b".inf", b"\x85", b"~",
)  # fmt: skip
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
CLASSES = (
    {"class_path": "canary_module.Model", "init_args": {"x": 1}},
    {"class_path": "os.mkdir", "init_args": {"path": CANARY}},
    {"__class__": "canary_module.Model"},
    "canary_module.Model",
)


def config_target() -> Target:
    import docstring_parser

    from config.parse import dump_config, parse_command_line
    from config.places import config_keys
    from config.schema import Config

    # half of the time of parsing a command line, for the texts of --help
    docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)
    recipes = [yaml.safe_load(f.read_text()) for f in sorted((REPO / "recipes").glob("*.yaml"))]
    of_deepspeed = [json.loads(f.read_text()) for f in sorted((REPO / "ds_configs").glob("*.json"))]
    odd = ODD | one_of(CLASSES)
    others = [
        "model",
        "data",
        "x",
        "train.x",
        "train.steps.x",
        "model.class_path",
        "data.__class__",
    ]
    keys = st.sampled_from([*config_keys(Config), *others])

    @st.composite
    def cases(draw: Any) -> Case:
        # one of the two, so that one in five cases is accepted
        in_config = draw(st.booleans())
        config = draw(changed(draw(one_of(recipes)), odd, changes=3 * in_config))
        if isinstance(config, dict) and draw(st.integers(0, 9)):
            config = {**config, "ds_config": "ds_config.json"}
        text = yaml.safe_dump(config).encode("utf-8", "surrogatepass")
        if draw(st.integers(0, 3)) == 0:
            text = draw(damaged(text, YAML_WORDS))
        if draw(st.integers(0, 49)) == 0:
            text = ALIAS_BOMB.encode() + text
        ds_text = to_json(draw(changed(draw(one_of(of_deepspeed)), odd, changes=2 - 2 * in_config)))
        if draw(st.integers(0, 4)) == 0:
            ds_text = draw(damaged(ds_text, JSON_WORDS))
        flags = []
        for key in draw(st.lists(keys, max_size=2)):
            value = draw(odd)
            value = value if isinstance(value, str) else json.dumps(value)[:5000]
            flags += draw(st.sampled_from([[f"--{key}={value}"], [f"--{key}", value]]))
        return Case({"config.yaml": text, "ds_config.json": ds_text}, flags)

    def read(folder: Path, flags: list[str]) -> None:
        for name in ("data", "ds_configs"):  # which the recipes name
            (folder / name).symlink_to(REPO / name)
        dump_config(parse_command_line(["--config", "config.yaml", *flags]).config)

    return Target(cases(), read)


# --------------------------------------------------------------------------------------------------
# rows

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS: tuple[dict[str, Any], ...] = (
    {"text": "one"},
    {"prompt": "1+1?", "completion": "2"},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
     "completion": [{"role": "assistant", "content": "b"}]},
    {"instruction": "add", "input": "1 1", "output": "2", "system": "s", "history": [["q", "a"]]},
    {"instruction": "add", "context": "1 1", "response": "2"},
    {"INSTRUCTION": "add", "RESPONSE": "2"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 1, "reasoning_content": "r"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "b"},
     ],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
)  # fmt: skip


def binary_files() -> dict[str, list[dict[str, bytes]]]:
    """Files of each binary kind: what pyarrow and datasets write for some tables."""
    import datetime
    from decimal import Decimal

    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    datasets.disable_progress_bars()
    tables = [pa.Table.from_pylist([row] * 3) for row in ROWS]
    for columns in (
        {"text": ["a", "b", None], "id": [1, 2, 3], "date": [datetime.datetime(2026, 1, 1)] * 3},
        {"text": pa.array(["a", "b", "a"]).dictionary_encode(), "score": [Decimal("1.5")] * 3},
        {"text": pa.array([b"a", b"\xff", b"b"]), "duration": [datetime.timedelta(1)] * 3},
    ):
        tables.append(pa.table(columns))
    files: dict[str, list[dict[str, bytes]]] = {"arrow": [], "parquet": [], "folder": []}
    with tempfile.TemporaryDirectory() as folder:
        for number, table in enumerate(tables):
            for new in (pa.ipc.new_stream, pa.ipc.new_file):
                with pa.BufferOutputStream() as out:
                    with new(out, table.schema) as writer:
                        writer.write_table(table)
                    files["arrow"].append({"rows.arrow": out.getvalue().to_pybytes()})
            with pa.BufferOutputStream() as out:
                pyarrow.parquet.write_table(table, out)
                files["parquet"].append({"rows.parquet": out.getvalue().to_pybytes()})
            path = Path(folder) / str(number)
            datasets.Dataset(table).save_to_disk(path)
            files["folder"].append({f"rows/{f.name}": f.read_bytes() for f in path.iterdir()})
    return files


def to_csv(rows: list[Any], delimiter: str) -> bytes:
    """CSV with the columns of all rows that are objects; nested values are JSON."""
    rows, out = [row for row in rows if isinstance(row, dict)], io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, columns, delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
    return out.getvalue().encode("utf-8", "surrogatepass")


def rows_target() -> Target:
    import pyarrow
    from transformers import AutoTokenizer

    from config.schema import Source
    from data import sources
    from data.options import RenderOptions
    from data.render import fit, render

    tokenizer = AutoTokenizer.from_pretrained(REPO / "data" / "sample" / "model")
    binary = binary_files()
    writers: dict[str, Callable[[list], bytes]] = {
        "jsonl": lambda rows: b"".join(to_json(row) + b"\n" for row in rows),
        "json": to_json,
        "csv": lambda rows: to_csv(rows, ","),
        "tsv": lambda rows: to_csv(rows, "\t"),
    }
    compressions: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": lambda data: gzip.compress(data, 1, mtime=0),
        ".bz2": bz2.compress,
        ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
    }

    @st.composite
    def cases(draw: Any) -> Case:
        kind, as_chat = draw(st.sampled_from([*writers, *binary, *binary])), draw(st.booleans())
        if kind in binary:
            files = draw(one_of(binary[kind]))
            name = draw(st.sampled_from(sorted(files)))
            if name.endswith(".json") and draw(st.booleans()):
                content = to_json(draw(changed(json.loads(files[name]))))
            else:
                content = draw(damaged(files[name]))
            return Case({**files, name: content}, (name.split("/")[0], as_chat))
        rows = draw(changed(draw(st.lists(one_of(ROWS), min_size=1, max_size=3))))
        content = writers[kind](rows if isinstance(rows, list) else [rows])
        if draw(st.booleans()):
            content = draw(damaged(content, JSON_WORDS))
        suffix = draw(st.sampled_from(list(compressions)))
        content = compressions[suffix](content)
        if suffix and draw(st.booleans()):
            content = draw(damaged(content))
        name = f"rows.{kind}{suffix}"
        return Case({name: content}, (name, as_chat))

    def read(folder: Path, arguments: tuple[str, bool]) -> None:
        name, as_chat = arguments
        for _, raw in sources.read_rows(Source(path=name), max_row_characters=100_000):
            try:
                row = sources.parse_row(raw, {})
                form = sources.detect_format(row)
                options = RenderOptions(form, {}, as_chat, "answers", 64, "split")
                for ids, mask, _ in fit(*render(row, tokenizer, options), options):
                    assert len(ids) == len(mask) <= 64
            except sources.BadRow:  # tokenizing counts it, or raises a UserError
                pass

    return Target(cases(), read)


# --------------------------------------------------------------------------------------------------
# manifest and trainer state

RUN = {
    "plan_hash": "018d26ccc5ab83a3", "config_hash": "13de87cfa32cf918", "world_size": 2,
    "zero_stage": 2, "precision": "fp32",
    "plan": {"version": 3, "cache": "32fa2ec04f460699", "content": "5302444610fda9dc",
             "eval_fraction": 0.0, "seed": 42, "global_batch_size": 16, "global_batch_tokens": None,
             "window": 1, "mix": []},
    "optimization": {"train.weight_decay": 0.01, "train.adam_betas": [0.9, 0.98]},
    "schedule": {"name": "linear", "arguments": {}, "peak": 1e-3, "warmup_steps": 2, "steps": 8,
                 "shift": 0},
}  # fmt: skip
PROGRESS = {
    "step": 4, "examples": 63, "tokens": 5132, "eval_loss": 1.25, "wandb_id": None,
    "save_seconds": 0.1, "plan_changes": [], "eval_values": {"loss/math": 1.25},
    "best": {"metric": "eval_loss", "value": 1.25, "step": 2, "evaluations_since": 1},
    "guard": {"losses": [2.5, 2.25], "skipped": 1, "skipped_in_a_row": 0},
}  # fmt: skip
SMALL_FILES = {
    "deepspeed/mp_rank_00_model_states.pt": b"model",
    "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"rank 0",
    "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt": b"rank 1",
    "model/config.json": b"{}",
    "rng/rank_00000.pt": b"0",
    "rng/rank_00001.pt": b"1",
}


def manifest_of(files: dict[str, bytes]) -> dict[str, Any]:
    import xxhash

    made_by = {"save_id": "68e2", "world_size": 2, "zero_stage": 2, "versions": {"torch": "2.13.0"}}
    hashes = {name: xxhash.xxh3_64_hexdigest(content) for name, content in files.items()}
    entries = {name: {"bytes": len(files[name]), "xxh3_64": hashes[name]} for name in files}
    return {"made_by": made_by, "files": entries}


def state_target() -> Target:
    from checkpoint import find, state
    from checkpoint.run_folder import checkpoint_name
    from config.schema import CheckpointConfig

    whole = {"format": state.FORMAT, "run": RUN, "progress": PROGRESS}
    odd = ODD | st.sampled_from(["/etc/passwd", "../x", "rng/rank_"])
    names = st.sampled_from(["step_00000004"] * 5 + ["step_lowlr_ok", "step_٠٠٠٠٠٠٠٤"])

    @st.composite
    def cases(draw: Any) -> Case:
        content = to_json(draw(changed(whole)))
        if draw(st.integers(0, 4)) == 0:
            content = draw(damaged(content, JSON_WORDS))
        files = {**SMALL_FILES, "trainer_state.json": content}
        manifest = to_json(draw(changed(manifest_of(files), odd)))
        if draw(st.integers(0, 4)) == 0:
            manifest = draw(damaged(manifest, JSON_WORDS))
        files |= {"manifest.json": manifest, "COMPLETE": b"complete\n"}
        name, verify = draw(names), draw(st.sampled_from(["sizes", "checksums"]))
        arguments = name, draw(st.booleans()), verify
        return Case({f"checkpoints/{name}/{n}": content for n, content in files.items()}, arguments)

    def read(folder: Path, arguments: tuple[str, bool, str]) -> None:
        name, by_path, verify = arguments
        resume = str(folder / "checkpoints" / name) if by_path else "auto"
        config = CheckpointConfig(resume=resume, verify=verify)
        found, _ = find.find_checkpoint(config, folder / "checkpoints")
        if found is not None:
            find.check_local_shards(found, [0])
            read = state.read_state(found)
            state.write_state(folder, read)
            assert repr(state.read_state(folder)) == repr(read)
            assert checkpoint_name(read.progress.step) and read.run.world_size > 0

    return Target(cases(), read)


# --------------------------------------------------------------------------------------------------
# shards


def shard_trees() -> list[dict[str, Any]]:
    """DeepSpeed's files, by name, of a model with two parameters: at stage 0 on one rank, at stages
    2 and 3 on two.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)}
    shapes = {"a": (2, 3), "b": (4,)}
    model = {"module": weights, "buffer_names": [], "global_steps": 4, "lr_scheduler": None}

    def about(stage: int, *fragments: tuple) -> dict[str, Any]:
        layout = {
            "zero_stage": stage, "shards": 2 if stage else 1, "wrapper": "W", "optimizer": "AdamW",
            "fragments": [(name, shapes[name], *rest) for name, *rest in fragments],
            "frozen": {"c": (2,)},
        }  # fmt: skip
        read_from = {"name_or_path": "base", "revision": None, "fingerprint": "0123456789abcdef"}
        progress = {"updates": 4, "loss_scale": None}
        about = {"layout": layout, "progress": progress, "read_from": read_from}
        return about | {"prefixes": ["vision_tower: vision_model"]}

    def adam(*flats: torch.Tensor) -> dict[str, Any]:
        moments = {"exp_avg": flats[0], "exp_avg_sq": flats[0], "step": torch.tensor(4.0)}
        state = {i: {**moments, "exp_avg": flat} for i, flat in enumerate(flats)}
        return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.98)}]}

    flats = [weight.flatten() for weight in weights.values()]
    stages: list[dict[str, Any]] = [{}, {}, {}]
    stages[0]["mp_rank_00_model_states.pt"] = {
        **model, "optimizer": adam(*flats), **about(0, ("a", 0, 0, 0, 6), ("b", 1, 0, 0, 4)),
    }  # fmt: skip
    stage_2 = [about(2, ("a", 0, 0, 0, 5)), about(2, ("a", 0, 0, 5, 1), ("b", 0, 1, 0, 4))]
    stage_3 = [about(3, ("a", 0, 0, s, 3), ("b", 0, 3, t, 2)) for s, t in ((0, 0), (3, 2))]
    stages[1]["mp_rank_00_model_states.pt"] = {**model, "optimizer": None, **stage_2[0]}
    for rank in range(2):
        flat, name = torch.arange(5.0), f"zero_pp_rank_{rank}_mp_rank_00"
        common = {"loss_scaler": LossScaler(scale=1.0), "zero_stage": ZeroStageEnum(2)}
        partitioned = {
            **common, "base_optimizer_state": adam(flat), "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [{"a": fragment_address(numel=5, start=0)}],
        }  # fmt: skip
        flat_groups = {**common, "optimizer_state_dict": adam(flat), "fp32_flat_groups": [flat]}
        stages[1][f"{name}_optim_states.pt"] = {
            "optimizer_state_dict": partitioned,
            **stage_2[rank],
        }
        stages[2][f"{name}_optim_states.pt"] = {
            "optimizer_state_dict": flat_groups,
            **stage_3[rank],
        }
        stages[2][f"{name}_model_states.pt"] = {**model, "module": {}, **stage_3[rank]}
    return stages


def shards_target() -> Target:
    import torch

    from checkpoint.shards import STATES, Shards

    stages = shard_trees()
    tensors = [torch.empty(0), torch.ones(3, dtype=torch.int8), torch.empty(2, device="meta")]
    odd = ODD | one_of(tensors) | RUNS_CODE
    extra = st.sampled_from(
        ["zero_pp_rank_7_mp_rank_00_optim_states.pt", "rank_x_optim_states.pt", "0_model_states.pt"]
    )

    def to_file(tree: Any, is_zip: bool) -> bytes:
        out = io.BytesIO()
        try:
            torch.save(tree, out, _use_new_zipfile_serialization=is_zip)
        except (RecursionError, NotImplementedError):  # DEEP; a tensor on the meta device
            hypothesis.reject()
        return out.getvalue()

    @st.composite
    def cases(draw: Any) -> Case:
        trees = draw(one_of(stages))
        victim = draw(st.sampled_from(sorted(trees)))
        files = {name: to_file(tree, True) for name, tree in trees.items()}
        files[victim] = to_file(draw(changed(trees[victim], odd)), draw(st.integers(0, 9)) > 0)
        if draw(st.booleans()):
            files[victim] = draw(damaged(files[victim]))
        elif draw(st.integers(0, 9)) == 0:
            files[victim] = pickle.dumps(draw(RUNS_CODE))
        manifest = manifest_of({f"deepspeed/{name}": content for name, content in files.items()})
        if draw(st.integers(0, 4)) == 0:  # a file that the manifest does not name
            files[draw(extra)] = pickle.dumps(draw(RUNS_CODE))
        files = {f"checkpoint/deepspeed/{name}": content for name, content in files.items()}
        return Case({**files, "checkpoint/manifest.json": to_json(manifest)})

    def read(folder: Path, arguments: None) -> None:
        shards = Shards(folder / "checkpoint")
        read_from = shards.read_from
        assert read_from is None or all(isinstance(v, str | None) for v in read_from.values())
        assert all(isinstance(change, str) for change in shards.prefixes)
        assert set(shards.missing()) <= set(shards.names())
        for name in filter(shards.holds, shards.names()):
            assert tuple(shards.weight(name).shape) == tuple(shards.shape(name))
        for name in shards.trained:
            for key in STATES:
                shards.read(name, key, 0, math.prod(shards.shape(name)))
        assert isinstance(shards.progress["updates"], int), shards.progress
        shards.buffers()
        shards.layout(1)

    return Target(cases(), read)


# --------------------------------------------------------------------------------------------------
# metrics.jsonl


def metrics_target() -> Target:
    from runtime.errors import UserError
    from tracking.report import content_of, runs_of

    train = {"kind": "train", "step": 1, "time": 1.8e9, "loss": 2.0, "step_seconds": 0.5}
    start = {"kind": "start", "step": 0, "world_size": 2, "hosts": ["a"], "gpus": [["x"]]}
    records = [
        {**train, "padding_efficiency": 0.9, "data_seconds": 0.1}, {**train, "step": 2}, start,
        {**start, "step": 1, "hosts": ["a", "b"], "versions": {"torch": "2"}},
        {"kind": "eval", "step": 2, "loss/a": 1.0, "score/a": 0.5, "eval_loss": 1.0},
        {"kind": "save", "step": 2, "save_seconds": 1.0},
        {"kind": "event", "step": 2, "time": 1.8e9, "name": "hang", "text": "rank 1"},
        {"kind": "generations", "step": 2, "set": "a", "rows": [{"prompt": "a", "score": 1.0}]},
        {"kind": "ranks", "step": 2, "own_seconds": [0.1, 0.2], "hosts": ["a", "b"],
         "gpu": [{"power_watts": 1.0}, None]},
    ]  # fmt: skip
    odd = ODD | st.sampled_from(["<script>", "</script>", "<img src=x>", "step", "loss/<b>"])
    configs = {"resolved_config.yaml": b"train: {seed: 1}", "resolved_ds_config.json": b"{}"}

    @st.composite
    def cases(draw: Any) -> Case:
        chosen = draw(st.lists(one_of(records), min_size=1, max_size=3))
        content = b"\n".join(to_json(draw(changed(record, odd, 2))) for record in chosen)
        if draw(st.integers(0, 2)) == 0:
            content = draw(damaged(content, JSON_WORDS))
        return Case({"metrics.jsonl": content, **configs})

    def read(folder: Path, _: Any) -> None:
        content = content_of(runs_of([folder]))
        json.loads(content["figures"])
        assert "<" not in content["figures"], "a text could end the script"
        if content["problems"]:
            raise UserError(f"left out: {content['problems'][0][1]}")

    return Target(cases(), read)


TARGETS: dict[str, Callable[[], Target]] = {  # cluster/ may have been deleted
    **({"hostfile": hostfile_target} if find_spec("cluster") else {}),
    "config": config_target,
    "rows": rows_target,
    "state": state_target,
    "shards": shards_target,
    "metrics": metrics_target,
}
