"""Compares models that tensor parallelism splits with whole ones, for test_tensor_parallel.py."""

import copy

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerotrain.model.architecture import SUPPORTED_TYPES
from zerotrain.runtime.process_group import process_group

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
         "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.1}  # fmt: skip
MODEL = SIZES | {"intermediate_size": 64, "head_dim": 8, "bos_token_id": 1,
                 "attention_dropout": 0.0, "residual_dropout": 0.0}  # fmt: skip
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False},
}


def main(config, dry_run):
    """Print for each type of model the relative differences of logits and of the gradient norm."""
    ids = torch.randint(3, 320, (2, 17), generator=torch.Generator().manual_seed(1))
    with process_group() as ranks:
        for kind in SUPPORTED_TYPES.split():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODEL))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            whole = copy.deepcopy(model)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=DS_CONFIG
            )
            logits, expected = (m(input_ids=ids, use_cache=False).logits for m in (engine, whole))
            engine.backward(logits.square().mean())
            engine.step()
            expected.square().mean().backward()
            gradients = [p.grad.double() for p in whole.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            of_logits = float((logits - expected).detach().norm() / expected.detach().norm())
            of_norm = float(abs(engine.get_global_grad_norm() / norm - 1))
            if ranks.is_first:
                print(f"split {kind} {of_logits:.1e} {of_norm:.1e}", flush=True)
