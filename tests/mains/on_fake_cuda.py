"""Forward and backward of the loss on fake CUDA tensors, for test_fake_cuda.py: prints one JSON
object with what was counted in each case.
"""

import harness.fake_cuda  # noqa: F401, I001  before torch

import inspect
import json
import os

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3MoeConfig

from harness.batches import micro_batch
from harness.counted import Counted
from zerotrain.config.schema import ModelConfig
from zerotrain.model import packing
from zerotrain.training.engine import change_blocks
from zerotrain.training.loss import CHUNK_TOKENS, SupervisedLoss

CUDA = torch.device("cuda")
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
CHUNK_TOKENS["cuda"] = 32
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                         output_router_logits=True)  # fmt: skip
SIGNATURES = {
    "2.11": "return_aux scale window_size",
    "2.12": "return_aux scale window_size enable_gqa seqused_k block_table num_splits",
    "2.13": "return_aux scale window_size enable_gqa seqused_k block_table num_splits",
}
"""The parameters of varlen_attn, by torch's version, after the seven that can be positional:"""
POSITIONAL = "query key value cu_seq_q cu_seq_k max_q max_k"
CASES = {
    **{f"packed, torch {version}": (LLAMA, {}) for version in SIGNATURES},
    "packed fp32": (LLAMA, {}),
    "bucketed": (LLAMA, {}),
    "bucketed fp32": (LLAMA, {}),
    "packed, recomputed": (LLAMA, {"activation_checkpointing": True}),
    "packed, window": (MistralConfig(**SIZES, sliding_window=5), {}),
    "packed, experts": (EXPERTS, {}),
    "bucketed, experts": (EXPERTS, {}),
}


def signature_of(names):
    """The signature of varlen_attn with these keyword parameters, of which none is required."""
    kind = inspect.Parameter
    positional = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in POSITIONAL.split()]
    keywords = [kind(name, kind.KEYWORD_ONLY, default=None) for name in names.split()]
    return inspect.Signature(positional + keywords)


def run(name, config, options):
    """The counts of one micro-step."""
    packed = name.startswith("packed")
    attention = packing.PACKED_EXAMPLES if packed else "sdpa"
    dtype = torch.float32 if "fp32" in name else torch.bfloat16
    version = name.rpartition(" ")[2]
    signature = signature_of(SIGNATURES.get(version, SIGNATURES["2.13"]))
    calls = []
    own = packing.varlen_attn

    def varlen_attn(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs))
        return own(*args, **{**kwargs, "enable_gqa": True})

    varlen_attn.__signature__ = signature
    packing.varlen_attn = varlen_attn
    batch = micro_batch(packed)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with CUDA:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
        change_blocks(model.train(), ModelConfig("x", **options), 0)
        loss = SupervisedLoss(model)
        with Counted() as counted:
            cross_entropy, router = loss(model, batch)
            (cross_entropy * 0.5 + router).backward()
    packing.varlen_attn = own
    return {
        "waits": counted.waits,
        "copies": counted.copies,
        "on_cpu": counted.on_cpu,
        "gradients": sorted(
            {str(p.grad is not None and p.grad.device) for p in model.parameters()}
        ),
        "varlen_calls": len(calls),
    }


if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # for experts
    print(json.dumps({name: run(name, *case) for name, case in CASES.items()}), flush=True)
    os._exit(0)  # torch's threads for the fake device may end the process with SIGABRT at exit
