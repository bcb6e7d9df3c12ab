"""Activation checkpointing, tiled MLPs and torch.compile change no loss.

pytest tests/test_blocks.py
"""

import copy
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config
from conftest import read_metrics, strategy
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from config.parse import parse_command_line
from config.schema import LoraConfig, ModelConfig
from data.loader import MicroBatch
from model.blocks import change_blocks, check_blocks
from model.loss import SupervisedLoss
from model.trained import choose_trained
from runtime.errors import UserError

torch.set_num_threads(1)  # for models this small, threads cost more than they save

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0,
                       embd_pdrop=0, resid_pdrop=0, bos_token_id=1, eos_token_id=2),
}  # fmt: skip
OPTIONS = {
    "checkpointing": ModelConfig("x", activation_checkpointing=True),
    "checkpointing on the CPU": ModelConfig("x", activation_checkpointing="cpu"),
    "tiled": ModelConfig("x", tiled_mlp=3),
    "tiled, more tiles than tokens": ModelConfig("x", tiled_mlp=100),
    "tiled, checkpointing on the CPU": ModelConfig(
        "x", tiled_mlp=3, activation_checkpointing="cpu"
    ),
}


def loss_of(model):
    """A loss, with its backward pass: (value, gradients)."""
    ids = torch.randint(1, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)  # for dropout
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_loss(architecture, options):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(architecture).train()
    changed = copy.deepcopy(plain)
    change_blocks(changed, options)
    (value, gradients), (expected, exact) = loss_of(changed), loss_of(plain)
    assert value == pytest.approx(expected, rel=1e-6)
    for n, gradient in gradients.items():
        assert (gradient - exact[n]).norm() < 1e-6 * exact[n].norm() + 1e-8, n
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids, use_cache=False).logits for model in (changed, plain)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_stay_the_same(name, options):
    assert_same_loss(ARCHITECTURES[name], OPTIONS[options])


@pytest.mark.parametrize("kept", [True, "cpu"])
def test_dropout_is_the_same_when_it_is_computed_again(kept):
    dropout = GPT2Config(**{**ARCHITECTURES["gpt2"].to_dict(), "resid_pdrop": 0.3})
    assert_same_loss(dropout, ModelConfig("x", activation_checkpointing=kept))


def test_only_block_inputs_are_kept_and_with_cpu_only_their_copies():
    kept = {}
    for checkpointing in (False, True, "cpu"):
        model = LlamaForCausalLM(ARCHITECTURES["llama"]).train()
        change_blocks(model, ModelConfig("x", activation_checkpointing=checkpointing))
        inputs = []

        def note(_, args, inputs=inputs):
            inputs.append(StorageWeakRef(args[0].untyped_storage()))

        for module in (model.model.layers[1], model.model.layers[0].mlp.down_proj):
            module.register_forward_pre_hook(note)
        logits = model(input_ids=torch.arange(3, 14)[None], use_cache=False).logits
        inside, between = inputs  # in the order of the forward pass
        kept[checkpointing] = (not between.expired(), not inside.expired())
        del logits
    assert kept == {False: (True, True), True: (True, False), "cpu": (False, False)}


def test_tiling_keeps_one_tile_of_inner_activations():
    most = {}
    for tiles in (0, 4):
        model = LlamaForCausalLM(ARCHITECTURES["llama"]).train()
        change_blocks(model, ModelConfig("x", tiled_mlp=tiles))
        sizes = []
        model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda _, args, sizes=sizes: sizes.append(args[0].shape[-2])
        )
        model(input_ids=torch.arange(3, 43)[None], use_cache=False).logits.sum().backward()
        most[tiles] = sizes
    assert most == {0: [40], 4: [10] * 8}, "once in each pass"


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_blocks_give_the_same_loss():
    one_layer = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    assert_same_loss(one_layer, ModelConfig("x", compile=True, activation_checkpointing=True))


@pytest.mark.parametrize("adapters, depths", [(False, (2, 3)), (True, (2,))])
def test_experts_are_compiled_once_for_all_layers_and_numbers_of_tokens(
    monkeypatch, adapters, depths
):
    """Whichever experts the tokens choose: a few graphs, for several examples and for one. Those
    with adapters are left out.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graphs = {}
    for layers in depths:
        sizes = {**SIZES, "num_hidden_layers": layers, "initializer_range": 0.2}
        torch.manual_seed(0)
        plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=6, num_experts_per_tok=2))
        if adapters:
            names = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
            choose_trained(plain, ModelConfig("x", lora=LoraConfig(target_parameters=names)))
        compiled = copy.deepcopy(plain)
        change_blocks(compiled, ModelConfig("x", compile=True))
        torch.compiler.reset()
        counters.clear()
        found = []
        for model in (plain, compiled):
            loss, values, graphs[layers] = SupervisedLoss(model), [], []
            for examples, length in ((3, 4), (1, 2), (2, 9), (1, 30)):
                ids = np.arange(examples * length).reshape(examples, length) * 7 % 64
                batch = MicroBatch.of(ids, ids > 5, attention_mask=np.ones_like(ids))
                values.append(loss(model, batch).cross_entropy)
                graphs[layers].append(counters["stats"]["unique_graphs"])
            sum(values).backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            counts = [m.expert_counts for m in model.modules() if hasattr(m, "expert_counts")]
            found.append((torch.stack(values), gradients, torch.stack(counts)))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        assert sum(counts).sum() == layers * 2 * (12 + 2 + 18 + 30)
    assert len({tuple(of_one) for of_one in graphs.values()}) == 1, graphs
    assert 0 < graphs[2][1] == graphs[2][-1] <= 8, graphs


REFUSED = {
    "MixtralDecoderLayer has experts, which cannot be tiled": (
        MixtralConfig(**SIZES, num_local_experts=4), {"tiled_mlp": 2}),
    "OPTDecoderLayer has no MLP that is a module of its own": (
        OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
                  num_attention_heads=4, word_embed_proj_dim=32), {"tiled_mlp": 2}),
    "BloomBlock has no MLP that is a module of its own": (
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), {"tiled_mlp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("problem", REFUSED)
def test_an_mlp_that_cannot_be_tiled_is_refused(problem, tiny_config):
    config = parse_command_line(["--config", str(tiny_config())]).config
    architecture, options = REFUSED[problem]
    config = replace(config, model=replace(config.model, **options))
    with pytest.raises(UserError, match=problem) as refused:
        check_blocks(config, architecture, CPU)
    assert str(refused.value).startswith("model.tiled_mlp: ")


def test_a_compiler_that_does_not_work_is_one_line(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(tmp_path / "no_compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    config = parse_command_line(["--config", str(tiny_config(model__compile=True))]).config
    with pytest.raises(UserError) as refused:
        check_blocks(config, ARCHITECTURES["llama"], CPU)
    problem = str(refused.value)
    assert problem.startswith("model.compile: torch.compile does not work here: ")
    assert "no_compiler" in problem and "\n" not in problem


def numbers(run_folder):
    """Losses, norms and evaluation losses of a run."""
    steps, evaluations = read_metrics(run_folder), read_metrics(run_folder, "eval")
    found = [step[key] for key in ("loss", "grad_norm") for step in steps]
    return np.array(found + [line["eval_loss"] for line in evaluations])


@pytest.fixture(scope="module")
def plain():
    """The numbers of the run without any option, once."""
    return {}


ALL = {"model__tiled_mlp": 3, "model__activation_checkpointing": "cpu"}
RUNS = {
    "stage 0": (0, 2, ALL),
    "stage 1": (1, 2, ALL),
    "stage 2": (2, 2, ALL),
    "stage 3": (3, 2, ALL),
    "stage 3, compiled": (3, 1, {"model__activation_checkpointing": "cpu", "model__compile": True}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_stays_the_same_under_zero(forks, tiny_config, tmp_path, plain, name):
    def run(stage, ranks, folder, options):
        config = tiny_config(
            ds_config=str(strategy(tmp_path, f"zero{stage}")), output_dir=str(tmp_path / folder),
            data__micro_batch_tokens=300, train__epochs=None, train__steps=3, **options,
        )  # fmt: skip
        finished = forks.train(config, ranks=ranks, module="changed_blocks")
        assert finished.code == 0, finished.output
        return numbers(tmp_path / folder)

    stage, ranks, options = RUNS[name]
    if not plain:
        plain["run"] = run(1, 2, "plain", {})
    np.testing.assert_allclose(run(stage, ranks, "run", options), plain["run"], rtol=1e-6)


def test_frozen_layers_below_an_mlp_leave_its_gradients(forks, tiny_config, tmp_path):
    """The input of the first MLP then needs no gradient, but ZeRO 3 reduces those of its weights
    when that gradient is there.
    """
    found = {}
    for stage, options in ((0, {}), (3, {"model__tiled_mlp": 3})):
        config = tiny_config(
            ds_config=str(strategy(tmp_path, f"zero{stage}")), train__epochs=None, train__steps=2,
            output_dir=str(tmp_path / f"run_{stage}"), **options,
        )  # fmt: skip
        finished = forks.train(config, ranks=2, module="changed_blocks", EXCEPT_MLPS="1")
        assert finished.code == 0, finished.output
        found[stage] = numbers(tmp_path / f"run_{stage}")
    np.testing.assert_allclose(found[3], found[0], rtol=1e-6)
