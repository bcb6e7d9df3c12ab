"""Config: precedence, mistakes in one line, the DeepSpeed config.
pytest tests/config/test_config.py"""

import copy
import json
import os
import re
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
import yaml
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from harness.cures import try_cures
from harness.inputs import set_value
from harness.processes import run
from harness.repository import REPO

from zerotrain.config.ds_config import (
    FEATURES,
    KEYS,
    SUPPORTED_VALUES,
    check_machine,
    check_ranks,
    resolve_ds_config,
)
from zerotrain.config.parse import check_start, dump_config, parse_command_line
from zerotrain.config.schema import config_keys
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine

DS_CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))


def parse(config_file, *flags):
    return parse_command_line(["--config", str(config_file), *flags]).config


def refused(*arguments, by=parse):
    """The error of a call, which has to be one line."""
    with pytest.raises(UserError) as caught:
        by(*arguments)
    assert "\n" not in str(caught.value)
    return caught.value


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
    error = refused(path := tiny_config(model__trust_remote_code=True))
    assert error.place.startswith(f"{path}:") and error.key == "model.trust_remote_code"
    assert parse(path, f"--{error.key}", "true") == trusted


def test_a_file_may_have_a_base(tiny_config, tmp_path):
    tiny_config("base.yaml", train__steps=3, train__epochs=None)
    (tmp_path / "middle.yaml").write_text("base: base.yaml\ntrain: {seed: 1, learning_rate: 1}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: middle.yaml\ntrain: {seed: 2, steps: null, epochs: 5}\n")
    train = parse(top).train
    assert (train.seed, train.learning_rate, train.steps, train.epochs) == (2, 1.0, None, 5)
    assert "base" not in yaml.safe_load(dump_config(parse(top)))
    (tmp_path / "middle.yaml").write_text("base: base.yaml\ntrain: {sede: 1}\n")
    error = refused(top)
    assert (error.place, error.key) == (f"{tmp_path}/middle.yaml:2", "train.sede")
    (tmp_path / "middle.yaml").write_text("base: base.yaml\n")
    whole = (tmp_path / "base.yaml").read_text()
    for base in ("top.yaml", "nowhere.yaml"):  # the first would be an endless search
        (tmp_path / "base.yaml").write_text(f"{whole}base: {base}\n")
        error = refused(top)
        assert error.place.startswith(f"{tmp_path}/base.yaml") and error.key == "base"
    (tmp_path / "base.yaml").write_text(whole)
    parse(top)


def test_keys_of_a_base_are_reported_and_from_config_goes_with_its_model(
    tiny_config, tmp_path, capsys
):
    tiny_config("base.yaml", model__from_config=True, data__supervise="last", train__seed=1)
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\ntrain: {seed: 2}")
    assert parse(top).model.from_config
    said = capsys.readouterr().err
    assert "data.supervise last" in said and "train.seed" not in said
    assert not parse(top, "--model.name_or_path", "b").model.from_config
    assert parse(top, "--model.from_config", "true", "--model.name_or_path", "b").model.from_config


MISTAKES = """
train.learning_rat: 1
learning_rate: 1
trackin: {wandb: offline}
train.stepz: null
model.torch_dtype: bf16
model.revision: main -> model.revision: null, model.name_or_path: ID@REVISION
train.weight: 2 -> train.weight: null, data.train_sources: [{path: a, repeat: 2}]
train.learning_rate: fast -> train.learning_rate: 1
train.learning_rate: "0" -> train.learning_rate: 1
train.adam_betas: [0.9] -> train.adam_betas: [0.9, 0.9]
train.epochs: null -> train.epochs: 1 -> train.steps: 1
train.global_batch_tokens: 9 -> train.global_batch_tokens: null -> train.global_batch_size: null
train.lr_scaling: sqrt -> train.reference_global_batch: 8
train.lr_schedule: constant -> train.lr_schedule: constant_with_warmup
train.lr_schedule: auto, train.lr_schedule_args: {a: 1} -> train.lr_schedule_args: null
model.lora: true -> model.lora: {}
model.trainable: [a], model.lora: {} -> model.trainable: null -> model.lora: null
model.trainable: [a], model.lora: {} -> model.trainable: null, model.lora: {modules_to_save: [a]}
model.trainable: ["("] -> model.trainable: ["()"]
model.quantization: nf4 -> model.lora: {}
model.quantization: nf4, model.lora: {}, model.from_config: true -> model.from_config: null
data.on_too_long: cut -> data.on_too_long: truncate -> data.on_too_long: split
data.on_too_long: cut -> data.on_too_long: drop
data.train_sources: [] -> data.train_sources: [a]
data.train_sources: [{path: a, hub: b/c}] -> data.train_sources: [{path: a}]
data.train_sources: [{path: a, hub: b/c}] -> data.train_sources: [{hub: b/c}]
data.train_sources: [{path: a, subset: b}] -> data.train_sources: [{hub: a, subset: b}]
data.train_sources: [{path: a, spilt: b}] -> data.train_sources: [{path: a, split: b}]
data.train_sources: [a, {path: b, repeat: -1}] -> data.train_sources: [a, {path: b, repeat: 1}]
data.eval_sources: [{path: a, repeat: 2}] -> data.eval_sources: [a]
data.eval_sources: [{path: a, loss_weight: 0.5}] -> data.eval_sources: [a]
data.train_sources: [{path: a, loss_weight: 2}] -> data.train_sources: [{path: a, loss_weight: 1}]
data.eval_fraction: 0.1 -> data.eval_fraction: null -> data.eval_sources: null
eval.generate: 1, data.supervise: all -> data.supervise: answers -> data.supervise: last
checkpoint.keep_best: true, data.eval_sources: null -> data.eval_sources: [a]
checkpoint.keep_best: true, data.eval_sources: null -> data.eval_fraction: 0.1
checkpoint.weights_only: true -> checkpoint.resume: PATH
"""


@pytest.mark.parametrize("case", MISTAKES.split("\n")[1:-1])
def test_a_mistake_is_one_line_with_file_and_key_and_its_cure_works(tiny_config, case):
    mistake, error = try_cures(case, lambda values: parse(tiny_config(**values)))
    path = tiny_config(**mistake)
    file, _, line = error.place.partition(":")
    assert file == str(path) and any(key.startswith(error.key or "") for key in mistake)
    if line:
        assert error.key.rpartition(".")[2] in path.read_text().splitlines()[int(line) - 1]


FLAGS = """
--train.sedd 3 -> --train.seed 3
--train.seed x -> --train.seed 3
--train.seed -> --train.seed 3
--train.seed.x 5 -> --train.seed 5
--train.steps 5 -> --train.steps 5 --train.epochs null
train.seed 5 -> --train.seed 5
--bf16 -> --train.precision bf16
--dry-run -> --dry_run
--model x -> --model.name_or_path x
--data.train_sources [a -> --data.train_sources [a]
--config=b.yaml ->
"""


@pytest.mark.parametrize("case", FLAGS.split("\n")[1:-1])
def test_a_mistake_on_the_command_line_names_its_key_and_its_cure_works(tiny_config, case):
    flags, cure = (part.split() for part in case.split("->"))
    error = refused(tiny_config(), *flags)
    assert error.place == "command line" and error.key.strip("-") in flags[0]
    assert all(flag.rpartition(".")[2].strip("-") in str(error) for flag in cure[::2])
    parse(tiny_config(), *cure)


def test_the_output_folder_and_the_ranks_are_checked_before_the_data(tiny_config, tmp_path):
    (tmp_path / "file").touch()
    for output_dir in (tmp_path / "file" / "run", "$HOME/run", "~/run"):
        config = parse(tiny_config(output_dir=output_dir))
        assert refused(config, by=check_start).key == "output_dir"
    config = parse(tiny_config(train__global_batch_size=3))
    check_start(config)
    ds_config = {"zero_optimization": {}, "sequence_parallel_size": 2}
    check_ranks(config, ds_config, 6)
    assert refused(config, ds_config, 8, by=check_ranks).key == "train.global_batch_size"
    larger = parse(tiny_config(train__global_batch_size=4))
    check_ranks(larger, ds_config, 8)
    assert "sequence_parallel_size" in str(refused(config, ds_config, 3, by=check_ranks))
    check_ranks(config, ds_config | {"sequence_parallel_size": 3}, 3)


def test_a_strangers_file_runs_no_code_and_ends(tiny_config, tmp_path):
    path = tmp_path / "broken.yaml"
    for text, key in {
        "": None,
        "output_dir: !!python/object/apply:os.system [ls]": "output_dir",
        "? [a]\n: b": None,
        "output_dir: a\ntrain:\n": "train",
        "tracking: {class_path: evil.Evil}": "tracking.class_path",
    }.items():
        path.write_text(text)
        error = refused(path)
        assert error.place.startswith(str(path)) and error.key in (key, "not"), error
    os.mkfifo(tmp_path / "fifo.yaml")
    refused(tmp_path / "fifo.yaml")
    for base in ("/dev/zero", "/proc/kmsg"):  # the second is regular, of size 0, and has no end
        path.write_text(f"base: {base}")
        refused(path)
    path.write_text("".join(f"k{i}: 1\n" for i in range(60_000)))
    assert refused(path).key == "k0"
    for content in (b"a: " + b"x" * 2_000_000, b"output_dir: \xff"):
        path.write_bytes(content)
        assert str(path) in str(refused(path))


def test_the_cures_of_files_that_are_not_run_configs_work(tiny_config, tmp_path):
    whole, path = tiny_config().read_text(), tmp_path / "broken.yaml"
    for text, cure in (
        ("output_dir: b", ""), ("eval: {every_steps: [a}", "eval: {every_steps: 1}"),
        ("eval: {every_steps: &n 1, generate: *n}", "eval: {every_steps: 1, generate: 1}"),
    ):  # fmt: skip
        path.write_text(f"{whole}{text}\n")
        assert "not YAML" in str(refused(path))
        path.write_text(f"{whole}{cure}\n")
        parse(path)
    assert "--ds_config" in str(refused(DS_CONFIGS[0]))
    parse(path, "--ds_config", str(DS_CONFIGS[0]))


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
    finished = run([sys.executable, "-c", source], code=0)
    assert "IMPORTED []" in finished.output, finished.output
    assert all(f"  --{key}  " in finished.output for key in config_keys())
    for line in (
        "train.seed  integer; default 42\n      Seeds weight",
        'tracking.wandb  online | offline | disabled; default "offline"',
        "model.quantization  nf4 | null; default null",
        "train.learning_rate  number > 0; required",
    ):
        assert f"  --{line}" in finished.output
    piped = run(["bash", "-c", f"{sys.executable} train.py --help | head -1"])
    assert piped.output.startswith("usage") and "Error" not in piped.output
    assert "class " not in finished.output


# --------------------------------------------------------------------------------------------------
# The DeepSpeed config


@pytest.fixture
def resolved(tiny_config, tmp_path):
    """A function that resolves a run. Dotted paths that do not begin with a section of the run
    config are of its ds_config.
    """

    def resolve(values, **changes):
        path = tmp_path / "ds.json"
        ds_config = {"zero_optimization": {"stage": 2}}
        for dotted, value in values.items():
            if dotted.startswith(("train.", "model.", "tracking.")):
                changes[dotted] = value
            else:
                set_value(ds_config, dotted, value)
        path.write_text(json.dumps(ds_config))
        config = parse(tiny_config(ds_config=path, **changes))
        return resolve_ds_config(config, Machine(1, 1, precision="fp32"), 32)

    return resolve


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda p: p.stem)
def test_shipped_files_merge_completely(tiny_config, tmp_path, path):
    config = parse(tiny_config(ds_config=path))
    resolved, merged = resolve_ds_config(config, Machine(1, 1, precision="bf16"), hidden_size=64)
    assert '"auto"' not in json.dumps(merged) and resolved.train.precision == "bf16"
    assert merged["optimizer"]["params"]["lr"] == 3e-3 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True and merged["fp16"]["enabled"] is False
    # Hugging Face's sizes; hpZ's groups are nodes.
    sizes = {
        "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640, "zero_hpz_partition_size": 2,
    }  # fmt: skip
    node = resolve_ds_config(config, Machine(4, 2, precision="bf16"), hidden_size=64)[1]
    stated = json.loads(path.read_text())["zero_optimization"]
    for name in sizes.keys() & stated.keys():
        if stated[name] == "auto":
            assert node["zero_optimization"][name] == sizes[name], name
    # Sums over micro-steps and over ranks are in fp32. Stage 0 refuses the first.
    sums = ("fp32", torch.float32) if path.stem != "zero0" else (None, None)
    reached = DeepSpeedConfig(copy.deepcopy(merged))
    assert (reached.grad_accum_dtype, reached.communication_data_type) == sums
    # the resolved configs alone give the same run
    (tmp_path / "resolved.json").write_text(json.dumps(merged))
    again = parse(tiny_config(ds_config=tmp_path / "resolved.json"))
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


def test_files_of_trainer_with_auto_are_accepted(resolved):
    values = yaml.safe_load("""
        scheduler.type: WarmupLR
        scheduler.params: {warmup_num_steps: auto, warmup_type: linear}
        zero_optimization:
          stage: 3
          stage3_max_live_parameters: auto
          stage3_gather_16bit_weights_on_model_save: true
          sub_group_size: 1.0e+9
          offload_param: {device: auto, buffer_size: 1.0e+8, max_in_cpu: 1.0e+9}
        steps_per_print: auto
        fp16: {enabled: auto, loss_scale_window: 1000, hysteresis: 2, auto_cast: false}
        wall_clock_breakdown: false
    """)
    for named in (None, "constant_with_warmup"):
        config, merged = resolved(values, train__lr_schedule=named)
        assert config.train.lr_schedule == "WarmupLR"
        assert config.train.lr_schedule_args == {"warmup_type": "linear"}
    assert "auto" not in json.dumps(merged).replace("auto_cast", "")
    assert resolved({"bf16.enabled": True})[0].train.precision == "bf16"
    for kind in ({}, {"scheduler.type": "auto"}):
        assert resolved(kind, train__lr_schedule=None)[0].train.lr_schedule == "cosine"


OFF = """
activation_checkpointing: {partition_activations: false, number_checkpoints: null, profile: false}
activation_checkpointing: {cpu_checkpointing: false, number_checkpoints: 4}
amp: {enabled: false, opt_level: O1}
amp: null
autotuning: {enabled: false, fast: true}
compression_training: {layer_reduction: {enabled: false}}
curriculum_learning: {enabled: false}
data_efficiency: {enabled: false, data_sampling: {enabled: true}}
elasticity: {enabled: false, micro_batch_sizes: [2, 4]}
graph_harvesting: false
hybrid_engine: {enabled: false, pin_parameters: true}
progressive_layer_drop: {enabled: false, theta: 0.5}
sparse_gradients: false
wandb: {enabled: false, project: x}
"""


def test_blocks_that_are_off_and_comments_do_nothing(resolved):
    _, expected = resolved({})
    for line in OFF.strip().splitlines():
        values = yaml.safe_load(line)
        assert resolved(values)[1] == expected
        [(name, off)] = values.items()
        with pytest.raises(UserError, match="remove it"):
            resolved({name: {**off, "enabled": True} if off else True})
    notes = {"_comment": "text", "zero_optimization._comment": {"a": 1}, "//": "text"}
    assert resolved(notes)[1] == expected
    for features in ("wandb: {}", "wandb: {project: x}", "sparse_gradients: 1", "amp: text"):
        with pytest.raises(UserError, match="remove it"):
            resolved(yaml.safe_load(features))


@pytest.mark.parametrize("eps", [-1e-8, None, [1e-8], True, float("nan"), "1e-8"])
def test_an_epsilon_is_a_small_number(resolved, eps):
    with pytest.raises(UserError, match="such as 1e-8"):
        resolved({"optimizer": {"type": "AdamW", "params": {"eps": eps}}})


def test_what_the_machine_lacks_is_refused(resolved, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)  # as on older CPUs
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # needs another package

    def check(values):
        check_machine(*resolved(values), Machine(1, 1))

    for case in (
        "fp16.enabled: true -> fp16.enabled: auto, train.precision: fp32",
        "fp16.enabled: true -> fp16.enabled: auto, train.precision: bf16",
        "model.quantization: nf4, model.lora: {} -> model.quantization: null",
        "tensorboard.enabled: true -> tensorboard: {}",
    ):
        _, error = try_cures(case, check)
        assert case.split(".")[0] in str(error)


def test_other_files_are_rejected_as_ds_config(tiny_config, tmp_path):
    file = tmp_path / "zero2"
    config = parse(tiny_config(ds_config=file))
    assert refused(config, Machine(1, 1), 32, by=resolve_ds_config).key == "ds_config"
    for text in ("[]", '{"a": 1, "a": 2}', '{"a": 1,}', "zero_optimization: {stage: 2}"):
        file.write_text(text)
        error = refused(config, Machine(1, 1), 32, by=resolve_ds_config)
        assert error.place == str(file)
    command = re.search(r"python -c .*?> ds\.json", str(error))[0].replace("python", sys.executable)
    run(["bash", "-c", command], cwd=tmp_path, code=0)
    converted = parse(tiny_config(ds_config=tmp_path / "ds.json"))
    resolve_ds_config(converted, Machine(1, 1), 32)


REFUSED = """
train_batch_size: 64
gradient_accumulation_steps: 4
gradient_clipping: 1.0
optimizer.params.lr: 1.0e-5
tensor_parallel.vocab_parallel_lm_head: true
scheduler.type: WarmupLR
scheduler.type: WarmupLR -> train.lr_schedule: auto
scheduler: {type: OneCycle}, train.lr_schedule: auto -> scheduler: {type: WarmupLR}
scheduler: {type: OneCycle}, train.lr_schedule: auto -> scheduler: {type: WarmupDecayLR}
scheduler: {type: OneCycle}, train.lr_schedule: auto -> scheduler: {type: WarmupCosineLR}
scheduler: {type: OneCycle}, train.lr_schedule: auto -> scheduler: null, train.lr_schedule: WarmupLR
fp16.enabled: true, train.precision: bf16 -> fp16.enabled: auto -> train.precision: auto
bf16.enabled: false, train.precision: bf16 -> bf16.enabled: auto -> train.precision: auto
optimizer.params.foo: 1
optimizer.params.bias_correction: true
ZERO.legacy_stage1: true
ZERO.offload_optimizer.devise: 1
ZERO.overlap_com: true -> ZERO.overlap_com: null, ZERO.overlap_comm: true
zero_optimisation: {}
wandb: {enabled: true} -> wandb: null, tracking.wandb: null
prescale_gradients: true -> prescale_gradients: null
fp16.loss_scal: 1
checkpoint.load_universal: 1
quux: 1
ZERO.stage: auto -> ZERO.stage: 0
steps_per_print: abc -> steps_per_print: 10 -> steps_per_print: true
optimizer.params.eps: "1e-6" -> optimizer.params.eps: 0.000001
tensor_parallel.preset_model: llama
checkpoint: null -> checkpoint: {}
compile: true -> compile: {}
ZERO.offload_param: cpu -> ZERO.offload_param: {}
ZERO.zenflow: {}
expert_parallel: {}
ZERO.zero_hpz_partition_size: 2, ZERO.stage: 3, ZERO.offload_param.device: cpu \
-> ZERO.zero_hpz_partition_size: null -> ZERO.offload_param.device: null
ZERO.zero_hpz_partition_size: "2" -> ZERO.zero_hpz_partition_size: 1
ZERO.zero_hpz_partition_size: 2 -> ZERO.zero_hpz_partition_size: null -> ZERO.stage: 3
ZERO.stage: "3" -> ZERO.stage: 3
ZERO.stage: 0, fp16.enabled: true -> ZERO.stage: 1 -> fp16.enabled: auto, train.precision: bf16
ZERO.stage: 3, model.quantization: nf4, model.lora: {} -> ZERO.stage: 2 -> model.quantization: null
tensor_parallel.autotp_size: 0 -> tensor_parallel.autotp_size: 1
ZERO.offload_optimizer.device: nvme -> ZERO.offload_optimizer.device: null -> ZERO.stage: 3
ZERO.offload_param.device: cpu -> ZERO.offload_param.device: null -> ZERO.stage: 3
optimizer.type: FusedAdam -> optimizer.type: AdamW -> optimizer.type: Adam
sequence_parallel_size: 2, tensor_parallel.autotp_size: 2 -> sequence_parallel_size: 1
sequence_parallel_size: 2, tensor_parallel.autotp_size: 2 -> tensor_parallel.autotp_size: 1
""".replace("ZERO", "zero_optimization").split("\n")[1:-1]  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, *(f"{path}: 0.5" for path in SUPPORTED_VALUES)])
def test_a_ds_config_that_would_train_wrongly_is_rejected_and_its_cure_works(resolved, case):
    mistake, error = try_cures(case, resolved)
    assert error.place.endswith("/ds.json") and error.key == next(iter(mistake))


def test_deepspeed_has_every_supported_key():
    folder = Path(deepspeed.__file__).parent
    words = {word for f in folder.rglob("*.py") for word in re.findall(r"\w+", f.read_text())}
    assert set(" ".join([*KEYS.values(), FEATURES]).split()) <= words
