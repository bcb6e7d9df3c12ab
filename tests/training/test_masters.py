"""The master weights of runs in 16 bits begin within rounding of the 16-bit weights.
pytest tests/training/test_masters.py
"""

import numpy as np
import pytest
import torch
from harness.inputs import strategy
from harness.runs import checkpoints, read_metrics
from transformers import AutoModelForCausalLM

from zerotrain.checkpoint.masters import random_points
from zerotrain.tools.saved import shards_of_rank, whole_weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_points_are_everywhere_in_the_cell_and_round_to_the_value(dtype):
    """Of every 16-bit number: normal, subnormal, powers of two, zeros, the largest."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype).float()
    for seed in range(20):
        points = random_points(values, np.arange(len(values)), str(seed), dtype)
        is_number = ~values.isnan()
        assert torch.equal(points.to(dtype).view(torch.int16)[is_number], bits[is_number])
    spacing = torch.finfo(dtype).eps / 16
    values = torch.full((2, 100_000), 0.1).to(dtype).float()
    points = random_points(values[0], np.arange(10, 100_010), "seed", dtype)
    offsets = (points - values[0]) / spacing  # uniform in [-1/2, 1/2]
    assert offsets.histc(10, -0.5, 0.5).sub(10_000).abs().max() < 500
    assert abs(offsets[1:] @ offsets[:-1]) / 100_000 < 1e-3
    # The points of some elements, as another rank asks for them.
    index = np.arange(40, 100_010, 7)
    assert torch.equal(
        points[index - 10], random_points(values[0, : len(index)], index, "seed", dtype)
    )


def masters_of(forks, config, tmp_path, name, *flags, **options):
    """Return the masters of a run after a step that changes nothing, and its first loss."""
    folder = tmp_path / name
    still = "--train.learning_rate", "1e-60", "--train.epochs", "null", "--train.steps", "1"
    forks.finish(config, "--output_dir", folder, *still, *flags, **options)
    shards = shards_of_rank(checkpoints(folder)[-1], 0)
    weights = {name: whole_weight(shards, name).clone() for name in shards.first.shapes}
    return weights, read_metrics(folder)[0]["loss"]


def test_masters_begin_within_rounding_the_same_in_every_layout(
    forks, tiny_config, tmp_path, sample_tokenizer, tiny_model
):
    """The values of fp32 files, and random points in bf16 files. Those of another seed differ."""
    exact = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    model = tmp_path / "bf16"
    half = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    half.save_pretrained(model)
    sample_tokenizer.save_pretrained(model)
    config = tiny_config(model=model, train__precision="bf16", train__warmup_examples=0)
    loaded, loss = masters_of(forks, config, tmp_path, "loaded", "--train.masters", "loaded")
    assert all(torch.equal(w, half.state_dict()[name].float()) for name, w in loaded.items())
    spread, same_loss = masters_of(forks, config, tmp_path, "spread")
    assert loss == same_loss
    for name, weights in spread.items():
        assert torch.equal(weights.to(torch.bfloat16), half.state_dict()[name])
        assert (weights == loaded[name]).float().mean() < 0.01
    layouts = [("zero0", 2), ("zero1", 3), ("zero3", 2), ("zero2_offload", 2), ("zero3_offload", 3),
               ("zero1_autotp", 2)]  # fmt: skip
    for name, ranks in layouts:
        flags = "--ds_config", strategy(tmp_path, name)
        found, _ = masters_of(forks, config, tmp_path, name, *flags, ranks=ranks)
        assert all(torch.equal(found[key], spread[key]) for key in spread), name
    other, _ = masters_of(forks, config, tmp_path, "other", "--train.seed", "8")
    assert not any(torch.equal(other[key], spread[key]) for key in spread)
    of_file = "--model.name_or_path", tiny_model
    found, _ = masters_of(forks, config, tmp_path, "exact", *of_file, ranks=2)
    for name, weights in found.items():
        assert torch.equal(weights, exact[name]), name


def test_the_first_update_changes_as_many_16_bit_weights_as_it_should(
    forks, tiny_config, tmp_path, sample_tokenizer, tiny_model
):
    """AdamW's first update moves each weight by the rate. It leaves the cell with a probability of
    rate / size of the cell; from the middle of the cell it leaves only the smallest ones.
    """
    model = tmp_path / "bf16"
    half = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    half.save_pretrained(model)
    sample_tokenizer.save_pretrained(model)
    config = tiny_config(
        model=model, train__precision="bf16", train__warmup_examples=0, train__weight_decay=0
    )
    rate = 1e-5
    before = half.model.layers[0].mlp.up_proj.weight
    cell = 2.0 ** (torch.frexp(before.float()).exponent - 8)
    for masters, expected in (
        ("spread", (rate / cell).clamp(max=1).mean().item()),
        ("loaded", (rate > cell / 2).float().mean().item()),
    ):
        after, _ = masters_of(
            forks, config, tmp_path, masters, "--train.masters", masters,
            "--train.learning_rate", str(rate),
        )  # fmt: skip
        changed = after["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16) != before
        assert changed.float().mean().item() == pytest.approx(expected, rel=0.3, abs=2e-3), masters
