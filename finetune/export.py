"""A checkpoint as a Hugging Face folder."""

import io
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint import SHARDS, fault, read_state
from finetune.errors import UserError


def export_checkpoint(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that `from_pretrained` loads.

    The weights are the fp32 master weights (stage 0: the model's own), in `dtype` (float32,
    bfloat16 ...), by default the precision of the run. Takes CPU memory for about two copies of
    the model in fp32.

    Raises:
        UserError: the checkpoint is not usable, or `out` is not empty.
    """
    if problem := fault(checkpoint):
        raise UserError(f"{checkpoint} is no usable checkpoint: {problem}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty, or no folder; give a new one")
    state = read_state(checkpoint)
    if state.zero_stage == 0:
        saved = torch.load(
            checkpoint / SHARDS / "mp_rank_00_model_states.pt",
            map_location="cpu",
            weights_only=False,
        )
        weights = saved["module"]
    else:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it is chatty
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=SHARDS)
    config = AutoConfig.from_pretrained(checkpoint / "model")
    default = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[state.precision]
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype or default))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise RuntimeError(
            f"{checkpoint}: weights do not fit: missing {sorted(set(missing) - tied)}, "
            f"left over {unexpected}"
        )
    model.tie_weights()
    draft = out.with_name(out.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    if (checkpoint / "model" / "generation_config.json").exists():
        shutil.copy(checkpoint / "model" / "generation_config.json", draft)
    AutoTokenizer.from_pretrained(checkpoint / "model").save_pretrained(draft)
    if out.exists():
        out.rmdir()
    os.replace(draft, out)
