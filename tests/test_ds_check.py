"""Mistakes in a DeepSpeed config are refused in one line.    pytest tests/test_ds_check.py"""

import json
import logging
from dataclasses import replace

import pytest
from conftest import REPO
from deepspeed.runtime import config as deepspeed_config

from zerotrain.config import ds_check
from zerotrain.config.ds_check import KEYS, NO_EFFECT, check_with_deepspeed
from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from zerotrain.runtime.errors import UserError

CONFIG = Config(
    output_dir="run",
    model=ModelConfig(name_or_path="model"),
    data=DataConfig(train_sources=["rows.jsonl"]),
    train=TrainConfig(learning_rate=1e-3, global_batch_size=8, steps=10),
)
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}


@pytest.fixture
def checked(tmp_path):
    """A function that merges and checks a DeepSpeed config as train.py does; returns the notes."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    def check(ds_config):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(ds_config))
        config, _, merged = resolve_ds_config(replace(CONFIG, ds_config=str(file)), "fp32", 64)
        return check_with_deepspeed(config, merged)

    return check


UNKNOWN = {  # path of the key -> the key that is meant
    "zero_optimisation.stage": "zero_optimization",
    "zero_optimization.offload_optimizer.devise": "device",
    "fp16.loss_scal": "loss_scale",
    "quux": None,
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_an_unknown_key_is_refused_at_every_level(checked, path):
    ds_config = 1
    for name in reversed(path.split(".")):
        ds_config = {name: ds_config}
    with pytest.raises(UserError) as caught:
        checked(ds_config)
    said = str(caught.value)
    shown = path if UNKNOWN[path] and path.partition(".")[0] in KEYS[""] else path.split(".")[0]
    assert f"ds.json: {shown}: unknown key" in said and "\n" not in said, said
    fix = f"did you mean {UNKNOWN[path]}?" if UNKNOWN[path] else "remove it"
    assert fix in said, said


REFUSED = {
    "compute_grad_norm": {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
    "fp16 at stage 0": {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}},
    "grad_accum_dtype": {"data_types": {"grad_accum_dtype": "bf16"}},
    "FusedAdam": {"optimizer": {"type": "FusedAdam"}},
    "weight_decy": {"optimizer": {"type": "AdamW", "params": {"torch_adam": True,
                                                              "weight_decy": 0.1}}},
    "amp": {"amp": {"enabled": True}},
    "stage": {"zero_optimization": {"stage": "auto"}},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_a_traceback_or_wrong_is_one_line(checked, case):
    with pytest.raises(UserError) as caught:
        checked(REFUSED[case])
    said = str(caught.value)
    assert "ds.json: " in said and "\n" not in said, said
    assert case.split()[0].lower() in said.lower() or case.endswith("CPU"), said


@pytest.mark.parametrize("path", sorted((REPO / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_files_pass(checked, path):
    assert not checked(json.loads(path.read_text()))


AUTO = {"reduce_bucket_size": "auto", "allgather_bucket_size": "auto"}
ACCEPTED = {
    "as transformers' examples have it": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
                 "initial_scale_power": 16, "min_loss_scale": 1, "auto_cast": False},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(
            ("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "buffer_size": 1e8, "max_in_cpu": 1e9},
            "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True, **AUTO},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000, "wall_clock_breakdown": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_deepspeed_reads_is_accepted(checked, case):
    assert not checked(ACCEPTED[case])


def test_keys_without_effect_are_named(checked):
    ds_config = {
        "activation_checkpointing": {"partition_activations": True}, "pipeline": {"stages": "auto"},
        "disable_allgather": True, "dataloader_drop_last": True, "aio": {"thread_count": 1},
    }  # fmt: skip
    notes = checked(ds_config)
    assert len(notes) == 5 and all("has no effect" in note for note in notes)
    assert "model.activation_checkpointing" in notes[0]


class Watched(dict):
    """A dictionary that records which keys are read."""

    def __init__(self, *items):
        super().__init__(*items)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_the_known_keys_are_those_that_deepspeed_reads():
    blocks = {name: Watched() for name in KEYS if name}
    blocks["optimizer"] = Watched({"type": "AdamW", "params": {}})
    top = Watched({"train_batch_size": 1, **blocks})
    deepspeed_config.DeepSpeedConfig(top)
    removed = set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(KEYS[""].split()) == top.read - removed - {"bfloat16"} | {"sequence_parallel_size"}
    for name, block in blocks.items():
        assert set(KEYS[name].split()) == block.read, name
    assert {path.split(".")[0] for path in NO_EFFECT} & set(KEYS[""].split())


def test_fused_adam_on_a_gpu_needs_the_nvcc_of_torchs_cuda(checked, monkeypatch):
    fused = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    monkeypatch.setattr(ds_check.get_accelerator(), "device_name", lambda: "cuda")
    monkeypatch.setattr("torch.version.cuda", "99.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/nowhere")
    with pytest.raises(UserError, match=r"FusedAdam is compiled by nvcc of CUDA 99.0.*torch_adam"):
        checked(fused)
    checked({"optimizer": ADAMW})  # torch's
    monkeypatch.setitem(ds_check.installed_ops, "fused_adam", True)
    checked(fused)
