"""Saves the masters of a model whose fused matrices tensor parallelism has split, for
test_masters.py.
"""

from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from split_models import DS_CONFIG, MODEL
from transformers import AutoConfig, AutoModelForCausalLM

from zerotrain.checkpoint.masters import spread_masters
from zerotrain.checkpoint.zero_state import local_parts
from zerotrain.runtime.process_group import process_group

SIZES = MODEL | {"num_key_value_heads": 4, "intermediate_size": 61, "pad_token_id": 0}


def main(config, dry_run):
    """Each rank writes output_dir/RANK.pt: name -> its piece of the masters, DeepSpeed's record."""
    with process_group() as world:
        ranks = world.in_groups(world.world_size, 1)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **SIZES))
        split = {"autotp_size": world.world_size, "preset_model": "phi3"}
        engine, *_ = deepspeed.initialize(
            model=model.bfloat16(), model_parameters=model.parameters(),
            config=DS_CONFIG | {"bf16": {"enabled": True}, "tensor_parallel": split},
        )  # fmt: skip
        spread_masters(engine, config, ranks)
        found = {}
        for name, p, _, states, _ in local_parts(engine):
            record = getattr(p, DS_AUTOTP_UC_META, {}).get("conversion", {}).get("affine_map")
            found[name] = states["fp32"].clone(), record
        folder = Path(config.output_dir)
        folder.mkdir(exist_ok=True)
        torch.save(found, folder / f"{ranks.rank}.pt")
