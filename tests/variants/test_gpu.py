"""Tests that need a GPU.    pytest -m gpu tests/variants/test_gpu.py"""

import subprocess
import sys

import pytest
import torch
from harness.batches import micro_batch
from harness.processes import environment, run
from harness.repository import REPO
from transformers import AutoModelForCausalLM

from zerotrain.config.schema import ModelConfig
from zerotrain.model.packing import PACKED_EXAMPLES
from zerotrain.runtime.seeding import rng_state, seed_everything, set_rng_state
from zerotrain.training.engine import change_blocks
from zerotrain.training.loss import SupervisedLoss


def on_gpu(test):
    missing = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a GPU")(test))


def test_gpu_tests_need_no_other_packages():
    script = """
import sys
import pytest
sys.modules |= dict.fromkeys(["copier", "kubeflow_trainer_api", "matplotlib", "plotly", "wandb"])
sys.exit(pytest.main(["-qq", "-m", "gpu", "-n", "0", "--collect-only"]))
"""
    done = run([sys.executable, "-c", script])
    assert done.code == 0 and "variants/test_gpu.py: 6" in done.output, done.output


@on_gpu
def test_random_numbers_continue_on_the_gpu(tmp_path):
    torch.cuda.set_device(0)  # as in a run
    seed_everything(3)
    torch.save(rng_state(), tmp_path / "rng.pt")
    first = torch.rand(9, device="cuda")
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(9, device="cuda"), first)


def loss_and_gradient(folder, packed, device, dtype, **options):
    """Return the loss of a micro-batch, with changed blocks, and all gradients."""
    attention = PACKED_EXAMPLES if packed else None
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).to(device)
    change_blocks(model.train(), ModelConfig("x", **options), 0)
    batch = micro_batch(packed)
    batch = batch.each(torch.Tensor.pin_memory) if device == "cuda" else batch
    supervised = SupervisedLoss(model)
    is_cuda = device == "cuda"
    if is_cuda and packed and not options.get("compile"):
        torch.cuda.set_sync_debug_mode("error")  # A micro-step waits for no value of the GPU.
    loss = supervised(model, batch).cross_entropy
    loss.backward()
    if is_cuda:
        torch.cuda.set_sync_debug_mode("default")
    return loss.item(), torch.cat([p.grad.float().cpu().flatten() for p in model.parameters()])


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
    value, gradient = loss_and_gradient(tiny_model, packed, "cuda", dtype, **options)
    exact, exact_gradient = loss_and_gradient(tiny_model, packed, "cpu", torch.float32)
    assert value == pytest.approx(exact, rel=tolerance)
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < 5 * tolerance


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
