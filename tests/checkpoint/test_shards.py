"""What is saved of an engine and loaded into another one.
pytest tests/checkpoint/test_shards.py"""

import json

import pytest
import torch
from harness.inputs import read_config, strategy

from zerotrain.checkpoint.save import write_shard
from zerotrain.checkpoint.shards import collect, load_start, shard_name
from zerotrain.checkpoint.start import Start
from zerotrain.checkpoint.state import Progress
from zerotrain.data.loader import load_steps
from zerotrain.runtime.process_group import ALONE, process_group
from zerotrain.training.engine import build_engine
from zerotrain.training.guard import apply_update
from zerotrain.training.setup import load_plans, open_run_on_all_ranks


@pytest.fixture(scope="module")
def one_rank():
    """The process group of this process alone, once: DeepSpeed keeps groups that were destroyed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ALONE, "GLOO_SOCKET_IFNAME": "lo"}.items():
            patch.setenv(name, value)
        with process_group() as ranks:
            yield ranks


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3"])
def test_an_engine_that_is_loaded_goes_on_as_the_one_that_was_saved(
    one_rank, tiny_config, tmp_path, name
):
    """Weights, moments and the number of updates: the next update is the same, bit for bit."""
    path = tiny_config(ds_config=strategy(tmp_path, name), train__precision="fp32")
    config = read_config(path)
    setup, tokenizer, _ = open_run_on_all_ranks(config, one_rank)
    plan, *_ = load_plans(setup, tokenizer, one_rank)
    batches = [step.micro_batches for step in load_steps(plan, 0, 0, 3)]

    def update(engine, loss, micro_batches):
        for i, batch in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            engine.backward(loss(engine, batch).cross_entropy / 100, scale_wrt_gas=False)
        apply_update(engine, clipping=config.train.gradient_clipping)

    engine, loss, _ = build_engine(setup, tokenizer, plan, one_rank)
    for micro_batches in batches[:2]:
        update(engine, loss, micro_batches)
    write_checkpoint(tmp_path / "saved", collect(engine, True, None))
    other, other_loss, _ = build_engine(setup, tokenizer, plan, one_rank)
    load_start(other, Start(plan, Progress(), tmp_path / "saved"), one_rank, None, seed=0)
    for each in ((engine, loss), (other, other_loss)):
        update(*each, batches[2])
    expected, loaded = (collect(each, True, None) for each in (engine, other))
    assert loaded.updates == expected.updates == 3
    for _, tensors in expected.parts.values():
        assert set(tensors) == {"fp32", "exp_avg", "exp_avg_sq"}
        assert all(tensor.any() for tensor in tensors.values())
    torch.testing.assert_close(loaded.parts, expected.parts, rtol=0, atol=0)
    for each in (engine, other):
        each.destroy()


def write_checkpoint(folder, shard):
    """A checkpoint with the file of one rank."""
    (folder / "shards").mkdir(parents=True)
    files = {shard_name(0): write_shard(folder / shard_name(0), vars(shard))}
    (folder / "manifest.json").write_text(json.dumps({"save_id": "x", "files": files}))
