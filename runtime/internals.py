"""The parts of DeepSpeed, torch and transformers that are used here although they are not public.

Another version may rename them or change what they mean. Before an upgrade, compare each of them
with the new version, run the tests, and then change READ_FROM.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

READ_FROM = {"deepspeed": "0.19.8", "torch": "2.13", "transformers": "5.23"}


class Internals(NamedTuple):
    """Names that one file of this repository takes from one module of a library."""

    used_in: str
    module: str
    names: tuple[str, ...]
    purpose: str


INTERNALS = (
    Internals(
        "runtime/process_group.py", "deepspeed.ops",
        ("__compatible_ops__",), "no shared-memory all-reduce on CPU, which needs a compiler",
    ),
    Internals(
        "runtime/process_group.py", "torch.distributed.distributed_c10d",
        ("_world", "pg_map", "_set_pg_timeout"), "the timeout of ZeRO's own groups",
    ),
    Internals(
        "runtime/flight_record.py", "torch.distributed.distributed_c10d",
        ("_world", "pg_group_ranks", "pg_names"), "the ranks of each group for fr_trace",
    ),
    Internals(
        "runtime/hang.py", "torch.distributed.distributed_c10d",
        ("_world", "pg_names"), "the names of the process groups",
    ),
    Internals(
        "config/ds_check.py", "deepspeed.ops.op_builder.builder",
        ("assert_no_cuda_mismatch", "MissingCUDAException", "CUDAMismatchException"),
        "whether FusedAdam can be compiled",
    ),
    Internals(
        "config/ds_check.py", "deepspeed.git_version_info", ("installed_ops",),
        "whether it has been compiled",
    ),
    Internals(
        "tracking/step_timer.py", "deepspeed.runtime.zero.partition_parameters",
        ("ds_shape",), "which modules have a matrix under ZeRO 3",
    ),
    Internals(
        "tracking/profiler.py", "torch.cuda.memory",
        ("_record_memory_history", "_dump_snapshot"), "what holds the memory when it runs out",
    ),
    Internals(
        "runtime/preemption.py", "deepspeed.launcher.launch",
        ("terminate_process_tree",), "how long its launcher waits before it kills the ranks",
    ),
    Internals(
        "runtime/world_size.py", "deepspeed.launcher.runner",
        ("fetch_hostfile",), "the slots of a hostfile, as the launcher counts them",
    ),
    Internals(
        "checkpoint/save.py", "deepspeed.runtime.engine",
        ("checkpoint_engine", "_copy_recovery_script", "basic_optimizer", "buffer_names"),
        "the state that would be written, without writing it",
    ),
    Internals(
        "checkpoint/save.py", "deepspeed.runtime.checkpoint_engine.checkpoint_engine",
        ("CheckpointEngine",), "the interface of what takes that state",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.engine",
        ("param_names", "dp_world_size", "basic_optimizer"), "names of parameters, ZeRO's ranks",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.zero.stage3",
        ("fp16_groups", "fp32_partitioned_groups_flat", "ds_tensor", "swap_optimizer",
         "params_in_nvme_and_cpu"),
        "the flat tensors of stage 3",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.zero.partition_parameters",
        ("ds_shape", "ds_numel", "ds_process_group"), "a partitioned parameter",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.zero.stage_1_and_2",
        ("bit16_groups",), "the flat tensors of stages 1 and 2",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.bf16_optimizer",
        ("bf16_groups",), "those of stage 1 in bf16",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.utils.tensor_fragment",
        ("hp_fragment_address", "lp_fragment_address", "start", "numel"),
        "where a parameter lies in the flat tensors of stages 1 and 2",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.utils.mixed_precision_linkage",
        ("_hp_mapping",), "the same",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.fp16.fused_optimizer",
        ("fp16_groups", "fp32_groups_flat"), "stage 0 in 16 bits with FusedAdam",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.runtime.fp16.unfused_optimizer",
        ("fp16_groups", "fp32_groups"), "stage 0 in 16 bits with another optimizer",
    ),
    Internals(
        "checkpoint/shards.py", "deepspeed.checkpoint.constants",
        ("fp32_flat_groups", "single_partition_of_fp32_groups", "base_optimizer_state",
         "frozen_param_fragments", "buffer_names"),
        "keys of the files",
    ),
    Internals(
        "model/stored.py", "transformers.core_model_loading",
        ("rename_source_key", "dot_natural_key", "WeightConverter", "WeightRenaming", "add_tensor",
         "_weight_conversions"),
        "the tensors of the model that files are converted to",
    ),
    Internals(
        "checkpoint/prefixes.py", "transformers.core_model_loading",
        ("PrefixChange", "_weight_conversions", "was_used", "scope_prefix"),
        "the names that a model's tensors have in its files",
    ),
    Internals(
        "model/experts.py", "transformers.integrations.moe",
        ("_is_expert_parallel",), "the modules that hold the experts of a layer",
    ),
    Internals(
        "model/trained.py", "peft.tuners.lora.layer",
        ("parameter_name",), "the parameter that a layer of peft adds an adapter to",
    ),
    Internals(
        "model/memory.py", "peft.tuners.lora.layer",
        ("parameter_name", "get_param"), "how large it is",
    ),
    Internals(
        "checkpoint/fill.py", "deepspeed.runtime.zero.stage3",
        ("checkpoint_event_prologue", "checkpoint_event_epilogue", "fp16_partitioned_groups_flat"),
        "loading into stage 3",
    ),
    Internals(
        "checkpoint/fill.py", "deepspeed.runtime.zero.stage_1_and_2",
        ("update_lp_params",), "loading into stages 1 and 2",
    ),
    Internals(
        "checkpoint/convert.py", "deepspeed.runtime.engine",
        ("global_steps", "global_samples", "skipped_steps"), "the engine's counters",
    ),
    Internals(
        "model/engine.py", "deepspeed.runtime.engine",
        ("basic_optimizer",), "the optimizer inside ZeRO's",
    ),
    Internals(
        "model/loss.py", "deepspeed.runtime.chunked_cross_entropy",
        ("chunked_cross_entropy",), "the cross entropy of a chunk of logits",
    ),
    Internals(
        "model/optimizer.py", "deepspeed.runtime.engine",
        ("basic_optimizer", "_step_applied"), "skipping an update at any stage",
    ),
    Internals(
        "model/optimizer.py", "deepspeed.runtime.zero.stage_1_and_2",
        ("averaged_gradients", "cpu_offload"), "the gradients of a skipped update",
    ),
    Internals(
        "model/optimizer.py", "deepspeed.runtime.zero.partition_parameters",
        ("ds_shape",), "the shape of a partitioned parameter",
    ),
)  # fmt: skip


def version_warning(installed: Mapping[str, str]) -> str | None:
    """A line if a library is not of the version that its internals were read from.

    Args:
        installed: version by library, e.g. {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}.
    """
    others = [
        f"{name} {installed[name]} (not {read})"
        for name, read in READ_FROM.items()
        if not f"{installed[name]}.".replace("+", ".").startswith(f"{read}.")
    ]
    if not others:
        return None
    return (
        f"WARNING: untested version of {' and '.join(others)}, whose internals this code uses: see "
        "runtime/internals.py, and run the tests"
    )


def installed_versions() -> dict[str, str]:
    """The version of each library in READ_FROM."""
    return {name: version(name) for name in READ_FROM}
