"""Packed examples equal the same examples alone.    pytest tests/test_packing.py"""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import read_metrics, strategy, write_rows
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from config.parse import parse_command_line
from config.schema import DataConfig
from data.loader import collate
from data.plan import Budget, plan_step
from data.tokenize import open_cache, tokenize_sources
from model import packed_attention
from model.architecture import linear_cost
from model.loss import SupervisedLoss
from model.packed_attention import PACKED_EXAMPLES, Bounds
from model.packing import resolve_batching
from model.probes import check_causal, check_packing
from runtime.errors import UserError

torch.set_num_threads(1)  # for models this small, threads cost more than they save

CPU = torch.device("cpu")
SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
FAMILIES = {
    "llama, grouped heads": LlamaConfig(**SIZES),
    "qwen2, sliding window": Qwen2Config(**SIZES, **MIXED, use_sliding_window=True),
    "qwen3": Qwen3Config(**SIZES),
    "mistral, sliding window": MistralConfig(**SIZES, sliding_window=5),
    "phi3": Phi3Config(**SIZES),
    "gemma2, soft caps, sliding window": Gemma2Config(**SIZES, **MIXED, attn_logit_softcapping=2.0),
    "gemma3, sliding window": Gemma3TextConfig(**SIZES, **MIXED),
    "gpt_oss, sinks, sliding window": GptOssConfig(**SIZES, **MIXED, **EXPERTS),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "deepseek_v3, two head sizes": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=2,
    ),
    "gpt2": GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=256,
                       **NO_DROPOUT),
    "opt": OPTConfig(vocab_size=320, hidden_size=32, ffn_dim=48, num_hidden_layers=2, dropout=0.0,
                     num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=32),
}  # fmt: skip


def models(name, **options):
    """The same random weights with the model's own attention and with ours."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name]))
    for parameter in own.parameters():  # far from uniform attention
        torch.nn.init.normal_(parameter, std=0.1)
    ours = AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[name]), attn_implementation=PACKED_EXAMPLES
    )
    ours.load_state_dict(own.state_dict())
    return own, ours


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_examples_equal_each_alone(name, checkpointing):
    """Logits and gradients in fp32, with the windows shorter than the examples."""
    own, ours = models(name)
    lengths = [12, 7, 1, 15]
    ids = torch.randint(3, 320, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    packed = ours(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    alone = [own(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    alone = torch.cat(alone, 1)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    for logits in (packed, alone):
        (logits * weights).sum().backward()
    assert (packed - alone).abs().max() < 1e-6 * alone.abs().max()
    expected = dict(own.named_parameters())
    largest = max(p.grad.abs().max() for p in own.parameters() if p.grad is not None)
    for parameter_name, parameter in ours.named_parameters():
        if expected[parameter_name].grad is not None:  # some experts may have no token
            difference = (parameter.grad - expected[parameter_name].grad).abs().max()
            assert difference < 1e-6 * largest, parameter_name
    check_causal(ours, range(3, 320), CPU)
    check_packing(ours, range(3, 320), CPU)
    assert ours.config._attn_implementation == PACKED_EXAMPLES


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_generation_are_those_of_the_model_itself(name):
    own, ours = models(name)
    ids = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 9:] = 0, 0
    logits = [model.eval()(input_ids=ids, attention_mask=mask).logits for model in (own, ours)]
    torch.testing.assert_close(logits[1][mask == 1], logits[0][mask == 1], rtol=1e-5, atol=1e-6)
    left = {"input_ids": ids[:1], "attention_mask": mask[:1]}
    texts = [m.generate(**left, max_new_tokens=6, do_sample=False) for m in (own, ours)]
    assert torch.equal(*texts) and texts[0].shape == (1, 18)


def test_bounds_are_where_positions_do_not_count_on():
    bounds = Bounds.of(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert bounds.lengths == [3, 1, 2] and bounds.offsets.tolist() == [0, 3, 4, 6]
    assert bounds.offsets.dtype == torch.int32
    assert Bounds.of(torch.arange(5, 9).expand(3, -1)).lengths == [4]  # as after a prefix
    with pytest.raises(ValueError, match="concatenated into one sequence"):
        Bounds.of(torch.tensor([[0, 1, 0], [0, 1, 2]]))


@pytest.fixture(scope="module")
def rows(tmp_path_factory, sample_tokenizer, chat_rows):
    folder = tmp_path_factory.mktemp("rows")
    file = write_rows(folder / "rows.jsonl", chat_rows[:24])
    config = DataConfig(train_sources=[str(file)], cache_dir=str(folder / "cache"), max_length=128)
    return open_cache(tokenize_sources(config.sources("train_sources"), sample_tokenizer, config))


@pytest.mark.parametrize("name", ["llama, grouped heads", "gemma2, soft caps, sliding window"])
def test_packed_and_bucketed_give_the_same_loss_and_gradients(name, rows):
    """The same step of 24 examples, assigned to two ranks both ways."""
    results = []
    for model, packed in zip(models(name), (False, True), strict=True):
        loss, budget = SupervisedLoss(model), Budget(2, 512, 1, linear_cost(model.config), packed)
        plan = plan_step(np.arange(len(rows)), rows.lengths, rows.supervised, budget)
        assert len(plan.micro_batches) > 1
        total = torch.zeros((), dtype=torch.float64)
        for group in (g for micro_step in plan.micro_batches for g in micro_step):
            value = loss(model, collate(rows, group, budget)).cross_entropy
            value = value / plan.supervised_tokens
            value.backward()
            total += value.detach()
        results.append((total, {n: p.grad for n, p in model.named_parameters()}))
    (expected, expected_gradients), (total, gradients) = results
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    for n, gradient in gradients.items():
        assert (gradient - expected_gradients[n]).norm() < 1e-5 * gradient.norm() + 1e-9, n


def test_an_epoch_has_the_same_losses_packed_and_bucketed(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """gpt-oss, with sinks and windows of 5 tokens, under ZeRO 3, recomputing activations; auto is
    packed.
    """
    folder = tmp_path / "model"
    FAMILIES["gpt_oss, sinks, sliding window"].save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    losses = {}
    for batching in ("auto", "bucketed"):
        run = tmp_path / batching
        config = tiny_config(
            model=folder, model__from_config=True, data__batching=batching, output_dir=str(run),
            data__micro_batch_tokens=400, model__activation_checkpointing=True,
            train__epochs=1, ds_config=str(strategy(tmp_path, "zero3")),
        )  # fmt: skip
        finished = forks.train(config, ranks=2)
        assert finished.code == 0, finished.output
        steps = read_metrics(run)
        assert all((step["padding_efficiency"] == 1) == (batching == "auto") for step in steps)
        losses[batching] = [step["loss"] for step in steps]
        losses[batching] += [evaluation["eval_loss"] for evaluation in read_metrics(run, "eval")]
    assert len(losses["auto"]) == 8
    np.testing.assert_allclose(losses["auto"], losses["bucketed"], rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# The kernel of GPUs


def documented(query, key, value, offsets, _, max_q, max_k, *, scale, window_size, enable_gqa=True):
    """What torch documents for varlen_attn: tensors [tokens, heads, head size], and how many tokens
    before and after its own one a query attends to; -1: all.
    """
    assert offsets.dtype == torch.int32 and max_q == max_k == offsets.diff().max()
    outputs = []
    for begin, end in itertools.pairwise(offsets):
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        before, after = (n if n >= 0 else 10**6 for n in window_size)
        output = torch.nn.functional.scaled_dot_product_attention(
            *(x[begin:end].transpose(0, 1) for x in (query, key, value)), scale=scale,
            attn_mask=(distance <= before) & (-distance <= after), enable_gqa=enable_gqa,
        )  # fmt: skip
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def attend(window, device, dtype, use=packed_attention.packed_attention):
    """The output of attention with two heads per key, and the gradients of its inputs."""
    position_ids = torch.cat([torch.arange(n) for n in (12, 7, 1, 150)])[None]
    generator, layer = torch.Generator().manual_seed(0), models("llama, grouped heads")[1]
    layer, options = layer.model.layers[0].self_attn, {"scaling": 0.3, "sliding_window": window}
    states = [
        torch.randn(1, heads, 170, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    if use is packed_attention.packed_attention:
        output, _ = use(layer, *states, None, position_ids=position_ids.to(device), **options)
    else:
        output = use(*states, Bounds.of(position_ids.to(device)), **options)
    output.square().sum().backward()
    return [output.detach(), *(state.grad for state in states)]


@pytest.mark.parametrize("window", [None, 5])
def test_the_varlen_kernel_gets_what_torch_documents(window, monkeypatch):
    monkeypatch.setattr(packed_attention, "varlen_attn", documented)
    found = attend(window, "cpu", torch.float32, packed_attention._varlen_attention)
    for one, other in zip(found, attend(window, "cpu", torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_torchs_own_operator_takes_the_calls(window, checkpointing):
    """Shapes and types alone: the kernel itself needs a GPU."""
    with FakeTensorMode():
        bounds = Bounds([12, 7, 1, 150], torch.empty(5, dtype=torch.int32))
        states = [
            torch.empty(1, heads, 170, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        ]

        def attention(*states):
            return packed_attention._varlen_attention(
                *states, bounds, scaling=0.3, sliding_window=window
            )

        output = (
            checkpoint(attention, *states, use_reentrant=False)
            if checkpointing
            else (attention(*states))
        )
        assert (output.shape, output.dtype) == ((1, 170, 4, 64), torch.bfloat16)
        output.square().sum().backward()
        assert all(state.grad.shape == state.shape for state in states)
        assert all(state.grad.dtype == torch.bfloat16 for state in states)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
def test_the_varlen_kernel_equals_attention_per_example(window, dtype, monkeypatch):
    calls, varlen_attn = [], packed_attention.varlen_attn
    monkeypatch.setattr(
        packed_attention, "varlen_attn", lambda *a, **k: calls.append(a) or varlen_attn(*a, **k)
    )
    found = attend(window, "cuda", dtype)
    assert len(calls) == 1
    for one, other in zip(found, attend(window, "cpu", torch.float32), strict=True):
        assert (one.cpu().float() - other).norm() < 2e-2 * other.norm()


# --------------------------------------------------------------------------------------------------
# Which models are packed


@pytest.fixture
def resolve(tiny_config):
    config = parse_command_line(["--config", str(tiny_config())]).config

    def resolve(architecture, device="cpu", precision="fp32", batching="auto", attention=None):
        """batching, attention implementation and reason"""
        asked = replace(
            config,
            data=replace(config.data, batching=batching),
            model=replace(config.model, attn_implementation=attention),
        )
        resolved, why = resolve_batching(asked, architecture, torch.device(device), precision)
        return resolved.data.batching, resolved.model.attn_implementation, why

    return resolve


def test_auto_packs_where_no_score_between_examples_is_computed(resolve, monkeypatch):
    for name, architecture in FAMILIES.items():
        packed = resolve(architecture)
        assert packed == ("packed", PACKED_EXAMPLES, "no padding, no scores between examples"), name
    monkeypatch.setattr(packed_attention, "_device_problem", lambda: None)
    dropout = LlamaConfig(**SIZES, attention_dropout=0.1)
    assert resolve(dropout)[1] == PACKED_EXAMPLES
    llama, mistral = FAMILIES["llama, grouped heads"], FAMILIES["mistral, sliding window"]
    for architecture in (llama, mistral):
        assert resolve(architecture, "cuda", "bf16")[:2] == ("packed", PACKED_EXAMPLES)
    extras = "varlen attention has no dropout, soft caps and sinks"
    without_kernel = [
        (FAMILIES["gemma2, soft caps, sliding window"], "bf16", extras),
        (FAMILIES["gpt_oss, sinks, sliding window"], "bf16", extras),
        (dropout, "bf16", extras),
        (FAMILIES["deepseek_v3, two head sizes"], "bf16", "varlen attention needs one head size"),
        (llama, "fp32", "varlen attention needs bf16 or fp16"),
    ]
    for architecture, precision, problem in without_kernel:
        batching, attention, why = resolve(architecture, "cuda", precision)
        assert (batching, attention) == ("bucketed", None) and why.startswith(problem)
    assert llama._attn_implementation is None, "the config must not remember a choice"


def test_an_attention_that_is_asked_for_stays(resolve):
    llama = FAMILIES["llama, grouped heads"]

    def asked(attention, device="cpu", **options):
        return resolve(llama, device, "bf16", attention=attention, **options)

    why = "eager computes scores between packed examples too"
    assert asked("eager") == ("bucketed", "eager", why)
    assert asked("eager", batching="packed") == ("packed", "eager", "as configured")
    for kernel in ("flash_attention_2", "flex_attention"):
        why = f"{kernel} has a kernel for packed examples"
        assert asked(kernel, "cuda") == ("packed", kernel, why)
    with pytest.raises(UserError, match="flex_attention has no backward pass on CPU"):
        asked("flex_attention")
    # from the resolved config of a run
    assert asked(PACKED_EXAMPLES)[:2] == ("packed", PACKED_EXAMPLES)
    assert asked(PACKED_EXAMPLES, batching="bucketed")[:2] == ("bucketed", None)


OTHERS = {
    "bloom": (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
              "BloomForCausalLM takes no position_ids"),
    "mamba": (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
              "MambaForCausalLM takes no position_ids"),
    "lfm2": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
             "Lfm2ForCausalLM has conv layers, which would carry over from one example into the "
             "next"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_an_architecture_that_cannot_be_packed_is_refused_by_name(name, resolve):
    architecture, problem = OTHERS[name]
    with pytest.raises(UserError, match=problem):
        resolve(architecture, batching="packed")
    batching, attention, why = resolve(architecture)
    assert (batching, attention) == ("bucketed", None) and why.startswith(problem)


FALCON = FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
DENSE = {
    "FalconForCausalLM computes its attention itself": FALCON,
    "Llama4ForCausalLM has chunked_attention": Llama4TextConfig(
        **SIZES, **EXPERTS, attention_chunk_size=8, interleave_moe_layer_step=2,
        layer_types=["chunked_attention", "full_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", DENSE)
def test_a_model_that_would_need_a_dense_mask_is_bucketed_unless_asked(problem, resolve):
    batching, attention, why = resolve(DENSE[problem])
    assert (batching, attention) == ("bucketed", None)
    assert why == f"packing needs a dense mask: {problem}"
    packed = resolve(DENSE[problem], batching="packed")
    assert packed == ("packed", None, "as configured")


LEAKY = {
    "falcon, whose masks ignore positions": FALCON,
    "roberta, whose positions begin at 2": RobertaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, is_decoder=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKY)
def test_a_model_whose_packed_examples_differ_is_refused(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LEAKY[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.train()
    with pytest.raises(UserError, match=rf"packed examples of {type(model).__name__} differ from"):
        check_packing(model, range(64), CPU)
    assert model.training
