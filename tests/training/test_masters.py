"""The master weights of runs in 16 bits begin within rounding of the 16-bit weights.
pytest tests/training/test_masters.py
"""

import numpy as np
import pytest
import torch
from harness.inputs import strategy
from harness.runs import checkpoints, read_metrics
from transformers import AutoModelForCausalLM

from zerotrain.checkpoint.masters import points_in_cells
from zerotrain.tools.saved import shards_of_rank, whole_weight

SEED = 7
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_points_are_everywhere_in_the_cell_and_round_to_the_value(dtype):
    """Of every 16-bit number: normal, subnormal, powers of two, zeros, the largest, infinite."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype).float()
    index = np.arange(len(values))
    for key in map(str, range(20)):
        points = points_in_cells(values, values, index, key, dtype)
        is_number = ~values.isnan()
        assert torch.equal(points.to(dtype).view(torch.int16)[is_number], bits[is_number])
        assert (points != values)[values.isfinite()].float().mean() > 0.99
    values = torch.full((100_000,), 0.1).to(dtype).float()
    points = points_in_cells(values, values, np.arange(100_000), "key", dtype)
    offsets = (points - values) / (torch.finfo(dtype).eps / 16)  # in the distance of neighbors
    assert offsets.histc(10, -0.5, 0.5).sub(10_000).abs().max() < 500
    assert abs(offsets[1:] @ offsets[:-1]) / 100_000 < 1e-3
    some = np.arange(40, 100_000, 7)  # as another rank asks for them
    values = values[some]
    assert torch.equal(points[some], points_in_cells(values, values, some, "key", dtype))


def test_masters_begin_within_rounding_the_same_in_every_layout(
    forks, tiny_config, tmp_path, sample_tokenizer, tiny_model
):
    exact = AutoModelForCausalLM.from_pretrained(tiny_model)
    in_file = dict(exact.named_parameters())
    weight = in_file["model.layers.0.mlp.up_proj.weight"]
    weight.data[0, :6] = torch.tensor([0.0, -0.0, 2.0**-7, -0.25, 1e-39, -6e-6])
    exact.save_pretrained(tmp_path / "fp32")
    exact = {name: p.detach().clone() for name, p in in_file.items()}
    for name, dtype in DTYPES.items():
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=dtype)
        half.save_pretrained(tmp_path / name)
    for name in ("fp32", *DTYPES):
        sample_tokenizer.save_pretrained(tmp_path / name)
    config = tiny_config(
        model=tmp_path / "bf16", train__precision="bf16", train__warmup_examples=0,
        train__learning_rate=1e-60, train__steps=1, train__seed=SEED, data__eval_sources=[],
    )  # fmt: skip
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    patches = {f"{accelerator}.is_fp16_supported": "lambda self: True"}  # torch computes in it
    losses = set()

    def check(expected, name, *flags, ds_config="zero2", ranks=1):
        folder = tmp_path / name
        flags = "--output_dir", folder, "--ds_config", strategy(tmp_path, ds_config), *flags
        output = forks.finish(config, *flags, ranks=ranks, patches=patches).output
        shards = shards_of_rank(checkpoints(folder)[-1], 0)
        for name, weights in expected.items():
            assert torch.equal(whole_weight(shards, name), weights), (folder.name, name)
        losses.add(read_metrics(folder)[0]["loss"])
        return output

    def within_rounding(loaded, dtype):
        points = {}
        for name, w in loaded.items():
            values, index = w.flatten(), np.arange(w.numel())
            found = points_in_cells(values, values, index, f"{SEED} {name}", dtype)
            points[name] = found.view_as(w)
        return points

    loaded = {name: w.to(torch.bfloat16).float() for name, w in exact.items()}
    points = within_rounding(loaded, torch.bfloat16)
    assert "at the bf16 weights" in check(loaded, "loaded", "--train.masters", "loaded")
    assert "at random points" in check(points, "spread")
    assert len(losses) == 1, "the first loss does not move"
    layouts = [("zero0", 2), ("zero1", 3), ("zero3", 2), ("zero2_offload", 2), ("zero3_offload", 3),
               ("zero1_autotp", 2), ("zero3_autotp", 4)]  # fmt: skip
    for ds_config, ranks in layouts:
        check(points, f"{ds_config}_{ranks}", ds_config=ds_config, ranks=ranks)
    start = checkpoints(tmp_path / "spread")[-1]
    weights_only = "--checkpoint.resume", start, "--checkpoint.weights_only", "true"
    output = check(points, "weights_only", *weights_only, "--train.seed", "8")
    assert "masters begin" not in output
    # Numbers of the file that are also bf16 numbers are spread, others stay.
    finer = {name: w.where(w != loaded[name], points[name]) for name, w in exact.items()}
    fp32 = "--model.name_or_path", tmp_path / "fp32"
    assert "fp32 files" in check(finer, "fp32_files", *fp32, ds_config="zero3", ranks=2)
    losses.clear()
    loaded = {name: w.to(torch.float16).float() for name, w in exact.items()}
    points = within_rounding(loaded, torch.float16)
    fp16 = "--model.name_or_path", tmp_path / "fp16", "--train.precision", "fp16"
    check(loaded, "fp16_loaded", *fp16, "--train.masters", "loaded")
    for ds_config, ranks in (("zero1", 2), ("zero3_offload", 3)):
        check(points, f"fp16_{ds_config}", *fp16, ds_config=ds_config, ranks=ranks)
    assert max(losses) - min(losses) < 1e-4
