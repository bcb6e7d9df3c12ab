"""Config: precedence, complaints, the merged DeepSpeed config.    pytest tests/test_config.py"""

import dataclasses
import json
import re
import sys
from contextlib import suppress

import pytest
import yaml
from conftest import REPO, run

from config.batch_math import scaled_learning_rate, warmup_steps
from config.ds_config import check_compiler, merge_ds_config, resolve_precision
from config.parse import dump_config
from data.check_sources import parse_with_sources
from runtime.errors import UserError

DS_CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))


def parse(config_file, *flags):
    return parse_with_sources(["--config", str(config_file), *flags]).config


def complaint(config_file, *flags):
    with pytest.raises(UserError) as caught:
        parse(config_file, *flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_below_yaml_below_flags(tiny_config):
    path = tiny_config()
    config = parse(path, "--train.learning_rate", "1e-5", "--data.max_length=128")
    assert config.train.adam_betas == (0.9, 0.999)  # default
    assert config.train.global_batch_size == 12  # YAML
    assert (config.train.learning_rate, config.data.max_length) == (1e-5, 128)  # flags


def test_bounded_numbers_are_plain_ones(tiny_config):
    config = parse(tiny_config(), "--train.adam_betas", "[0.9, 0.95]")
    train, at_start = config.train, config.eval.at_start
    numbers = (train.global_batch_size, train.learning_rate, *train.adam_betas, at_start)
    assert [type(n) for n in numbers] == [int, float, float, float, bool]


def test_dumped_config_reads_back_equal(tiny_config, tmp_path):
    config = parse(tiny_config(train__adam_betas=[0.9, 0.95], data__columns={"prompt": "q"}))
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert parse(tmp_path / "dumped.yaml") == config


def test_the_launchers_local_rank_is_accepted_and_dry_run_is_a_flag(tiny_config):
    line = parse_with_sources(["--local_rank=1", "--config", str(tiny_config()), "--dry_run"])
    assert line.dry_run


MISTAKES = {
    "unknown key": ({"train__learning_rat": 1},
                    "config.yaml:LINE: train.learning_rat: unknown key; "
                    "did you mean train.learning_rate?"),
    "unknown section": ({"trian__steps": 1}, "config.yaml:LINE: trian.steps: unknown key; "
                        "did you mean train.steps?"),
    "wrong type": ({"train__learning_rate": "fast"},
                   "config.yaml:LINE: train.learning_rate: expected float >=0, got 'fast'"),
    "not one of": ({"data__on_too_long": "cut"}, "data.on_too_long: "),
    "wrong optional type": ({"train__steps": 2.5, "train__epochs": None},
                            "train.steps: expected int >0 or null, got '2.5'"),
    "epochs and steps": ({"train__steps": 5}, "give exactly one of train.epochs and train.steps"),
    "no reference batch": ({"train__lr_scaling": "sqrt"},
                           "needs train.reference_global_batch_size"),
    "two global batches": ({"train__global_batch_tokens": 100},
                           "give exactly one of train.global_batch_size and"),
    "tokens and examples": ({"train__global_batch_tokens": 500, "train__global_batch_size": None},
                            "train.warmup_examples: cannot be combined with "
                            "train.global_batch_tokens; use train.warmup_tokens"),
    "path and hub": ({"data__train_sources": [{"path": "a", "hub": "b/c"}]},
                     "a source must have either path or hub"),
    "path with a split": ({"data__train_sources": [{"path": "README.md", "split": "test"}]},
                          "subset, split and revision are only for hub data sets"),
    "some weights": ({"data__train_sources": [{"path": "README.md"}]}, "unknown file extension"),
    "negative": ({"train__warmup_examples": -1}, "warmup_examples: expected int >=0, got '-1'"),
    "missing data": ({"data__train_sources": ["nowhere.jsonl"]},
                     "data.train_sources: no such file or folder: nowhere.jsonl"),
    "missing model": ({"model__name_or_path": "./nowhere"},
                      "model.name_or_path: no such folder: ./nowhere"),
    "weights of what": ({"checkpoint__weights_only": True},
                        "checkpoint.weights_only: needs checkpoint.resume PATH"),
    "two hold-outs": ({"data__eval_fraction": 0.1}, "not both"),
    "no ds_config": ({"ds_config": "ds_configs/zero9.json"},
                     "ds_config: cannot read ds_configs/zero9.json: No such file or directory"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_key_and_file(tiny_config, case):
    changes, message = MISTAKES[case]
    path = tiny_config(**changes)
    leaf = next(iter(changes)).split("__")[-1]
    lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if f"{leaf}:" in line]
    assert message.replace("LINE", str(lines[-1])) in complaint(path)


CLASS = {"class_path": "evil.Evil"}
BOMB = (
    "[&a0 [x]" + "".join(f", &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)) + "]"
)
HOSTILE = {  # changes of the config, flags -> the message
    "section": ({"tracking": CLASS}, [], "tracking.class_path: unknown key; did you mean "),
    "with arguments": ({"checkpoint": {**CLASS, "init_args": {}}}, [], "checkpoint.class_path: "),
    "text": ({"launch": "evil.Evil"}, [], "launch: is a section, so its keys go below it"),
    "source": ({"data__train_sources": [CLASS]}, [], "data.train_sources[0].class_path: unknown"),
    "any value": ({"train__lr_schedule_args": {"a": CLASS}}, [], None),
    "flag": ({}, ["--model", "evil.Evil"], "model: is a section; set its keys, such as model.name"),
    "element": ({}, ["--data.train_sources+", str(CLASS)], None),
    "argument": ({}, ["--train.lr_schedule_args.a", str(CLASS)], None),
    "bomb": ({"data__eval_sources": BOMB}, [], "its aliases stand for over 100,000 values"),
    "bomb in a number": ({"train__steps": BOMB}, [], "its aliases stand for over 100,000"),
    "bomb in a flag": ({}, ["--train.lr_schedule_args.a", BOMB], "its aliases stand for over"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_reading_a_config_runs_nothing_and_ends(tiny_config, tmp_path, monkeypatch, case):
    changes, flags, message = HOSTILE[case]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tiny_config(**changes)
    if message is None:  # a text for somebody else, who takes it for no class either
        with suppress(UserError):
            parse(path, *flags)
    else:
        assert message in complaint(path, *flags)
    assert not (tmp_path / "ran").exists() and "evil" not in sys.modules


def test_names_of_python_are_unknown_keys(tmp_path):
    path = tmp_path / "config.yaml"
    sections = {
        "": "",
        "tracking:\n  ": "tracking.",
        "data:\n  train_sources:\n  - ": "data.train_sources[0].",
    }
    for key in ("__class__", "__init__", "__dict__", "__path__", "__orig__", "1", "null", "a b"):
        for section, name in sections.items():
            path.write_text(f"{section}{key}: 3\n")
            said = complaint(path)
            assert re.search(rf"config.yaml:\d: {re.escape(name + key)}: unknown key", said), said


def test_values_beyond_any_use_are_one_line(tiny_config):
    """Found by tests/fuzz.py."""
    for changes, message in (
        ({"data__eval_fraction": 10**400}, "a number is too large"),
        ({"model__name_or_path": "e" * 5_000}, "File name too long"),
        ({"model__a\nb": 1}, r"model.'a\nb': unknown key"),
    ):
        assert message in complaint(tiny_config(**changes))


def test_yaml_that_is_no_config_is_one_line(tiny_config, tmp_path):
    path = tmp_path / "broken.yaml"
    for text, message in {
        "": "not a run config, which is a mapping like recipes/demo.yaml",
        "[1]": "not a run config",
        "output_dir:\n": "required key",
        "a: " + "[" * 5_000: "nested too deeply",
        "model: &a {model: *a}": "its aliases stand for",
        f"a: {BOMB}": "its aliases stand for",
        "output_dir: a\noutput_dir: b": "broken.yaml:2: output_dir: occurs twice; remove one",
        "x" * 1_000_001: "has over 1,000,000 bytes, so it is not a config",
    }.items():
        path.write_text(text)
        assert message in complaint(path), text[:40]
    path.write_bytes(b"output_dir: \xff")
    assert complaint(path) == f"{path}: not UTF-8 text (byte 12)"
    # aliases and merged mappings are fine, and so are strings that look like aliases
    path = tiny_config(model__ignore_weights=["a{2}&*"])
    path.write_text(path.read_text().replace("max_length: 256", "<<: {max_length: 256}"))
    config = parse(path, "--model.ignore_weights", "['a{2}&*', '&a *a']")
    assert config.model.ignore_weights == ["a{2}&*", "&a *a"] and config.data.max_length == 256


def test_null_is_refused_where_a_value_is_needed(tiny_config):
    """A YAML key without a value is null, which jsonargparse accepts."""
    for key in ("data.window", "data.on_bad_row", "data.eval_sources", "train.seed",
                "data.max_length", "train.lr_scaling", "data.columns"):  # fmt: skip
        section, name = key.split(".")
        path = tiny_config()
        text = yaml.safe_load(path.read_text())
        text[section][name] = None
        path.write_text(yaml.safe_dump(text))
        said = complaint(path)
        assert re.search(rf"config.yaml:\d+: {key}: is null, but needs a value", said), said
    assert parse(tiny_config(), "--model.revision", "null").model.revision is None


def test_mistakes_on_the_command_line_say_so(tiny_config):
    path = tiny_config()
    said = complaint(path, "--train.sedd", "3")
    assert said == "command line: train.sedd: unknown key; did you mean train.seed?"
    assert complaint(path, "--train.seed", "x") == (
        "command line: train.seed: expected int >=0 and <2^63, got 'x'"
    )
    assert "nowhere.yaml" in complaint("nowhere.yaml")
    (path.parent / "broken.yaml").write_text("train: {seed: [\n")
    assert "broken.yaml" in complaint(path.parent / "broken.yaml")
    assert "required key output_dir is missing" in complaint(tiny_config(output_dir=None))


def test_a_global_batch_under_the_rank_count_is_refused(tiny_config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert "12 is smaller than the number of ranks (16)" in complaint(tiny_config())


def test_help_imports_no_torch():
    """Parsing and config errors come before the imports of train.py, which take seconds."""
    say = (
        "import runpy, sys\nsys.argv = ['train.py', '--help']\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "print('IMPORTED', [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    finished = run([sys.executable, "-c", say])
    assert finished.code == 0 and "IMPORTED []" in finished.output, finished.output
    assert "--train.global_batch_size" in finished.output


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)]
)
def test_learning_rate_scales_from_the_global_batch(tiny_config, scaling, expected):
    config = parse(
        tiny_config(
            train__lr_scaling=scaling,
            train__reference_global_batch_size=3,
            train__learning_rate=1e-3,
        )
    )
    assert scaled_learning_rate(config.train, 12) == pytest.approx(expected)
    factor = {"none": 1, "sqrt": (11 / 3) ** 0.5, "linear": 11 / 3}[scaling]
    assert scaled_learning_rate(config.train, 11) == pytest.approx(factor * 1e-3)
    assert warmup_steps(config.train, 12) == 2  # 24 examples at 12 a step
    assert [warmup_steps(config.train, n) for n in (11.67, 10, 9, 48.1)] == [2, 2, 3, 1]


def test_tokens_scale_the_learning_rate_and_count_the_warm_up(tiny_config):
    config = parse(
        tiny_config(
            train__global_batch_size=None, train__global_batch_tokens=4000,
            train__reference_global_batch_tokens=1000, train__lr_scaling="sqrt",
            train__learning_rate=1e-3, train__warmup_examples=None, train__warmup_tokens=9000,
        )
    )  # fmt: skip
    assert scaled_learning_rate(config.train, 4000) == pytest.approx(2e-3)
    assert warmup_steps(config.train, 4000) == 2  # 2.25


def test_sources_take_formats_and_columns_of_their_own(tiny_config, tmp_path):
    file = str(tmp_path / "train.jsonl")
    config = parse(
        tiny_config(
            data__train_sources=[
                file,
                {"path": file, "columns": {"prompt": "q"}, "format": "text"},
            ],
            data__columns={"text": "t"},
            data__ignore_keys=["a"],
            data__roles={"bot": "assistant"},
        )
    )
    plain, own = config.data.sources("train_sources")
    assert (plain.path, plain.format, plain.columns) == (file, "auto", {"text": "t"})
    assert (own.format, own.columns) == ("text", {"prompt": "q"})
    for source in (plain, own):
        assert (source.ignore_keys, source.roles) == (["a"], {"bot": "assistant"})
    said = complaint(tiny_config(), "--data.train_sources", "[{path: x, wieght: 2}]")
    assert said == (
        "command line: data.train_sources[0].wieght: unknown key; did you mean "
        "data.train_sources[0].weight?"
    )
    weighted = [{"path": file, "weight": 1}, {"path": file}]
    assert (
        f"data.train_sources: {file} has no weight, but the first source has one; give either all"
    ) in complaint(tiny_config(data__train_sources=weighted))
    for weight in (float("nan"), float("inf"), 0.0, -1.0):
        weighted = [{"path": file, "weight": 1}, {"path": file, "weight": weight}]
        said = complaint(tiny_config(data__train_sources=weighted))
        assert f"data.train_sources: {file}: weight {weight} is not a positive number" in said
    assert "data.columns: question is not a key of any row format" in complaint(
        tiny_config(data__columns={"question": "prompt"})
    )
    weighted = [{"path": file, "weight": 1}]
    assert "sources of held-out rows cannot have weights" in complaint(
        tiny_config(data__eval_sources=weighted)
    )


# --------------------------------------------------------------------------------------------------
# The DeepSpeed config


def write_ds(tmp_path, **blocks):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **blocks}))
    return str(path)


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda p: p.stem)
def test_shipped_ds_configs_merge_completely(tiny_config, path):
    config = parse(tiny_config(ds_config=str(path)))
    merged = merge_ds_config(config, "bf16", hidden_size=64)
    assert "auto" not in json.dumps(merged)
    assert merged["optimizer"]["params"]["lr"] == 3e-3 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True and merged["fp16"]["enabled"] is False


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda p: p.stem)
def test_shipped_ds_configs_work_with_transformers_trainer(tmp_path, path):
    """TrainingArguments fills the same "auto" values and finds no mismatch."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=1e-4)
    theirs = HfTrainerDeepSpeedConfig(str(path))
    theirs.trainer_config_process(args)

    class Model:
        class config:
            hidden_size = 64

    theirs.trainer_config_finalize(args, Model, num_training_steps=10)
    assert "auto" not in json.dumps(theirs.config)


CONTRADICTIONS = {
    "optimizer.params.lr is 0.5": {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}},
    "gradient_clipping is 1.0, but train.gradient_clipping is 0.5": {"gradient_clipping": 1.0},
    "train_batch_size is 99, but train.global_batch_size is 12": {"train_batch_size": 99},
    "checkpoint.use_node_local_storage is true, but checkpoint.node_local is false": {
        "checkpoint": {"use_node_local_storage": True}
    },
    "train_micro_batch_size_per_gpu is 4": {"train_micro_batch_size_per_gpu": 4},
    "scheduler.type is WarmupLR (constant_with_warmup in transformers), but": {
        "scheduler": {"type": "WarmupLR", "params": {}}
    },
    'scheduler.params.warmup_type is "log", but train.lr_schedule is linear': {
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "log"}}
    },
    "scheduler.params.warmup_num_steps is 9": {
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_contradiction_names_both_places(tiny_config, tmp_path, message):
    said = complaint(tiny_config(ds_config=write_ds(tmp_path, **CONTRADICTIONS[message])))
    assert f"ds.json: {message}" in said
    assert re.search(
        r"\((train|data|checkpoint)\.\w+: .*config.yaml:\d+\)$|: command line\)$", said
    )


def test_a_stated_rate_is_that_of_the_config_or_of_the_plan(tiny_config, tmp_path):
    """The config's global batch is 12, the mean batch of the steps 10: rates 4 and 3.33 x 1e-3."""
    scaled = dict(
        train__lr_scaling="linear",
        train__reference_global_batch_size=3,
        train__learning_rate=1e-3,
        train__lr_schedule="constant_with_warmup",
    )
    real = 1e-3 * 10 / 3
    for stated in ("auto", 4e-3, real):
        blocks = {
            "optimizer": {"type": "AdamW", "params": {"lr": stated}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": stated}},
        }
        config = parse(tiny_config(ds_config=write_ds(tmp_path, **blocks), **scaled))
        merged = merge_ds_config(config, "fp32", hidden_size=32, mean_batch=10)
        assert merged["optimizer"]["params"]["lr"] == pytest.approx(real)
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = parse(tiny_config(ds_config=write_ds(tmp_path, **blocks), **scaled))
    with pytest.raises(
        UserError, match=r"ds.json: .*lr is 0.001, but train.learning_rate.*0.00333"
    ):
        merge_ds_config(config, "fp32", hidden_size=32, mean_batch=10)


def test_a_file_made_for_transformers_trainer_works(tiny_config, tmp_path):
    """Hugging Face's documented ZeRO-3 example, scheduler block included."""
    auto = "auto"
    path = write_ds(
        tmp_path,
        fp16={"enabled": auto, "loss_scale": 0, "initial_scale_power": 16},
        bf16={"enabled": auto},
        optimizer={"type": "AdamW", "params": dict.fromkeys(
            ("lr", "betas", "eps", "weight_decay"), auto)},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), auto)},
        zero_optimization={"stage": 3, "reduce_bucket_size": auto,
                           "stage3_prefetch_bucket_size": auto,
                           "stage3_param_persistence_threshold": auto},
        gradient_accumulation_steps=auto, gradient_clipping=auto, train_batch_size=auto,
        train_micro_batch_size_per_gpu=auto, steps_per_print=2000, wall_clock_breakdown=False,
    )  # fmt: skip
    merged = merge_ds_config(parse(tiny_config(ds_config=path)), "fp32", hidden_size=32)
    assert "auto" not in json.dumps(merged) and "scheduler" not in merged
    assert merged["zero_optimization"]["reduce_bucket_size"] == 1024
    assert merged["optimizer"]["params"] == {
        "lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}  # fmt: skip


AUTO = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
SCHEDULERS = {
    "auto": ({"type": "WarmupLR", "params": AUTO}, {}),
    "log": ({"type": "WarmupLR", "params": {**AUTO, "warmup_type": "log"}}, {"warmup_type": "log"}),
    "decay": ({"type": "WarmupDecayLR", "params": {**AUTO, "total_num_steps": "auto"}}, {}),
    "cosine": ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "warmup_num_steps": 2}},
               {"cos_min_ratio": 0.1}),
    "no params": ({"type": "WarmupLR"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEDULERS)
def test_without_lr_schedule_the_scheduler_of_the_file_is_the_schedule(tiny_config, tmp_path, case):
    block, arguments = SCHEDULERS[case]
    path = write_ds(tmp_path, scheduler=block)
    config = parse(tiny_config(ds_config=path, train__lr_schedule=None))
    assert config.train.lr_schedule == block["type"]
    assert config.train.lr_schedule_args == arguments
    assert "scheduler" not in merge_ds_config(config)
    # the resolved configs alone say the same
    (tmp_path / "resolved.json").write_text(json.dumps(merge_ds_config(config)))
    again = dataclasses.replace(config, ds_config=str(tmp_path / "resolved.json"))
    (tmp_path / "resolved.yaml").write_text(dump_config(again))
    assert parse(tmp_path / "resolved.yaml") == again


def test_the_schedule_is_the_run_configs_else_the_files_else_cosine(tiny_config, tmp_path):
    assert parse(tiny_config()).train.lr_schedule == "linear"
    assert parse(tiny_config(train__lr_schedule=None)).train.lr_schedule == "cosine"
    steps = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    path = write_ds(tmp_path, scheduler=steps)
    free = tiny_config(ds_config=path, train__lr_schedule=None, train__warmup_examples=0)
    assert parse(free).train.lr_schedule_args == {"warmup_num_steps": 9}
    said = complaint(tiny_config(ds_config=path, train__lr_schedule=None))
    assert "warmup_num_steps is 9, but train.warmup_examples makes it 2" in said
    path = write_ds(tmp_path, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 7}})
    said = complaint(tiny_config(ds_config=path, train__lr_schedule=None))
    assert "total_num_steps is 7, but train.epochs determines" in said
    path = write_ds(tmp_path, scheduler={"type": "OneCycle", "params": {}})
    assert "none of WarmupLR, WarmupDecayLR, WarmupCosineLR" in complaint(
        tiny_config(ds_config=path, train__lr_schedule=None)
    )


ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""


def test_accelerates_own_config_is_read(tiny_config, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE)
    config = parse(tiny_config(ds_config=str(file)))
    merged = merge_ds_config(config, resolve_precision(config, "fp32"))
    assert merged["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    assert merged["bf16"] == {"enabled": True} and merged["gradient_clipping"] == 0.5

    file.write_text(f"deepspeed_config: {{deepspeed_config_file: {REPO}/ds_configs/zero1.json}}")
    assert merge_ds_config(parse(tiny_config(ds_config=str(file))))["zero_optimization"][
        "stage"
    ] == 1  # fmt: skip
    file.write_text(ACCELERATE.replace("zero_stage", "zero_stagee"))
    said = complaint(tiny_config(ds_config=str(file)))
    assert "deepspeed_config.zero_stagee: unknown key; did you mean zero_stage?" in said
    file.write_text("fsdp_config: {}")
    assert "has no deepspeed_config block" in complaint(tiny_config(ds_config=str(file)))


UNREADABLE = {
    "[" * 100_000: "nested too deeply",
    '{"a": ' + "[" * 900 + "]" * 900 + "}": "nested too deeply",
    '{"gradient_clipping": NaN}': "NaN is not JSON; give a number",
    '{"a": ' + "9" * 5_000 + "}": "not JSON: Exceeds the limit",
    '{"a": 1, "a": 2}': "key a occurs twice in one object",
    '{"deepspeed_config": {"deepspeed_config_file": "FILE"}}': "is not a DeepSpeed config",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:30])
def test_a_hostile_ds_config_is_one_line(tiny_config, tmp_path, text):
    file = tmp_path / "ds.json"
    file.write_text(text.replace("FILE", str(file)))
    said = complaint(tiny_config(ds_config=str(file)))
    assert str(file) in said and UNREADABLE[text] in said


def test_an_accelerate_config_with_exponential_aliases(tiny_config, tmp_path):
    (tmp_path / "ds.yaml").write_text(f"deepspeed_config: {BOMB}")
    said = complaint(tiny_config(ds_config=str(tmp_path / "ds.yaml")))
    assert "ds.yaml: its aliases stand for over 100,000 values" in said


@pytest.mark.parametrize(
    ("block", "asked", "expected"),
    [
        ({}, "auto", "bf16"),
        ({"bf16": {"enabled": True}}, "auto", "bf16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "auto", "fp32"),
        ({"fp16": {"enabled": True}}, "auto", "fp16"),
        ({"bf16": {"enabled": "auto"}}, "fp32", "fp32"),
        ({"bf16": {"enabled": True}}, "fp32", "bf16.enabled is true, but train.precision is fp32"),
        ({"bf16": {"enabled": False}}, "bf16", "bf16.enabled is false, but train.precision is"),
    ],
)
def test_precision_has_one_owner(tiny_config, tmp_path, block, asked, expected):
    path = tiny_config(ds_config=write_ds(tmp_path, **block), train__precision=asked)
    if " " in expected:
        with pytest.raises(UserError, match=expected):
            resolve_precision(parse(path), "bf16")
    else:
        assert resolve_precision(parse(path), "bf16") == expected


def test_offload_without_a_compiler_is_refused_before_it_fails(tiny_config, monkeypatch):
    config = parse(tiny_config(ds_config="ds_configs/zero2.json"))
    object.__setattr__(config, "ds_config", str(REPO / "ds_configs/zero2_offload.json"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"g\+\+ is missing.*torch_adam"):
        check_compiler(config)


def test_every_shipped_recipe_parses():
    table = (REPO / "recipes" / "README.md").read_text()
    recipes = [f for f in (REPO / "recipes").glob("*.yaml") if f"`{f.name}`" in table]
    for recipe in recipes:
        text = yaml.safe_load(recipe.read_text())
        flags = []
        sources = text["data"]["train_sources"]
        if not all("hub" in f or (REPO / f).is_file() for f in sources):
            flags = [
                "--data.train_sources",
                "[data/sample/train.jsonl]",
            ]  # the reader's own data: any file will do
        if str(text["model"].get("tokenizer", "")).startswith("runs/"):
            flags += ["--model.tokenizer", "data/sample/model"]
        parse(recipe, *flags)
    assert REPO / "recipes" / "demo.yaml" in recipes
