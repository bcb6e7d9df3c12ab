"""The memory plan's arithmetic.    pytest tests/test_memory_plan.py"""

import re

import pytest
from conftest import REPO
from transformers import LlamaConfig

from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.parse import parse_command_line
from zerotrain.model.architecture import meta_model
from zerotrain.model.trained import count_trained
from zerotrain.tools.memory_plan import estimate_memory

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip


def test_what_is_frozen_is_only_its_weights(tiny_config):
    config = parse_command_line(["--config", str(tiny_config(model__lora={"r": 4}))]).config
    skeleton = meta_model(LlamaConfig(**SIZES), False)
    counts = count_trained(skeleton, config.model)
    whole, trained = counts.total, counts.trained
    assert 0 < trained < whole / 2

    def states(stage, quantized=0):
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        memory = estimate_memory(config, skeleton, counts, quantized, ds_config, 4, 4)
        return {part.name: part.size for part in memory.states}

    for stage, weights, gradients, optimizer in (
        (0, 2 * whole, 2 * trained, 12 * trained),
        (2, 2 * whole, 2 * trained / 4, 12 * trained / 4),
        (3, 2 * whole / 4, 2 * trained / 4, 12 * trained / 4),
    ):
        expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        assert {name: states(stage)[name] for name in expected} == expected
    in_4_bits = states(2, quantized=whole - trained)["weights"]
    assert in_4_bits == pytest.approx(2 * trained + (whole - trained) * 4.127 / 8)


@pytest.mark.parametrize(
    "file, gpu, gpu_share, cpu_share",
    [("zero0", 16, 0, 0), ("zero1", 8, 12, 0), ("zero2", 2, 16, 0), ("zero3", 0, 18, 0),
     ("zero2_offload", 2, 4, 18), ("zero3_offload", 0, 0, 22)],
)  # fmt: skip
def test_model_states_are_those_of_the_table(tiny_config, file, gpu, gpu_share, cpu_share):
    """Bytes per parameter on 4 ranks, in bf16, of the table in ds_configs/README.md."""
    path = tiny_config(ds_config=f"ds_configs/{file}.json")
    config = parse_command_line(["--config", str(path)]).config
    skeleton = meta_model(LlamaConfig(**SIZES), False)
    counts = count_trained(skeleton, config.model)
    parameters = counts.total
    config, _, ds_config = resolve_ds_config(config, "bf16", SIZES["hidden_size"])
    memory = estimate_memory(config, skeleton, counts, 0, ds_config, 4, 1)
    on_gpu = sum(part.size for part in memory.states if part.name != "buffers")
    assert on_gpu == parameters * (gpu + gpu_share / 4)
    assert memory.host == parameters * cpu_share / 4
    text = (REPO / "ds_configs" / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{file}.json`"))
    figures = {float(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", row.split("|")[3])}
    assert figures == {gpu, gpu_share, cpu_share} - {0}, row
