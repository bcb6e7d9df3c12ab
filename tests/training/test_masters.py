"""The master weights of runs in 16 bits begin within rounding of the 16-bit weights.
pytest tests/training/test_masters.py
"""

import re
from dataclasses import replace

import pytest
import torch
from deepspeed.checkpoint.affine import ParamAffineMap
from harness.inputs import SMALL_SIZES, strategy
from harness.runs import checkpoints, read_metrics
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_utils import load_state_dict

from zerotrain.checkpoint.masters import CHUNK, points_in_cells, random_positions
from zerotrain.checkpoint.zero_state import piece_of_whole
from zerotrain.model.architecture import auto_class, is_multimodal, meta_model
from zerotrain.model.hub import weight_files
from zerotrain.model.stored import fp32_weights
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.ranks import Ranks
from zerotrain.tools.saved import shards_of_rank, whole_weight
from zerotrain.tools.small_config import small_config

SEED = 7
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_points_are_everywhere_in_the_cell_and_round_to_the_value(dtype):
    """Of every 16-bit number: normal, subnormal, powers of two, zeros, the largest, infinite."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype).float()
    index = range(len(values))
    for key in map(str, range(20)):
        points = points_in_cells(values, None, index, key, dtype)
        is_number = ~values.isnan()
        assert torch.equal(points.to(dtype).view(torch.int16)[is_number], bits[is_number])
        assert (points != values)[values.isfinite()].float().mean() > 0.99
    values = torch.full((100_000,), 0.1).to(dtype).float()
    points = points_in_cells(values, None, range(100_000), "key", dtype)
    offsets = (points - values) / (torch.finfo(dtype).eps / 16)  # in the distance of neighbors
    assert offsets.histc(10, -0.5, 0.5).sub(10_000).abs().max() < 500
    assert abs(offsets[1:] @ offsets[:-1]) / 100_000 < 1e-3
    some = torch.arange(40, 100_000, 7)  # as a tensor-parallel rank asks for them
    assert torch.equal(points[some], points_in_cells(values[some], None, some, "key", dtype))


INDICES = (0, 1, 2**17 - 1, 2**17, 2**22, 2**32 - 1, 2**32, 2**33 + 5)
POSITIONS = {
    "7 a": (0xDE4499, 0x613603, 0x0503E1, 0xAB014D, 0x74BE5B, 0x5A5734, 0x7D3934, 0xEA31F5),
    "7 b": (0x5EFDE0, 0x5EB82D, 0x9F4114, 0xE02D10, 0x9DA957, 0x464164, 0x640811, 0xC97C54),
}
"""Key -> random positions at INDICES, times 2^24."""
SUMS_OF_BITS = {torch.bfloat16: 1_337_929_105_910, torch.float16: 1_337_928_266_952}
"""The sum of the bits of 20,000 points, as integers."""


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_key_gives_the_same_positions_on_each_device(device):
    for key, expected in POSITIONS.items():
        found = random_positions(key, torch.tensor(INDICES, device=device), device).tolist()
        assert [position * 2**24 for position in found] == [*expected]
        for index, position in zip(INDICES, expected, strict=True):
            # A chunk that begins before the index, perhaps in front of another upper word.
            chunk = range(max(0, index - 3), index + 2)
            at = chunk.index(index)
            assert random_positions(key, chunk, device)[at].item() * 2**24 == position
    for dtype, expected in SUMS_OF_BITS.items():
        values = torch.arange(-10_000, 10_000, device=device).div(7).to(dtype).float()
        points = points_in_cells(values, None, range(20_000), "7 a", dtype)
        assert points.view(torch.int32).long().sum().item() == expected


def test_no_rows_columns_chunks_or_parameters_have_related_positions():
    """A table of 8 chunks, as of a matrix with 4,096 columns."""
    chunk = CHUNK["cpu"]
    whole = random_positions("1 w", range(8 * chunk), "cpu")
    pairs = {lag: (whole[lag:], whole[:-lag]) for lag in (1, 2, 256, 4096, chunk, 4 * chunk)}
    other = random_positions("1 v", range(8 * chunk), "cpu")
    beyond = random_positions("1 w", range(2**32, 2**32 + 8 * chunk), "cpu")
    for lag, (one, two) in (pairs | {"key": (whole, other), "word": (whole, beyond)}).items():
        cells = (one * 64).int() * 64 + (two * 64).int()
        expected = len(one) / 4096
        squares = (cells.bincount(minlength=4096) - expected).square().sum() / expected
        assert abs(squares - 4095) < 6 * (2 * 4095) ** 0.5, lag


CONVERTED = [
    "mixtral", "qwen3_moe", "phimoe", "nemotron_h", "olmo_hybrid", "lara_mini", "gpt_neox",
    "granitemoe", "qwen3_5", "gemma3",
]  # fmt: skip
"""Types of which transformers renames, stacks, joins or splits tensors of the files."""


@pytest.mark.parametrize("kind", CONVERTED)
def test_fp32_files_have_the_numbers_of_each_parameter(tmp_path, kind):
    """A folder of Qwen3.5 has a vision tower too, and is read as a model of text."""
    shape = small_config(AutoConfig.for_model(kind))
    for part in (shape, shape.get_text_config()):
        part.vocab_size, part.pad_token_id = 320, 0
        part.bos_token_id = part.eos_token_id = 1
    torch.manual_seed(0)
    kinds = AutoModelForMultimodalLM if is_multimodal(shape) else AutoModelForCausalLM
    kinds.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    shape = AutoConfig.from_pretrained(tmp_path)
    model = auto_class(shape).from_pretrained(tmp_path, dtype=torch.float32)
    skeleton = meta_model(model.config, False)
    found = {}
    for weights in fp32_weights(skeleton, str(tmp_path)):
        found = weights | found
    named = {key for f in weight_files(str(tmp_path)) for key in load_state_dict(f, "meta")}
    assert not found.keys() <= named, "the files have other names"
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p), name
    sizes = [w for w in fp32_weights(skeleton, str(tmp_path), "meta", download=False)]
    assert {name for weights in sizes for name in weights} == found.keys()


def test_masters_of_a_mixture_begin_at_the_numbers_of_its_fp32_files(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """Its experts are fused when they are loaded. One tensor of the files is in bf16."""
    shape = MixtralConfig(**SMALL_SIZES, num_local_experts=4, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = MixtralForCausalLM(shape)
    model.model.norm.weight = torch.nn.Parameter(torch.rand(shape.hidden_size).bfloat16())
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    exact = dict(model.named_parameters())
    run = tmp_path / "run"
    config = tiny_config(
        model=folder, train__precision="bf16", train__warmup_examples=0, train__steps=1,
        train__learning_rate=1e-60, train__seed=SEED, data__eval_sources=[],
        ds_config=strategy(tmp_path, "zero3"), output_dir=str(run),
    )  # fmt: skip
    output = forks.finish(config, ranks=2).output
    assert f"in {len(exact) - 1} tensors" in output and "bf16 weights in 1" in output
    shards = shards_of_rank(checkpoints(run)[-1], 0)
    for name, p in exact.items():
        number, key = p.detach().float().flatten(), f"{SEED} {name}"
        values, index = number.bfloat16().float(), range(p.numel())
        points = points_in_cells(values, number, index, key, torch.bfloat16)
        assert torch.equal(whole_weight(shards, name).flatten(), points), name


def test_split_parameters_have_the_points_of_the_whole_ones(forks, tiny_config, tmp_path):
    """Of fused matrices, of which a rank has a slice of each part; 4 does not divide some."""
    config = tiny_config(train__seed=SEED, model__from_config=True)
    gathered = {}
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        forks.finish(config, "--output_dir", folder, ranks=size, module="split_masters")
        pieces = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
        gathered[size] = {}
        for name, (masters, record) in pieces[0].items():
            if record and size > 1:
                shards = {rank: piece[name][0] for rank, piece in enumerate(pieces)}
                masters = ParamAffineMap.from_dict(record).rebuild(shards).flatten()
            gathered[size][name] = masters
    fused = [name for name in gathered[4] if re.search("qkv_proj|gate_up_proj", name)]
    assert len(fused) == 4 and all(len(pieces[0][n][1]["ranks"][0]["pieces"]) > 1 for n in fused)
    for name, masters in gathered[1].items():
        values = masters.bfloat16().float()
        key = f"{SEED} {name}"
        expected = points_in_cells(values, None, range(len(values)), key, torch.bfloat16)
        for size in (1, 2, 4):
            assert torch.equal(gathered[size][name], expected), (size, name)


def test_a_split_without_a_record_is_refused():
    p = torch.nn.Parameter(torch.zeros(4, 4))
    ranks = Ranks(1, 1, 2, 2, torch.device("cpu"), None, None, tensor=2)
    assert piece_of_whole("w", p, ranks) is None
    p.tensor_model_parallel = True
    with pytest.raises(UserError, match=r"autotp_size: .* w; set"):
        piece_of_whole("w", p, ranks)
    assert piece_of_whole("w", p, replace(ranks, tensor=1)) is None


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
            values, index = w.flatten(), range(w.numel())
            found = points_in_cells(values, None, index, f"{SEED} {name}", dtype)
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
