"""benchmarks/gpu.py at toy size on CPU, and what needs a GPU.    pytest tests/test_gpu.py"""

import json
import os
import subprocess
import sys
import time
from zipfile import ZipFile

import numpy as np
import psutil
import pytest
import torch
from conftest import REPO, environment
from transformers import AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu_checks import CHECKS, DENSE, Check, Place, attempts, compile_op
from benchmarks.wheels import closure, keep_kernels, requirements
from checkpoint.copies import TensorCopies
from config.schema import ModelConfig
from data.loader import MicroBatch
from model.blocks import change_blocks
from model.loss import SupervisedLoss
from model.packed_attention import PACKED_EXAMPLES
from runtime.errors import UserError
from runtime.seeding import rng_state, seed_everything, set_rng_state

DS_CONFIGS = sorted(path.stem for path in (REPO / "ds_configs").glob("*.json"))


def bench(*args, script="gpu.py"):
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}", *map(str, args)],
        cwd=REPO, env=environment(), capture_output=True, text=True, timeout=590,
    )  # fmt: skip


@pytest.mark.launch
@pytest.mark.timeout(900)
def test_every_check_passes_at_toy_size(tmp_path):
    done = bench("--toy", "--out", tmp_path, "--minutes", 9.5)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    checks = report["checks"]
    assert report["toy"] and set(checks) == {check.name for check in CHECKS}
    table = (tmp_path / "table.txt").read_text()
    assert all(f" {check.name} " in table for check in CHECKS) and "FAILED" not in table

    figures = {name: check["figures"] for name, check in checks.items()}
    for name in DS_CONFIGS:
        of = figures["offload" if "offload" in name else "ds_configs"]
        assert of[f"{name} bf16"]["end"] < 0.03, of
        assert of[f"{name} fp16"] == "refused, as expected"  # by the CPU, and at stage 0 everywhere
    for dense in DENSE:
        ours, theirs = figures[f"dense_{dense.shape}"], figures[f"trainer_{dense.shape}"]
        assert ours["tokens"] == theirs["tokens"] > 0, "the same examples"
        for one in (ours, theirs):
            assert (
                one["model_tflops"] > 0 and one["matmul_tflops"] > 0 and one["peak_memory_gb"] > 0
            )
    assert figures["saves"]["difference"] == 0
    assert figures["packed"]["packed"]["difference"] < 1e-5
    for of_share in figures["loss_memory"].values():
        assert of_share["chunked"] < of_share["supervised"] / 2 < of_share["all logits"]
    assert figures["lora"]["ZeRO 3"]["difference"] < 1e-5
    assert "skipped" in checks["gpu_tests"]["summary"]

    again = bench("--toy", "--out", tmp_path, "--continue")
    assert again.returncode == 0 and " ..." not in again.stdout, again.stdout


def start_and_hang(place):
    os.write(1, b"started\n")
    child = subprocess.Popen(["sleep", "600"])
    (place.folder.parent / "pid").write_text(str(child.pid))
    time.sleep(600)


def fail(place):
    os.write(1, b"before the error\n")
    raise ValueError("no memory\nat all")


def run_check(tmp_path, work, limit_seconds=60, seconds_left=60.0):
    place = Place(tmp_path, toy=True, micro_batch_tokens=64)
    check = Check(work.__name__, "", limit_seconds, work)
    running = gpu.Running(check, place, time.monotonic() + seconds_left)
    while not running.is_over:
        time.sleep(0.01)
    return running.finish()


def test_a_check_that_fails_or_hangs_is_recorded_and_leaves_nothing_running(tmp_path):
    failed = run_check(tmp_path, fail)
    assert failed["status"] == "failed" and failed["problems"] == ["ValueError: no memory"]
    assert "before the error" in failed["output_tail"]

    hung = run_check(tmp_path, start_and_hang, limit_seconds=2)
    assert hung["problems"] == ["not finished after 2 s"] and hung["output_tail"] == ["started"]
    pid = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert run_check(tmp_path, start_and_hang, seconds_left=1.0) is None, "to be run another time"


def test_bad_arguments_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "results.json").write_text(json.dumps({"toy": True, "checks": {}}))
    for args, line in (
        (["--only", "demo,dmeo"], "--only: no check is named dmeo; there are environment, demo, "),
        (["--continue"], "results.json is from a run with --toy"),
        (["--micro_batch_tokens", "100"], "--micro_batch_tokens must be at least 4,096"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), *args])
        with pytest.raises(gpu.UserError) as refused:
            gpu.main()
        assert line in str(refused.value) and "\n" not in str(refused.value)


def test_what_does_not_fit_is_tried_smaller():
    small, _, large = DENSE
    assert attempts(small, with_trainer=False) == [(24, None)]
    assert attempts(small, with_trainer=True) == [(24, 8), (24, 4), (24, 2), (24, 1)]
    assert attempts(large, with_trainer=False) == [(32, None), (24, None), (16, None)]
    assert attempts(large, with_trainer=True) == [(32, 1), (24, 1), (16, 1)]


def test_wheels_are_those_that_an_image_with_torch_lacks():
    wanted = requirements((REPO / "requirements.txt").read_text())
    pins = closure(wanted, "3.12", "x86_64", ["numpy", "pandas", "pyarrow"])
    names = {pin.partition("==")[0] for pin in pins}
    assert {"deepspeed", "transformers", "tokenizers", "datasets", "pytest", "rich"} <= names
    assert not names & {"torch", "numpy", "pyarrow", "sympy", "jinja2", "filelock"}, names
    for requirement in wanted:
        if requirement.name in names and requirement.marker is None:
            assert f"{requirement.name}{requirement.specifier}" in pins
    assert any(pin.startswith("transformers==5.23") for pin in pins)
    assert not names & {"wandb", "plotly", "grpcio", "ruff"}, "half of all bytes, and not used"


def test_of_bitsandbytes_only_the_kernels_for_one_cuda_are_kept(tmp_path):
    wheel = tmp_path / "bitsandbytes-1.whl"
    kernels = [f"bitsandbytes/libbitsandbytes_{kind}.so" for kind in ("cpu", "cuda128", "cuda130")]
    with ZipFile(wheel, "w") as file:
        for name in (*kernels, "bitsandbytes/libbitsandbytes_rocm72.so", "bitsandbytes/nn.py"):
            file.writestr(name, name)
    with pytest.raises(UserError, match="no kernels for cuda99, only for cuda128, cuda130"):
        keep_kernels(wheel, "cuda99")
    keep_kernels(wheel, "cuda130")
    with ZipFile(wheel) as file:
        assert {n: file.read(n).decode() for n in file.namelist()} == {
            n: n for n in (kernels[0], kernels[2], "bitsandbytes/nn.py")
        }
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_the_cause_of_a_failed_compilation_is_reported(monkeypatch):
    class Builder:
        def load(self):
            raise RuntimeError(
                "Error building extension 'x': [1/3] c++\nx.h:10:10: fatal error: no y"
            )

    monkeypatch.setattr("deepspeed.ops.op_builder.FusedAdamBuilder", Builder)
    assert compile_op("FusedAdamBuilder") == (None, "x.h:10:10: fatal error: no y")


# --------------------------------------------------------------------------------------------------
# On a GPU


def on_gpu(test):
    missing = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a GPU")(test))


@on_gpu
def test_copies_are_pinned_and_of_the_moment_of_the_save():
    weight = torch.randn(1000, 300, device="cuda")
    copies = TensorCopies()
    for _ in range(2):  # the second time into the same memory
        state = {"weight": weight, "the same": weight.view(-1), "bf16": [weight.bfloat16()], "n": 3}
        expected = {"weight": weight.cpu(), "bf16": state["bf16"][0].cpu()}
        planned = copies.plan(state)
        copies.make()
        weight.add_(1)  # the next update
        assert planned["weight"].is_pinned() and planned["n"] == 3
        assert torch.equal(planned["weight"], expected["weight"])
        assert torch.equal(planned["bf16"][0], expected["bf16"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_random_numbers_of_a_gpu_are_not_restored_without_one():
    state = rng_state()
    assert set_rng_state(state) and state["cuda"] is None
    first = torch.rand(9)
    assert not set_rng_state({**state, "cuda": torch.get_rng_state()})
    assert not torch.equal(torch.rand(9), first), "left alone"


@on_gpu
def test_random_numbers_continue_on_the_gpu(tmp_path):
    torch.cuda.set_device(0)  # as in a run
    seed_everything(3)
    torch.save(rng_state(), tmp_path / "rng.pt")
    first = torch.rand(9, device="cuda")
    assert set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(9, device="cuda"), first)


@on_gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_loss_is_that_of_the_cpu(tiny_model, dtype, tolerance):
    torch.manual_seed(0)
    ids = np.random.default_rng(0).integers(2, 320, (4, 60))
    is_target = (ids > 100) & (np.arange(60) > 0)
    batch = MicroBatch.of(ids, is_target, attention_mask=np.ones_like(ids))

    def loss_on(device, dtype):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).to(device)
        loss = SupervisedLoss(model)(model, batch.pin_memory().to(device)).cross_entropy
        loss.backward()
        return loss.item(), model.get_input_embeddings().weight.grad.float().cpu()

    value, gradient = loss_on("cuda", dtype)
    exact, exact_gradient = loss_on("cpu", torch.float32)
    assert value == pytest.approx(exact, rel=tolerance)
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < 5 * tolerance


BLOCKS = (
    {"activation_checkpointing": True},
    {"activation_checkpointing": "cpu"},
    {"tiled_mlp": 4},
    {"compile": True, "activation_checkpointing": True},
)


def loss_of_packed(model_folder, device, dtype, **options):
    """The loss of three packed examples with changed blocks, and a gradient."""
    lengths, rng = (40, 7, 90), np.random.default_rng(0)
    ids = rng.integers(2, 320, (1, sum(lengths)))
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    batch = MicroBatch.of(ids, (positions > 0) & (ids > 100), position_ids=positions)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation=PACKED_EXAMPLES
    ).to(device)
    change_blocks(model.train(), ModelConfig("x", **options))
    loss = SupervisedLoss(model)(model, batch.to(device)).cross_entropy
    loss.backward()
    return loss.item(), model.get_input_embeddings().weight.grad.float().cpu()


@on_gpu
@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_packed_examples_have_the_same_loss_with_changed_blocks(tiny_model, options):
    value, gradient = loss_of_packed(tiny_model, "cuda", torch.bfloat16, **options)
    exact, exact_gradient = loss_of_packed(tiny_model, "cpu", torch.float32)
    assert value == pytest.approx(exact, rel=1e-2)
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < 5e-2


@on_gpu
def test_nccl_sums_agreement_and_timeouts():
    script = """
import torch
from runtime.agreement import count_ranks, run_on_first_rank, sum_over_ranks
from runtime.process_group import apply_timeout, process_group

with process_group(timeout_seconds=60) as ranks:
    assert ranks.device.type == "cuda" and torch.distributed.get_backend() == "nccl"
    third = torch.tensor(1 / 3, dtype=torch.float64, device=ranks.device)
    assert sum_over_ranks(third).item() == 1 / 3
    assert count_ranks(ranks, True, False) == [1, 0]
    assert run_on_first_rank(ranks, lambda: "said") == "said"
    apply_timeout(30, ranks)
print("ALL WELL")
"""
    env = {k: v for k, v in environment().items() if k != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert "ALL WELL" in done.stdout, done.stdout + done.stderr
