"""Config: precedence, mistakes in one line, the DeepSpeed config.   pytest tests/test_config.py"""

import json
import sys

import pytest
import yaml
from conftest import REPO, run

from zerotrain.config.batch_math import scaled_learning_rate, warmup_steps
from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.parse import config_keys, dump_config, read_yaml
from zerotrain.data.check_sources import parse_with_sources
from zerotrain.runtime.errors import UserError

DS_CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))


def parse(config_file, *flags):
    return parse_with_sources(["--config", str(config_file), *flags]).config


def complaint(*arguments, of=parse):
    with pytest.raises(UserError) as caught:
        of(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_below_yaml_below_flags(tiny_config):
    flags = ["--train.learning_rate", "1e-5", "--data.max_length=128", "--local_rank=1"]
    line = parse_with_sources([*flags, "--config", str(tiny_config()), "--dry_run"])
    train = line.config.train
    assert line.dry_run and train.adam_betas == (0.9, 0.999)  # default
    assert train.global_batch_size == 12  # YAML
    assert (train.learning_rate, line.config.data.max_length) == (1e-5, 128)  # flags
    lora = parse(tiny_config(model__lora={"r": 4}), "--model.lora.alpha", "8").model.lora
    assert (lora.r, lora.alpha) == (4, 8)
    assert parse(tiny_config(model__lora={"r": 4}), "--model.lora", "null").model.lora is None


def test_a_dumped_config_reads_back_equal_but_for_trust(tiny_config, tmp_path):
    config = parse(tiny_config(train__adam_betas=[0.9, 0.95], data__columns={"prompt": "q"}))
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert parse(tmp_path / "dumped.yaml") == config
    trusted = parse(tiny_config(), "--model.trust_remote_code", "true")
    assert trusted.model.trust_remote_code and "trust" not in dump_config(trusted)
    said = complaint(tiny_config(model__trust_remote_code=True))
    assert "config.yaml: model.trust_remote_code" in said
    assert "add --model.trust_remote_code true" in said


def test_a_file_may_have_a_base(tiny_config, tmp_path):
    tiny_config("base.yaml", train__steps=3, train__epochs=None)
    (tmp_path / "middle.yaml").write_text("base: base.yaml\ntrain: {seed: 1, learning_rate: 1}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: middle.yaml\ntrain: {seed: 2, steps: null, epochs: 5}\n")
    train = parse(top).train
    assert (train.seed, train.learning_rate, train.steps, train.epochs) == (2, 1.0, None, 5)
    assert "base" not in yaml.safe_load(dump_config(parse(top)))
    (tmp_path / "middle.yaml").write_text("base: base.yaml\ntrain: {sede: 1}\n")
    assert f"{tmp_path}/middle.yaml: train.sede: unknown key" in complaint(top)


MISTAKES = {  # changes of the config -> key, part of the problem
    "unknown key": ({"train__learning_rat": 1}, "train.learning_rat", "mean train.learning_rate?"),
    "wrong type": ({"train__learning_rate": "fast"}, "train.learning_rate", 'number, got "fast"'),
    "not one of": ({"data__on_too_long": "cut"}, "data.on_too_long", "'split'"),
    "another name": ({"train__precision": "bfloat16"}, "train.precision", "did you mean bf16?"),
    "epochs and steps": ({"train__steps": 5}, "train.epochs", "exactly one"),
    "no reference batch": ({"train__lr_scaling": "sqrt"}, "train.lr_scaling", "reference_global"),
    "path and hub": ({"data__train_sources": [{"path": "a", "hub": "b/c"}]},
                     "data.train_sources", "either path or hub"),
    "key of a source": ({"data__train_sources": [{"path": "a", "fromat": "text"}]},
                        "data.train_sources", "did you mean format?"),
    "missing data": ({"data__train_sources": ["no.jsonl"]}, "data.train_sources", "no.jsonl"),
    "missing model": ({"model__name_or_path": "./no"}, "model.name_or_path", "no such folder"),
    "two hold-outs": ({"data__eval_fraction": 0.1}, "data.eval_fraction", "not both"),
    "no ds_config": ({"ds_config": "ds_configs/zero9.json"}, "ds_config", "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_file_and_key(tiny_config, case):
    changes, key, problem = MISTAKES[case]
    path = tiny_config(**changes)
    said = complaint(path)
    assert said.startswith(f"{path}: {key}: ") and problem in said, said


def test_mistakes_on_the_command_line(tiny_config, tmp_path, monkeypatch):
    path = tiny_config()
    for flags, key, problem in (
        (["--train.sedd", "3"], "train.sedd", "did you mean train.seed?"),
        (["--deepspeed", "ds_configs/zero2.json"], "deepspeed", "did you mean ds_config?"),
        (["--train.seed", "x"], "train.seed", "integer"),
        (["--train.seed"], "--train.seed", "needs a value"),
        (["--model", "x"], "model", "is a section"),
    ):
        said = complaint(path, *flags)
        assert said.startswith(f"command line: {key}") and problem in said, said
    assert "no --config FILE" in complaint([], of=parse_with_sources)
    assert "cannot read" in complaint(tmp_path)
    assert f"{path}: required key output_dir" in complaint(tiny_config(output_dir=None))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert "12 is smaller than the number of ranks (16)" in complaint(tiny_config())


def test_files_of_others_run_nothing_and_end(tiny_config, tmp_path):
    path = tmp_path / "broken.yaml"
    for text, problem in {
        "": "not a run config",
        "a: &a [x]\nb: [*a, *a]": "alias *a",
        "a: !!python/object/apply:os.system [ls]": "not YAML",
        "output_dir: a\noutput_dir: b": "output_dir: occurs twice",
        "tracking: {class_path: evil.Evil}": "tracking.class_path: unknown key",
        "x" * 1_000_001: "has over 1,000,000 bytes",
    }.items():
        path.write_text(text)
        said = complaint(path)
        assert said.startswith(f"{path}: ") and problem in said, said
    path.write_bytes(b"output_dir: \xff")
    assert complaint(path) == f"{path}: not UTF-8 text (byte 12)"


def test_yaml_is_read_as_written():
    text = "{a: off, b: 1e-5, c: 2026-01-01, d: 010, e: 1_000, f: .5, g: null, h: true, 1: '1'}"
    assert read_yaml(text, "here") == {
        "a": "off", "b": 1e-5, "c": "2026-01-01", "d": 10, "e": 1000, "f": 0.5, "g": None,
        "h": True, "1": "1"}  # fmt: skip


def test_help_names_every_setting_and_imports_no_torch():
    """Parsing and config errors come before the imports of train.py, which take seconds."""
    source = (
        "import runpy, sys\nsys.argv = ['train.py', '--help']\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "print('IMPORTED', [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    finished = run([sys.executable, "-c", source])
    assert finished.code == 0 and "IMPORTED []" in finished.output, finished.output
    assert all(f"--{key} (" in finished.output for key in config_keys())
    assert len(config_keys()) <= 80


def test_learning_rate_and_warm_up_follow_the_batch(tiny_config):
    for scaling, factor in (("none", 1), ("sqrt", (11 / 3) ** 0.5), ("linear", 11 / 3)):
        config = parse(
            tiny_config(train__lr_scaling=scaling, train__reference_global_batch=3,
                        train__learning_rate=1e-3)
        )  # fmt: skip
        assert scaled_learning_rate(config.train, 11) == pytest.approx(factor * 1e-3)
        assert [warmup_steps(config.train, n) for n in (12, 11.67, 10, 9, 48)] == [2, 2, 2, 3, 1]


# --------------------------------------------------------------------------------------------------
# The DeepSpeed config


@pytest.fixture
def resolved(tiny_config, tmp_path):
    """A function that writes a ds_config of these blocks and resolves a run with it."""

    def resolve(blocks, precision="fp32", **changes):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **blocks}))
        return resolve_ds_config(parse(tiny_config(ds_config=str(path), **changes)), precision, 32)

    return resolve


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda p: p.stem)
def test_shipped_files_merge_completely(tiny_config, tmp_path, path):
    config = parse(tiny_config(ds_config=str(path)))
    _, precision, merged = resolve_ds_config(config, "bf16", hidden_size=64)
    assert "auto" not in json.dumps(merged) and precision == "bf16"
    assert merged["optimizer"]["params"]["lr"] == 3e-3 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True and merged["fp16"]["enabled"] is False
    # the resolved configs alone give the same run
    (tmp_path / "resolved.json").write_text(json.dumps(merged))
    again = parse(tiny_config(ds_config=str(tmp_path / "resolved.json")))
    assert resolve_ds_config(again, "bf16", hidden_size=64)[2] == merged


CONTRADICTIONS = {
    "batch": ({"train_batch_size": 64}, "but train.global_batch_size is 12"),
    "accumulation": ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4"),
    "clipping": ({"gradient_clipping": 1.0}, "but train.gradient_clipping is 0.5"),
    "rate": ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "train.learning_rate is"),
    "OneCycle": ({"scheduler": {"type": "OneCycle"}}, "none of WarmupLR, WarmupDecayLR"),
    "steps": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "makes it 2"),
    "another": ({"scheduler": {"type": "WarmupCosineLR"}}, "but train.lr_schedule is linear"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_names_both_places(resolved, case):
    blocks, problem = CONTRADICTIONS[case]
    said = complaint(blocks, of=resolved)
    assert "ds.json: " in said and problem in said, said


def test_schedules_of_a_file(resolved, tiny_config, tmp_path):
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    for block, expected in (
        ({"type": "WarmupLR", "params": auto}, ("constant_with_warmup", {})),
        ({"type": "WarmupDecayLR", "params": {**auto, "total_num_steps": "auto"}}, ("linear", {})),
        ({"type": "WarmupCosineLR"}, ("cosine", {})),
        ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "warmup_num_steps": 2}},
         ("cosine_with_min_lr", {"min_lr_rate": 0.1})),
        (None, ("cosine", {})),
    ):  # fmt: skip
        train = resolved({"scheduler": block}, train__lr_schedule=None)[0].train
        assert (train.lr_schedule, train.lr_schedule_args) == expected
    assert resolved({})[0].train.lr_schedule == "linear"


def test_precision_is_that_of_either_config(resolved):
    on, off = {"enabled": True}, {"enabled": False}
    assert resolved({"bfloat16": {"enabled": "True"}})[1] == "bf16"
    assert resolved({"bf16": off}, "bf16")[1] == "fp32"
    assert resolved({"fp16": on}, train__precision="fp16")[1] == "fp16"
    for blocks in ({"fp16": on}, {"bf16": off}):
        said = complaint(blocks, of=lambda b: resolved(b, train__precision="bf16"))
        assert "enabled is" in said and "but train.precision is bf16" in said


def test_files_that_are_no_ds_config(tiny_config, tmp_path):
    for name, text, problem in (
        ("ds.json", '{"a": 1, "a": 2}', "key a occurs twice"),
        ("ds.json", "{", "ds.json:1: not JSON"),
        ("ds.json", '{"gradient_clipping": 1' + "0" * 400 + "}", "is too large"),
        ("accelerate.yaml", "deepspeed_config: {zero_stage: 3}", "accelerate config is not read"),
    ):
        (tmp_path / name).write_text(text)
        config = parse(tiny_config(ds_config=str(tmp_path / name)))
        said = complaint(config, "fp32", 32, of=resolve_ds_config)
        assert problem in said and str(tmp_path / name) in said
