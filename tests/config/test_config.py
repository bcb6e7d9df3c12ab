"""Config: precedence, mistakes in one line, the DeepSpeed config.
pytest tests/config/test_config.py"""

import json
import os
import re
import sys

import pytest
import yaml
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from harness.inputs import set_value
from harness.processes import run
from harness.repository import REPO

from zerotrain.config.ds_config import (
    KEYS,
    SUPPORTED_VALUES,
    check_machine,
    check_ranks,
    resolve_ds_config,
)
from zerotrain.config.parse import check_start, dump_config, parse_command_line
from zerotrain.config.schema import Config, config_keys, settings_of
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine

DS_CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))


def parse(config_file, *flags):
    return parse_command_line(["--config", str(config_file), *flags]).config


def complaint(*arguments, of=parse):
    with pytest.raises(UserError) as caught:
        of(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_below_yaml_below_flags(tiny_config):
    flags = ["--train.learning_rate", "1e-5", "--data.max_length=128", "--local_rank=1"]
    line = parse_command_line([*flags, "--config", str(tiny_config()), "--dry_run"])
    train = line.config.train
    assert line.dry_run and train.adam_betas == (0.9, 0.999)  # default
    assert train.global_batch_size == 12  # YAML
    assert (train.learning_rate, line.config.data.max_length) == (1e-5, 128)  # flags
    lora = parse(tiny_config(model__lora={"r": 4}), "--model.lora.alpha", "8").model.lora
    assert (lora.r, lora.alpha) == (4, 8)
    assert parse(tiny_config(model__lora={"r": 4}), "--model.lora", "null").model.lora is None


def test_a_dumped_config_reads_back_equal_but_for_trust(tiny_config, tmp_path):
    sources = [{"path": "rows", "columns": {"prompt": "q"}}]
    config = parse(tiny_config(train__adam_betas=[0.9, 0.95], data__train_sources=sources))
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert parse(tmp_path / "dumped.yaml") == config
    trusted = parse(tiny_config(), "--model.trust_remote_code", "true")
    assert trusted.model.trust_remote_code and "trust" not in dump_config(trusted)
    said = complaint(tiny_config(model__trust_remote_code=True))
    assert re.search(r"config\.yaml:\d+: model\.trust_remote_code", said)
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
    assert f"{tmp_path}/middle.yaml:2: train.sede: unknown key" in complaint(top)
    (tmp_path / "middle.yaml").write_text("base: top.yaml\n")
    assert f"{tmp_path}/middle.yaml:1: base" in complaint(top)  # no endless search
    (tmp_path / "middle.yaml").write_text("base: nowhere.yaml\n")
    assert complaint(top).startswith(f"{tmp_path}/middle.yaml: base: cannot read")


def test_what_a_base_says_is_reported_and_not_of_another_model(tiny_config, tmp_path, capsys):
    tiny_config("base.yaml", model__from_config=True, data__supervise="last", train__seed=1)
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\ntrain: {seed: 2}")
    assert parse(top).model.from_config
    said = capsys.readouterr().err
    assert "data.supervise last" in said and "train.seed" not in said
    assert not parse(top, "--model.name_or_path", "b").model.from_config
    assert parse(top, "--model.from_config", "true", "--model.name_or_path", "b").model.from_config


MISTAKES = (  # a key, its value, and part of the problem
    ("train.learning_rat", 1, "mean train.learning_rate?"),
    ("model.revision", "main", "mean model.name_or_path ID@REVISION?"),
    ("model.torch_dtype", "bfloat16", "mean train.precision?"),
    ("train.stepz", None, "unknown key"),
    ("train.learning_rate", "fast", "number, got fast"),
    ("train.learning_rate", "0", "greater than 0, got 0"),
    ("model.lora", True, "or lora: {}"),
    ("data.on_too_long", "cut", "'split'"),
    ("train.epochs", None, "exactly one"),
    ("train.lr_scaling", "sqrt", "reference_global"),
    ("data.train_sources", [{"path": "a", "hub": "b/c"}], "either path or hub"),
    ("data.train_sources", [{"path": "a", "spilt": "b"}], "did you mean split?"),
    ("data.train_sources", [{"path": "a", "weight": 2}], "repeat: 2}]?"),
    ("data.train_sources", ["a", {"path": "b", "repeat": -1}], "item 2: repeat: it has to be"),
    ("data.eval_sources", "a", "as in [PATH]"),
    ("data.train_sources", [], "at least 1"),
    ("data.eval_sources", [{"path": "a", "repeat": 2}], "eval_sources take no repeat"),
    ("data.eval_fraction", 0.1, "not both"),
    ("data.eval_sources", {"a b": ["a"]}, "use letters"),
    ("trian", {"seed": 1}, "did you mean train?"),
    ("train.adam_betas", [0.9], "item 2: a value is missing"),
    ("learning_rate", 1, "mean train.learning_rate?"),
    ("model.trainable", ["("], "trainable: (: missing )"),
)


@pytest.mark.parametrize("key, value, problem", MISTAKES)
def test_a_mistake_is_one_line_with_file_and_key(tiny_config, key, value, problem):
    path = tiny_config(**{key: value})
    said = complaint(path)
    file, line, named, rest = said.split(":", 3)
    assert file == str(path) and problem in rest, said
    named = named.strip()  # the key, one in it, or its section where that is wrong as a whole
    assert named.startswith((key, key.partition(".")[0]))
    assert named.rpartition(".")[2] in path.read_text().splitlines()[int(line) - 1], said


def test_mistakes_on_the_command_line(tiny_config, tmp_path):
    path = tiny_config()
    for flags, key, problem in (
        (["--train.sedd", "3"], "train.sedd", "did you mean train.seed?"),
        (["--deepspeed_config", "ds_configs/zero2.json"], "deepspeed_config", "mean ds_config?"),
        (["--train.seed", "x"], "train.seed", "whole number"),
        (["--train.seed"], "--train.seed", "needs a value"),
        (["--train.steps", "5"], "train", "exactly one"),
        (["--train.seed.x", "5"], "train.seed", "integer"),
        (["--", "5"], "--", "expected --section.key VALUE"),
        (["--model", "x"], "model", "name_or_path: PATH"),
        (["--dry-run"], "--dry-run", "mean dry_run?"),
        (["--bf16"], "--bf16", "mean train.precision?"),
        (["--train", "{seed:null}"], "train: not YAML", "seed:null"),
        (["--data.train_sources", "[a"], "data.train_sources", "not YAML"),
    ):
        said = complaint(path, *flags)
        assert said.startswith(f"command line: {key}") and problem in said, said
    assert parse(path, "--model.lora", "{}", "--data.eval_sources", "[b]").model.lora.r == 16
    for flags in ([], ["--config", str(path), "--config=b.yaml"]):
        assert "--config FILE has to be given once" in complaint(flags, of=parse_command_line)
    path = tiny_config(checkpoint__keep_best=True, data__eval_sources=None)
    assert "data.eval_fraction" in complaint(path)
    assert "cannot read" in complaint(tmp_path)
    path.write_text("train: {seed: 1}")
    assert complaint(path).startswith(f"{path}: ")


def test_what_is_checked_before_the_data_is_read(tiny_config, tmp_path):
    (tmp_path / "file").touch()
    for changes, problem in (
        ({"checkpoint__resume": "no"}, "checkpoint.resume: no such folder: no"),
        ({"output_dir": str(tmp_path / "file" / "run")}, "output_dir: cannot write"),
        ({"output_dir": "$NOWHERE/run"}, "if they are set"),
        ({"output_dir": "$HOME/run"}, f"stand for {os.environ['HOME']}/run"),
    ):
        assert problem in complaint(parse(tiny_config(**changes)), of=check_start)
    config = parse(tiny_config(train__global_batch_size=3))
    check_start(config)
    ds_config = {"zero_optimization": {}}
    check_ranks(config, ds_config, 3)
    assert "train.global_batch_size: 3 is smaller" in complaint(
        config, ds_config, 4, of=check_ranks
    )


def test_files_of_others_run_nothing_and_end(tiny_config, tmp_path):
    path = tmp_path / "broken.yaml"
    for text, problem in {
        "": "not a run config",
        "a: &a [x]\nb: [*a, *a]": "alias",
        "output_dir: !!python/object/apply:os.system [ls]": "output_dir: ",
        "output_dir: a\noutput_dir: b": "output_dir: occurs twice",
        "? [a]\n: b": "unknown key",
        "output_dir: a\ntrain:\n": "train: it has keys",
        "tracking: {class_path: evil.Evil}": "tracking.class_path: unknown key",
    }.items():
        path.write_text(text)
        said = complaint(path)
        assert said.startswith(f"{path}:") and problem in said, said
    os.mkfifo(tmp_path / "fifo.yaml")
    path.write_text("base: /dev/zero")
    for file in (tmp_path / "fifo.yaml", path):
        assert "it is no regular file" in complaint(file)
    path.write_text("base: /proc/kmsg")  # regular, of size 0, and without an end
    assert complaint(path)
    path.write_text("".join(f"k{i}: 1\n" for i in range(60_000)))
    assert "k0: unknown key" in complaint(path)
    path.write_text("a: " + "x" * 2_000_000)
    assert "it has more than" in complaint(path)
    path.write_bytes(b"output_dir: \xff")
    assert str(path) in complaint(path)


def test_yaml_is_read_as_written(tiny_config):
    flags = ["--tracking.project", "off", "--train.seed", "010", "--output_dir", "2026-01-01"]
    flags += ["--model.tokenizer", "0123456", "--train.lr_schedule", "cosine_with_min_lr"]
    flags += ["--train.lr_schedule_args", "{min_lr_rate: 1e-1, num_cycles: 2}"]
    config = parse(tiny_config(), *flags)
    assert (config.tracking.project, config.train.seed) == ("off", 10)
    assert (config.output_dir, config.model.tokenizer) == ("2026-01-01", "0123456")
    assert config.train.lr_schedule_args == {"min_lr_rate": 0.1, "num_cycles": 2}


def test_help_has_every_setting_and_imports_no_torch():
    """Parsing and config errors come before the imports of train.py, which take seconds."""
    source = (
        "import runpy, sys\nsys.argv = ['train.py', '--help']\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "print('IMPORTED', [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    finished = run([sys.executable, "-c", source])
    assert finished.code == 0 and "IMPORTED []" in finished.output, finished.output
    assert all(f"  --{key}  " in finished.output for key in config_keys())
    assert "--train.seed  default 42\n      Seeds weight" in finished.output
    for section, name, key in settings_of(Config):
        text = finished.output.partition(f"--{key}  ")[2].partition("  --")[0]
        for value in re.findall(r"(?:\[|, )'([\w-]+)'", str(section.__annotations__[name])):
            assert value in text, key
    piped = run(["bash", "-c", f"{sys.executable} train.py --help | head -1"])
    assert piped.output.startswith("usage") and "Error" not in piped.output
    assert "class " not in finished.output


# --------------------------------------------------------------------------------------------------
# The DeepSpeed config


@pytest.fixture
def resolved(tiny_config, tmp_path):
    """A function that resolves a run whose ds_config has these values at dotted paths."""

    def resolve(values, **changes):
        path = tmp_path / "ds.json"
        ds_config = {"zero_optimization": {"stage": 2}}
        for dotted, value in values.items():
            set_value(ds_config, dotted, value)
        path.write_text(json.dumps(ds_config))
        config = parse(tiny_config(ds_config=str(path), **changes))
        return resolve_ds_config(config, Machine(1, 1, precision="fp32"), 32)

    return resolve


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda p: p.stem)
def test_shipped_files_merge_completely(tiny_config, tmp_path, path):
    config = parse(tiny_config(ds_config=str(path)))
    resolved, merged = resolve_ds_config(config, Machine(1, 1, precision="bf16"), hidden_size=64)
    assert '"auto"' not in json.dumps(merged) and resolved.train.precision == "bf16"
    assert merged["optimizer"]["params"]["lr"] == 3e-3 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True and merged["fp16"]["enabled"] is False
    # the resolved configs alone give the same run
    (tmp_path / "resolved.json").write_text(json.dumps(merged))
    again = parse(tiny_config(ds_config=str(tmp_path / "resolved.json")))
    assert resolve_ds_config(again, Machine(1, 1), hidden_size=64)[1] == merged


def test_runs_with_one_nvme_path_have_folders_of_their_own(resolved):
    offload = {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
        "offload_param": {"device": "nvme", "nvme_path": "auto"},
    }  # fmt: skip
    folders = set()
    for output_dir in ("one", "other"):
        _, merged = resolved({"zero_optimization": offload}, output_dir=output_dir)
        zero = merged["zero_optimization"]
        folders |= {zero[f"offload_{what}"]["nvme_path"] for what in ("optimizer", "param")}
    assert len(folders) == 4 and sum(folder.startswith("/disk/") for folder in folders) == 2


def test_trainers_auto_is_taken_over(resolved):
    offload = {"device": "auto", "buffer_size": 1e8, "max_in_cpu": 1e9}
    gather = {"stage3_gather_16bit_weights_on_model_save": True, "sub_group_size": 1e9}
    values = {
        "scheduler.type": "WarmupLR",
        "scheduler.params": {"warmup_num_steps": "auto", "warmup_type": "linear"},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto", **gather},
        "zero_optimization.offload_param": offload, "steps_per_print": "auto",
        "fp16": {"enabled": "auto", "loss_scale_window": 1000, "hysteresis": 2, "auto_cast": False},
        "wall_clock_breakdown": False,
    }  # fmt: skip
    for named in (None, "constant_with_warmup"):
        config, merged = resolved(values, train__lr_schedule=named)
        assert config.train.lr_schedule == "WarmupLR"
        assert config.train.lr_schedule_args == {"warmup_type": "linear"}
    assert "auto" not in json.dumps(merged).replace("auto_cast", "")
    for kind in ({}, {"scheduler.type": "auto"}):
        assert resolved(kind, train__lr_schedule=None)[0].train.lr_schedule == "cosine"


def test_precision_is_that_of_either_config(resolved, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)  # as on older CPUs
    assert resolved({"bf16.enabled": True})[0].train.precision == "bf16"
    config, merged = resolved({"fp16.enabled": True}, train__precision="fp16")
    assert "set train.precision" in complaint(config, merged, Machine(1, 1), of=check_machine)
    for values in ({"fp16.enabled": True}, {"bf16.enabled": False}):
        said = complaint(values, of=lambda v: resolved(v, train__precision="bf16"))
        assert "enabled is" in said and "but the run's precision is bf16" in said


def test_files_that_are_no_ds_config(tiny_config, tmp_path):
    for name, text, problem in (
        ("ds.json", '{"a": 1, "a": 2}', "Duplicate keys"),
        ("ds.json", '{"a": 1,}', "nor commas after the last"),
        ("accelerate.yaml", "deepspeed_config: {zero_stage: 3}", "the one of ds_configs/"),
        ("recipe.yaml", "output_dir: x", "a recipe is given with --config"),
        ("zero2", "zero_optimization: {stage: 2}", "convert YAML with"),
    ):
        (tmp_path / name).write_text(text)
        config = parse(tiny_config(ds_config=str(tmp_path / name)))
        said = complaint(config, Machine(1, 1), 32, of=resolve_ds_config)
        assert problem in said and str(tmp_path / name) in said
    command = re.search(r"python -c .*?> ds\.json", said)[0].replace("python", sys.executable)
    assert run(["bash", "-c", command], cwd=tmp_path).code == 0
    assert (tmp_path / "ds.json").read_text() == '{"zero_optimization": {"stage": 2}}\n'
    (tmp_path / name).unlink()
    assert "ds_configs/zero2.json" in complaint(config, Machine(1, 1), 32, of=resolve_ds_config)


REFUSED = {  # part of the message -> values of the file
    # contradictions name both places
    "train_batch_size is 64, but train.global_batch_size is 12": {"train_batch_size": 64},
    "gradient_accumulation_steps is 4, but": {"gradient_accumulation_steps": 4},
    "gradient_clipping is 1.0, but train.gradient_clipping": {"gradient_clipping": 1.0},
    "params.lr is 1e-05, but train.learning_rate": {"optimizer.params.lr": 1e-5},
    'type is "WarmupLR", but train.lr_schedule is linear': {"scheduler.type": "WarmupLR"},
    "optimizer.params.foo: unknown": {"optimizer.params.foo": 1},
    # unknown keys at every level
    "did you mean zero_optimization?": {"zero_optimisation.stage": 1},
    "n.offload_optimizer.devise: Extra": {"zero_optimization.offload_optimizer.devise": 1},
    "fp16.loss_scal: Extra": {"fp16.loss_scal": 1},
    "checkpoint.load_universal: ": {"checkpoint.load_universal": 1},
    "quux: ": {"quux": 1},
    "amp: ": {"amp.enabled": True},
    "wandb: unknown, or not supported here; remove it, or did you mean tracking.wandb?":
        {"wandb": {"enabled": True, "project": "x"}},
    "comet: unknown, or not supported here; remove it, or did you mean tracking.wandb?":
        {"comet": {}},
    "mean overlap_comm?": {"zero_optimization.overlap_com": True},
    'stage is "auto"': {"zero_optimization.stage": "auto"},
    "steps_per_print is": {"steps_per_print": "abc"},
    "bias_correction: ": {"optimizer": {"params": {"torch_adam": True, "bias_correction": True}}},
    "import of tensorboard": {"tensorboard.enabled": True},
    "tensor_parallel.preset_model: ": {"tensor_parallel.preset_model": "llama"},
    # what would train wrongly
    **{f"{path} is 0.5: {why}": {path: 0.5} for path, (_, why) in SUPPORTED_VALUES.items()},
    "zenflow: ": {"zero_optimization.zenflow": {}},
    "with offload": {"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 2,
                     "zero_optimization.offload_param.device": "cpu"},
    'partition_size is "2"': {"zero_optimization.zero_hpz_partition_size": "2"},
    'stage is "3"': {"zero_optimization.stage": "3"},
    "autotp_size is 0": {"tensor_parallel.autotp_size": 0},
    "partition_size is 2: it needs": {"zero_optimization.zero_hpz_partition_size": 2},
    'device is "nvme": it needs': {"zero_optimization.offload_optimizer.device": "nvme"},
    'offload_param.device is "cpu": it': {"zero_optimization.offload_param.device": "cpu"},
    'offload_param is "cpu"': {"zero_optimization.offload_param": "cpu"},
    "checkpoint is null": {"checkpoint": None},
    "true: model.compile": {"compile.deepcompile": True},
    "fp16 at": {"zero_optimization.stage": 0, "fp16.enabled": True},
    "FusedAdam": {"optimizer.type": "FusedAdam"},
    "vocab_parallel_lm_head": {"tensor_parallel.vocab_parallel_lm_head": True},
    "set one of them": {"tensor_parallel.autotp_size": 2, "sequence_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("problem", REFUSED)
def test_what_would_train_wrongly_is_one_line(resolved, monkeypatch, problem):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    said = complaint(REFUSED[problem], of=resolved)
    assert "ds.json: " in said and problem in said, said


READ = set()


class Watched(dict):
    """A block that records which keys are read, of all blocks together."""

    def get(self, key, *default):
        READ.add(key)
        return super().get(key, *default)

    def __contains__(self, key):
        READ.add(key)
        return super().__contains__(key)

    __copy__ = keys = lambda self: self


def test_deepspeed_reads_every_supported_key():
    blocks = {"optimizer": {"type": "AdamW", "params": {}}, "checkpoint": {}, "data_types": {}}
    DeepSpeedConfig(Watched(train_batch_size=1, **{k: Watched(v) for k, v in blocks.items()}))
    supported = {key for name in ("", *blocks) for key in KEYS[name].split()}
    ours = {"sequence_parallel_size"}  # read by zerotrain/config/ds_config.py
    assert supported - ours <= READ
