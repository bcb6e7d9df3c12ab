"""An engine that is saved and loaded continues bit for bit.
pytest tests/checkpoint/test_shards.py"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness.inputs import read_config, strategy

from zerotrain.checkpoint.lock import RunLock
from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.checkpoint.save import Saver
from zerotrain.checkpoint.shards import collect, load_start
from zerotrain.checkpoint.start import Start
from zerotrain.checkpoint.state import Progress, RunIdentity
from zerotrain.config.schema import CheckpointConfig
from zerotrain.data.loader import load_steps
from zerotrain.runtime.process_group import process_group
from zerotrain.runtime.rank_env import rank_variables
from zerotrain.training.engine import build_engine
from zerotrain.training.guard import apply_update
from zerotrain.training.setup import open_data, open_run_on_all_ranks


@pytest.fixture(scope="module")
def one_rank():
    """The process group of this process alone, once: DeepSpeed keeps groups that were destroyed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**rank_variables({}), "GLOO_SOCKET_IFNAME": "lo"}.items():
            patch.setenv(name, value)
        with process_group() as ranks:
            yield ranks


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3"])
def test_an_engine_that_is_loaded_goes_on_as_the_one_that_was_saved(
    one_rank, tiny_config, tmp_path, name
):
    """Weights, moments and the number of updates: the next update is the same, bit for bit. The
    save is asynchronous, and the first engine goes on before anything is written.
    """
    path = tiny_config(ds_config=strategy(tmp_path, name), train__precision="fp32")
    config = read_config(path)
    setup, tokenizer, _ = open_run_on_all_ranks(config, one_rank)
    plan = open_data(setup, tokenizer, one_rank)[1].plan
    batches = [step.micro_batches for step in load_steps(plan, 0, 0, 3)]

    def update(engine, loss, micro_batches):
        for i, batch in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            engine.backward(loss(engine, batch).cross_entropy / 100, scale_wrt_gas=False)
        apply_update(engine, clipping=config.train.gradient_clipping)

    engine, loss, _ = build_engine(setup, tokenizer, plan, one_rank)
    for micro_batches in batches[:2]:
        update(engine, loss, micro_batches)
    threads, may_write = ThreadPoolExecutor(1), threading.Event()
    threads.submit(may_write.wait)
    saver = Saver(
        engine, None, tokenizer, RunIdentity.of(setup, plan), CheckpointConfig(async_save=True),
        one_rank, RunLock(tmp_path), None, print, _threads=threads,
    )  # fmt: skip
    saver.save(Progress(step=2))
    update(engine, loss, batches[2])
    may_write.set()
    saver.finish()
    [saved] = list_complete(saver.folder)
    other, other_loss, _ = build_engine(setup, tokenizer, plan, one_rank)
    load_start(other, Start(plan, Progress(), saved), one_rank, None, seed=0)
    update(other, other_loss, batches[2])
    expected, loaded = (collect(each, True, None) for each in (engine, other))
    assert loaded.updates == expected.updates == 3
    for _, tensors in expected.parts.values():
        assert set(tensors) == {"fp32", "exp_avg", "exp_avg_sq"}
        assert all(tensor.any() for tensor in tensors.values())
    torch.testing.assert_close(loaded.parts, expected.parts, rtol=0, atol=0)
    for each in (engine, other):
        each.destroy()
