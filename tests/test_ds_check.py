"""Mistakes in a DeepSpeed config are refused in one line.    pytest tests/test_ds_check.py"""

import json
import logging
from dataclasses import replace

import pytest
from conftest import REPO

from config import ds_check
from config.ds_check import check_with_deepspeed
from config.ds_config import merge_ds_config, resolve_precision, with_schedule
from config.schema import Config, DataConfig, ModelConfig, TrainConfig
from runtime.errors import UserError

CONFIG = Config(
    output_dir="run",
    model=ModelConfig(name_or_path="model"),
    data=DataConfig(train_sources=["rows.jsonl"]),
    train=TrainConfig(learning_rate=1e-3, global_batch_size=8, steps=10),
)


@pytest.fixture
def checked(tmp_path):
    """A function that merges and checks a DeepSpeed config as train.py does and returns it."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    notes = []

    def check(ds_config, **train):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(ds_config))
        config = replace(CONFIG, ds_config=str(file), train=replace(CONFIG.train, **train))
        merge_ds_config(config)
        config = with_schedule(config)
        merged = merge_ds_config(config, resolve_precision(config, "fp32"), hidden_size=64)
        notes[:] = check_with_deepspeed(config, merged)
        return merged

    check.notes = notes
    return check


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
UNKNOWN = {
    "zero_optimisation": ({"zero_optimisation": {"stage": 3, "reduce_bucket_size": "auto"}},
                          "zero_optimisation: ", "zero_optimization"),
    "gradient_cliping": ({"gradient_cliping": 1.0}, "gradient_cliping: ", "gradient_clipping"),
    "bf_16": ({"bf_16": {"enabled": True}}, "bf_16: ", "bf16"),
    "case": ({"Optimizer": ADAMW}, "Optimizer: ", "optimizer"),
    "zero": ({"zero_optimization": {"stage": 2, "overlap_com": True}},
             "zero_optimization.overlap_com: ", "overlap_comm"),
    "offload": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
                "zero_optimization.offload_optimizer.devise: ", "device"),
    "fp16": ({"fp16": {"enabled": False, "loss_scal": 0}}, "fp16.loss_scal: ", "loss_scale"),
    "bf16": ({"bf16": {"enable": True}}, "bf16.enable: ", "enabled"),
    "data_types": ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype: ",
                   "grad_accum_dtype"),
    "checkpoint": ({"checkpoint": {"tag_validaton": "Warn"}}, "checkpoint.tag_validaton: ",
                   "tag_validation"),
    "checkpoint, deeper": ({"checkpoint": {"parallel_write": {"pipeline_stages": True}}},
                           "checkpoint.parallel_write.pipeline_stages: ", "pipeline_stage"),
    "scheduler": ({"scheduler": {"type": "WarmupLR", "parms": {}}}, "scheduler.parms: ", "params"),
    "scheduler.params": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
                         "scheduler.params.warmup_steps: ", "warmup_num_steps"),
    "optimizer": ({"optimizer": {**ADAMW, "legacy_fuson": True}}, "optimizer.legacy_fuson: ",
                  "legacy_fusion"),
    "activation_checkpointing": (
        {"activation_checkpointing": {"partition_activation": True}},
        "activation_checkpointing.partition_activation: ", "partition_activations"),
    "aio": ({"aio": {"block_sise": 1}}, "aio.block_sise: ", "block_size"),
    "comms_logger": ({"comms_logger": {"enabled": False, "prof_al": True}},
                     "comms_logger.prof_al: ", "prof_all"),
    "flops_profiler": ({"flops_profiler": {"profile_steps": 1}}, "flops_profiler.profile_steps: ",
                       "profile_step"),
    "wandb": ({"wandb": {"enabled": False, "projct": "a"}}, "wandb.projct: ", "project"),
    "tensorboard": ({"tensorboard": {"enabled": False, "job": "a"}}, "tensorboard.job: ",
                    "job_name"),
    "timers": ({"timers": {"throughput": {"synchronised": False}}},
               "synchronised: ", "synchronized"),
    "nothing like it": ({"quux": 1}, "quux: ", None),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_is_refused_at_every_level(checked, case):
    ds_config, where, meant = UNKNOWN[case]
    with pytest.raises(UserError) as caught:
        checked(ds_config)
    said = str(caught.value)
    assert f"ds.json: {where}" in said and "unknown key" in said and "\n" not in said, said
    assert f"did you mean {meant}?" in said if meant else "remove it" in said, said


REFUSED = {
    "fp16 at stage 0": ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}},
                        "set the stage to 1"),
    "a precision that the device lacks": (
        {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
        "fp16 is enabled, but not supported by the device"),
    "fp32 accumulation at stage 0": (
        {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True},
         "data_types": {"grad_accum_dtype": "fp32"}}, "set zero_optimization.stage to 1"),
    "param_dtype": ({"data_types": {"param_dtype": "bf16"}}, "the run's precision is fp32"),
    "dtype": ({"data_types": {"param_dtype": "fp8"}}, "is none of fp32, bf16, fp16"),
    "tensor parallelism": ({"tensor_parallel": {"autotp_size": 2}},
                           "tensor_parallel.autotp_size is 2: tensor parallelism is not supported"),
    "sum": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is \"sum\": the loss is"),
    "autotuning": ({"autotuning": {"enabled": True}}, "autotuning.enabled is true: it ends"),
    "prescale": ({"zero_optimization": {"stage": 2}, "prescale_gradients": True},
                 "prescale_gradients is true, which ZeRO stages 2 and 3"),
    "predivide": ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
                  "gradient_predivide_factor is 2.0, which ZeRO stages 2 and 3"),
    "16-bit master weights": (
        {"zero_optimization": {"stage": 2},
         "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads is true"),
    "Adagrad": ({"optimizer": {"type": "Adagrad", "params": {}}},
                "only AdamW and Adam are supported"),
    "SGD": ({"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}},
            "optimizer.type is \"SGD\": only AdamW and Adam are supported"),
    "FusedAdam": ({"optimizer": {"type": "FusedAdam"}}, "are AdamW without \"torch_adam\""),
    "misspelt parameter": (
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "weight_decy": 0.1}}},
        "optimizer.params.weight_decy: AdamW has no such parameter; did you mean weight_decay?"),
    "another class's parameter": (
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "bias_correction": True}}},
        "optimizer.params.bias_correction: AdamW has no such parameter"),
    "max_grad_norm": ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
                      "train.gradient_clipping sets"),
    "NVMe nowhere": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "nvme_path is missing"),
    "removed block": ({"amp": {"enabled": True}}, "DeepSpeed refuses it: NVIDIA Apex AMP"),
    "wrong type": ({"zero_optimization": {"stage": 2, "overlap_comm": "mabye"}},
                   "zero_optimization.overlap_comm is \"mabye\": Input should be a valid boolean"),
    "auto stage": ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is \"auto\""),
    "auto that nobody knows": ({"steps_per_print": "auto"}, "steps_per_print is \"auto\", but"),
    "two names": ({"bf16": {}, "bfloat16": {}}, "bfloat16 is the old name of bf16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_a_traceback_later_is_one_line(checked, case):
    ds_config, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        checked(ds_config)
    assert "ds.json: " in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_old_name_of_bf16_means_bf16(checked):
    """DeepSpeed reads it if there is no bf16 block."""
    merged = checked({"bfloat16": {"enabled": True}})
    assert merged["bf16"] == {"enabled": True} and "bfloat16" not in merged


def test_duplicate_keys_are_refused(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": {"enabled": false}, "gradient_clipping": 1, "gradient_clipping": 2}')
    with pytest.raises(UserError, match="key gradient_clipping occurs twice"):
        merge_ds_config(replace(CONFIG, ds_config=str(file)))


@pytest.mark.parametrize("path", sorted((REPO / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_files_pass(checked, path):
    checked(json.loads(path.read_text()))


AUTO_ZERO = ("reduce_bucket_size", "stage3_prefetch_bucket_size",
             "stage3_param_persistence_threshold", "allgather_bucket_size")  # fmt: skip
ACCEPTED = {
    "as transformers' examples have it": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
                 "initial_scale_power": 16, "min_loss_scale": 1, "auto_cast": False},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(
            ("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
            ("last_batch_iteration",), -1) | dict.fromkeys(
            ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "buffer_size": 1e8, "max_in_cpu": 1e9},
            "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            **dict.fromkeys(AUTO_ZERO, "auto")},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000, "wall_clock_breakdown": False,
    },
    "all that a file may say besides": {
        "_comment": "stage 2", "zero_optimization": {"stage": 2, "//": "old name", "cpu_offload":
        False, "round_robin_gradients": True, "ignore_unused_parameters": True},
        "activation_checkpointing": {"partition_activations": False, "profile": False,
                                     "number_checkpoints": None},
        "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1,
                           "top_modules": 1, "detailed": True, "output_file": None},
        "tensorboard": {"enabled": False, "output_path": "x", "job_name": "y"},
        "wandb": {"enabled": False, "project": "p"}, "csv_monitor": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "prescale_gradients": False, "gradient_predivide_factor": 1.0, "dump_state": False,
        "memory_breakdown": False, "dataloader_drop_last": True, "tensor_parallel":
        {"autotp_size": 1}, "timers": {"throughput": {"enabled": True, "synchronized": False}},
        "optimizer": {"type": "adam", "params": {"lr": "auto", "torch_adam": True,
                                                 "adam_w_mode": True, "amsgrad": False}},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_deepspeed_reads_is_accepted(checked, case):
    checked(ACCEPTED[case])
    assert not checked.notes


def test_a_key_of_an_older_version_is_told(checked):
    """transformers' NVMe examples have this key."""
    checked({"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1}})
    assert len(checked.notes) == 1 and "aio.thread_count: DeepSpeed" in checked.notes[0]


def test_fused_adam_on_a_gpu_needs_the_nvcc_of_torchs_cuda(checked, monkeypatch):
    fused = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    monkeypatch.setattr(ds_check.get_accelerator(), "device_name", lambda: "cuda")
    monkeypatch.setattr("torch.version.cuda", "99.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/nowhere")
    with pytest.raises(UserError) as refused:
        checked(fused)
    problem = str(refused.value)
    assert "FusedAdam is compiled by nvcc" in problem and "/nowhere/bin/nvcc" in problem
    assert "CUDA 99.0, or set optimizer.params.torch_adam to true" in problem
    assert "\n" not in problem
    checked({"optimizer": ADAMW})  # torch's
    monkeypatch.setitem(ds_check.installed_ops, "fused_adam", True)
    checked(fused)
