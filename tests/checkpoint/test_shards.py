"""An engine that is saved and loaded continues bit for bit.
pytest tests/checkpoint/test_shards.py"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config, strategy
from transformers import AutoConfig, AutoModelForCausalLM

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
from zerotrain.tools.saved import checkpoint_problem
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


GATED = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.3,
}  # fmt: skip
LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "dropout": 0.2}
# ds_config, the model's type, its options, and settings of the run
FAMILIES = [
    ("zero0", "llama", {"tie_word_embeddings": True}, {}),
    ("zero1", "qwen3_moe", EXPERTS, {}),
    ("zero2", "qwen3_5_text", GATED, {}),
    ("zero3", "gemma3_text", {"sliding_window": 16}, {}),
    ("zero2", "llama", {}, {"model__lora": LORA}),
    ("zero3", "llama", {}, {"model__trainable": [r"layers\.1\.mlp", "norm"]}),
]


def save_model(folder, kind, tokenizer, **options):
    """Save a model with dropout and random weights, and return its folder."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(
        kind, **SMALL_SIZES, **options, head_dim=8, max_position_embeddings=512,
        attention_dropout=0.2, initializer_range=0.1, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name, kind, options, settings", FAMILIES)
def test_an_engine_that_is_loaded_goes_on_as_the_one_that_was_saved(
    one_rank, tiny_config, tmp_path, sample_tokenizer, name, kind, options, settings
):
    """Weights, moments, number of updates, dropout and batches: the next update is the same, bit
    for bit. The save is asynchronous, and the first engine goes on before anything is written.
    """
    path = tiny_config(
        model=save_model(tmp_path / "model", kind, sample_tokenizer, **options),
        ds_config=strategy(tmp_path, name), train__precision="fp32", **settings,
    )  # fmt: skip
    config = read_config(path)
    setup, tokenizer, _ = open_run_on_all_ranks(config, one_rank)
    plan = open_data(setup, tokenizer, one_rank)[1].plan

    def updates(engine, loss, first, last):
        for step in load_steps(plan, 0, first, last):
            update(engine, loss, step.micro_batches)

    def update(engine, loss, micro_batches):
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = 0.01
        for i, batch in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            engine.backward(sum(loss(engine, batch)) / 100, scale_wrt_gas=False)
        apply_update(engine, clipping=config.train.gradient_clipping)

    engine, loss, base = build_engine(setup, tokenizer, plan, one_rank)
    updates(engine, loss, 0, 2)
    threads, may_write = ThreadPoolExecutor(1), threading.Event()
    threads.submit(may_write.wait)
    saver = Saver(
        engine, base, tokenizer, RunIdentity.of(setup, plan, {}), CheckpointConfig(async_save=True),
        one_rank, RunLock(tmp_path), None, print, _threads=threads,
    )  # fmt: skip
    saver.save(Progress(step=2))
    updates(engine, loss, 2, 3)
    expected = collect(engine, True, base)
    may_write.set()
    saver.finish()
    [saved] = list_complete(saver.folder)
    other, other_loss, _ = build_engine(setup, tokenizer, plan, one_rank)
    load_start(other, Start(plan, Progress(), saved), one_rank, base, seed=0)
    updates(other, other_loss, 2, 3)
    loaded = collect(other, True, base)
    assert torch.equal(loaded.rng["torch"], expected.rng["torch"])
    assert loaded.updates == expected.updates == 3
    for _, tensors in expected.parts.values():
        assert set(tensors) == {"fp32", "exp_avg", "exp_avg_sq"}
        assert all(tensor.any() for tensor in tensors.values())
    torch.testing.assert_close(loaded.parts, expected.parts, rtol=0, atol=0)
    for each in (engine, other):
        each.destroy()


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_whose_folder_is_removed_meanwhile_is_made_again(
    one_rank, tiny_config, tmp_path, monkeypatch, async_save
):
    monkeypatch.setattr("zerotrain.checkpoint.lock.OUT_OF_REACH_SECONDS", 0)
    setup, tokenizer, _ = open_run_on_all_ranks(read_config(tiny_config()), one_rank)
    plan = open_data(setup, tokenizer, one_rank)[1].plan
    engine, _, base = build_engine(setup, tokenizer, plan, one_rank)
    folder, logged = tmp_path / "run", []

    class Removes(ThreadPoolExecutor):
        """The first save loses its folder."""

        def submit(self, work, path, *args):
            if not logged:
                logged.append("removed")
                shutil.rmtree(folder)
            return super().submit(work, path, *args)

    lock = RunLock(folder)
    with lock:
        saver = Saver(
            engine, base, tokenizer, RunIdentity.of(setup, plan, {}),
            CheckpointConfig(async_save=async_save), one_rank, lock, None,
            lambda kind, values: logged.append(values["step"]), _threads=Removes(),
        )  # fmt: skip
        saver.save(Progress(step=2))
        assert saver.finish() == async_save
        if async_save:
            saver.save(Progress(step=3))
            assert not saver.finish()
    [saved] = list_complete(saver.folder)
    assert checkpoint_problem(saved) is None and logged == ["removed", 2 + async_save]
