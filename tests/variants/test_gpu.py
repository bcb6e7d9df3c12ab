"""Tests that need a GPU.    pytest -m gpu tests/variants/test_gpu.py"""

import json
import subprocess
import sys

import pytest
import torch
from harness.batches import LENGTHS, micro_batch
from harness.processes import environment, run
from harness.repository import REPO
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from zerotrain.config.schema import ModelConfig
from zerotrain.model.packing import PACKED_EXAMPLES
from zerotrain.runtime.seeding import rng_state, seed_everything, set_rng_state
from zerotrain.training.engine import change_blocks
from zerotrain.training.loss import SupervisedLoss

MISSING = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(test):
    return pytest.mark.gpu(MISSING(test))


def test_gpu_tests_need_no_other_packages():
    script = """
import sys
import pytest
sys.modules |= dict.fromkeys(["copier", "kubeflow_trainer_api", "matplotlib", "plotly", "wandb"])
sys.exit(pytest.main(["-qq", "-m", "gpu", "-n", "0", "--collect-only"]))
"""
    done = run([sys.executable, "-c", script])
    assert done.code == 0 and "variants/test_gpu.py: 7" in done.output, done.output


@on_gpu
def test_random_numbers_continue_on_the_gpu(tmp_path):
    torch.cuda.set_device(0)  # as in a run
    seed_everything(3)
    torch.save(rng_state(), tmp_path / "rng.pt")
    first = torch.rand(9, device="cuda")
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(9, device="cuda"), first)


def compute(folder, packed, device, dtype, lengths=LENGTHS, **options):
    """Return the loss of a micro-batch, with changed blocks, and its gradients by name."""
    attention = PACKED_EXAMPLES if packed else None
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).to(device)
    change_blocks(model.train(), ModelConfig("x", **options), 0)
    batch = micro_batch(packed, lengths)
    batch = batch.each(torch.Tensor.pin_memory) if device == "cuda" else batch
    supervised = SupervisedLoss(model)
    is_cuda = device == "cuda"
    if is_cuda and packed and not options.get("compile"):
        torch.cuda.set_sync_debug_mode("error")  # A micro-step waits for no value of the GPU.
    loss = supervised(model, batch).cross_entropy
    loss.backward()
    if is_cuda:
        torch.cuda.set_sync_debug_mode("default")
    found = {name: weight.grad for name, weight in model.named_parameters()}
    found["loss"] = loss.detach()
    return {name: value.float().cpu() for name, value in found.items()}


def relative_errors(found, exact):
    """Return the error of the loss and, for each kind of weight, of the worst layer's gradient."""
    errors = {}
    for name, value in exact.items():
        kind = name.removesuffix(".weight").split(".")[-1]
        error = (found[name] - value).norm() / value.norm()
        errors[kind] = max(errors.get(kind, 0), error.nan_to_num(torch.inf).item())
    return errors


@on_gpu
@pytest.mark.parametrize(
    "packed, dtype, options",
    [
        (False, torch.float32, {}),
        (False, torch.bfloat16, {}),
        (True, torch.bfloat16, {"activation_checkpointing": True}),
        (True, torch.bfloat16, {"activation_checkpointing": True, "compile": True}),
    ],
)
def test_the_loss_equals_the_cpus(tiny_model, packed, dtype, options):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    exact = compute(tiny_model, packed, "cpu", torch.float32)
    errors = relative_errors(compute(tiny_model, packed, "cuda", dtype, **options), exact)
    assert errors.pop("loss") < tolerance and max(errors.values()) < 5 * tolerance, errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, MISSING])])
def test_packed_gradients_are_as_exact_as_padded_ones(tmp_path, device):
    """In bf16 and for each kind of weight, beside padded examples in fp32 on a CPU."""
    heads, lengths = (16, (2000, 31, 1200, 5, 700, 90)) if device == "cuda" else (2, (300, 31, 5))
    config = Qwen3Config(
        vocab_size=320, hidden_size=64 * heads, intermediate_size=192 * heads, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    exact = compute(tmp_path, False, "cpu", torch.float32, lengths)
    errors = {
        name: relative_errors(compute(tmp_path, packed, device, torch.bfloat16, lengths), exact)
        for name, packed in (("errors of packed examples", True), ("of padded ones", False))
    }
    print(json.dumps(errors))  # The page of a GPU shows them.
    packed, padded = errors.values()
    assert {"embed_tokens", "q_proj", "k_norm", "down_proj", "norm", "lm_head"} < packed.keys()
    assert max(padded.values()) < 0.05, errors
    assert all(error < 2 * padded[kind] + 1e-3 for kind, error in packed.items()), errors


@on_gpu
def test_nccl_sums_agreement_and_timeouts():
    script = """
import torch
from zerotrain.runtime.process_group import apply_timeout, process_group

with process_group(timeout_seconds=60) as ranks:
    assert ranks.device.type == "cuda" and torch.distributed.get_backend() == "nccl"
    third = torch.tensor(1 / 3, dtype=torch.float64, device=ranks.device)
    assert ranks.sum(third).item() == 1 / 3
    assert ranks.count(True, False) == [1, 0]
    assert ranks.run_on_first(lambda: "said") == "said"
    apply_timeout(30, ranks)
print("ALL WELL")
"""
    env = {k: v for k, v in environment().items() if k != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert "ALL WELL" in done.stdout, done.stdout + done.stderr
