"""The parts of libraries that are used here although they are not public.

Another version may rename them or change what they mean. Before an upgrade, compare each of them
with the new version, run the tests, and then change READ_FROM.
"""

READ_FROM = {"deepspeed": "0.19.8", "torch": "2.13", "transformers": "5.23", "datasets": "5.2"}

PATCHES = {
    "zerotrain/runtime/process_group.py: __compatible_ops__": "on CPU, gloo instead of a "
    "shared-memory all-reduce, which needs a compiler and leaves 69 MB per rank in /dev/shm",
    "zerotrain/model/load.py: _original_object_hash": "a generation config with other end tokens "
    "is saved as if unchanged, since transformers refuses to save what many models publish",
    "zerotrain/training/engine.py: first_dataloader_check": "removed under tensor parallelism, "
    "where it would send each rank's inputs to the others as pickles",
    "zerotrain/training/guard.py: averaged_gradients": "cleared after an update that ZeRO 2 "
    "with offload has skipped, since the next gradients would be added to NaN",
    "zerotrain/model/load.py: _from_model_config": "the same config no longer follows from "
    "config.json",
}
"""FILE: ATTRIBUTE of an object of a library that is changed, and why; at most five."""

INTERNALS = {
    "zerotrain/runtime/process_group.py": """
        deepspeed.ops: __compatible_ops__
        torch.distributed.distributed_c10d: _world pg_map _set_pg_timeout
    """,
    "zerotrain/runtime/preemption.py": """
        deepspeed.launcher.launch: CROSS_SIZE
    """,
    "zerotrain/checkpoint/shards.py": """
        deepspeed.runtime.engine: basic_optimizer
        deepspeed.checkpoint.constants: DS_AUTOTP_UC_META
        deepspeed.module_inject.layers: partition_dim
        deepspeed.runtime.zero.stage3: fp16_groups fp32_partitioned_groups_flat ds_tensor
            checkpoint_event_prologue checkpoint_event_epilogue optimizer_swapper
            invalidate_secondary_tensor
        deepspeed.runtime.swap_tensor.optimizer_utils: swap_params_info get_swap_paths
        deepspeed.runtime.zero.partition_parameters: ds_shape ds_numel
        deepspeed.runtime.zero.stage_1_and_2: update_lp_params
        deepspeed.utils.tensor_fragment: hp_fragment_address lp_fragment_address
            param_group_index start numel
        deepspeed.runtime.fp16.loss_scaler: cur_scale cur_iter last_overflow_iter
            cur_hysteresis
        deepspeed.utils.mixed_precision_linkage: _hp_mapping
        deepspeed.runtime.fp16.fused_optimizer: fp16_groups
        deepspeed.runtime.fp16.unfused_optimizer: fp16_groups
    """,
    "zerotrain/checkpoint/save.py": """
        torch.utils._pytree: tree_map_only
    """,
    "zerotrain/rows/sources.py": """
        datasets.arrow_dataset: _fingerprint
    """,
    "zerotrain/model/hub.py": """
        transformers.utils.hub: _raise_exceptions_for_missing_entries
    """,
    "zerotrain/model/load.py": """
        transformers.modeling_utils: _keys_to_ignore_on_load_unexpected
        transformers.generation.configuration_utils: _from_model_config _original_object_hash
    """,
    "zerotrain/model/packing.py": """
        transformers.modeling_utils: _supports_attention_backend _supports_sdpa
    """,
    "zerotrain/model/partitions.py": """
        deepspeed.runtime.zero.partition_parameters: ds_tensor ds_numel ds_process_group
    """,
    "zerotrain/model/probes.py": """
        transformers.configuration_utils: _attn_implementation
    """,
    "zerotrain/training/engine.py": """
        deepspeed.runtime.engine: basic_optimizer first_dataloader_check
    """,
    "zerotrain/training/loss.py": """
        deepspeed.runtime.chunked_cross_entropy: chunked_cross_entropy
    """,
    "zerotrain/training/guard.py": """
        deepspeed.runtime.zero.stage_1_and_2: averaged_gradients cpu_offload
    """,
    "zerotrain/training/optimizer.py": """
        deepspeed.runtime.zero.partition_parameters: ds_shape
    """,
}
"""File -> module of a library: the names that the file takes from it."""
