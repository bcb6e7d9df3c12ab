"""Which models are accepted: weights, causality, sizes.    pytest tests/test_model.py"""

import json

import pytest
import torch
from conftest import strategy
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    ElectraConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    RobertaConfig,
    RoFormerConfig,
    XLMConfig,
    XLNetConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from config.parse import parse_command_line
from model.architecture import check_model_fits, count_parameters, hidden_size, linear_cost
from model.load import load_model_config
from model.packing import resolve_batching
from model.probes import check_causal, ordinary_tokens
from model.weights import check_weights
from runtime.errors import UserError

torch.set_num_threads(1)
CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64}  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Weights against architecture


def save_model(folder, config=None, **options):
    """A folder with random weights of a small Llama, or of another architecture."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES)).save_pretrained(
        folder, **options
    )
    return folder


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def check(tiny_config, folder, **changes):
    config = parse_command_line(["--config", str(tiny_config(model=folder, **changes))]).config
    return check_weights(config, load_model_config(config))


EMBEDDINGS = "model.embed_tokens.weight"
NORM, HEAD, GATE = "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"
WRONG = {
    "one removed": (lambda t: t.pop(NORM), f"no weights for 1 of .*: {NORM}; they would start"),
    "renamed": (
        lambda t: t.update({NORM.replace("norm", "nrm"): t.pop(NORM)}), f"no weights for 1 .*{NORM}"
    ),
    "head of an untied model": (lambda t: t.pop(HEAD), f"no weights for 1 .*: {HEAD}"),
    "many": (
        lambda t: [t.pop(name) for name in sorted(t) if "mlp" in name],
        r"no weights for 6 of .*: model.layers.0.mlp.down_proj.weight, .* \.\.\.; they",
    ),
    "shape": (
        lambda t: t.update({GATE: t[GATE][:40].clone()}),
        rf"{GATE} has shape \[40, 32\] in its files, but \[48, 32\] in its config.json; use",
    ),
    "a layer more": (
        lambda t: t.update({GATE.replace("0", "2"): t[GATE].clone()}),
        "has 1 weights that its config.json has no place for: model.layers.2.mlp.gate_proj.weight",
    ),
    "a norm inside of the layers": (
        lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
        "no place for: model.layers.0.self_attn.q_norm.weight",
    ),
    "a bias": (lambda t: t.update({"lm_head.bias": torch.ones(64)}), "no place for: lm_head.bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_do_not_fit_are_refused_by_name(name, tiny_config, tmp_path):
    change, problem = WRONG[name]
    folder = save_model(tmp_path / "model")
    assert check(tiny_config, folder) is None
    edit_weights(folder, change)
    with pytest.raises(UserError, match=problem) as refused:
        check(tiny_config, folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_what_may_be_absent_or_left_over_is_told_apart(tiny_config, tmp_path):
    tied = save_model(tmp_path / "tied", LlamaConfig(**SIZES, tie_word_embeddings=True))
    assert HEAD not in load_file(tied / "model.safetensors")
    assert check(tiny_config, tied) is None
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.masked_bias": torch.tensor(-1e9),
    }
    edit_weights(tied, lambda t: t.update(more))
    assert check(tiny_config, tied) is None
    edit_weights(tied, lambda t: t.update({"v_head.summary.weight": torch.ones(1, 32)}))
    told = check(tiny_config, tied)
    assert told == f"{tied}: 1 weights of other parts are not used: v_head.summary.weight"
    extra = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm")}
    edit_weights(tied, lambda t: t.update(extra))
    with pytest.raises(UserError, match=r"model.layers.2.eh_proj.weight, .*model.ignore_weights"):
        check(tiny_config, tied)
    assert check(tiny_config, tied, model__ignore_weights=[r"model\.layers\.2\."]) == told


def test_a_pickled_checkpoint_and_one_in_several_files(tiny_config, tmp_path):
    folder = save_model(tmp_path / "split", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1 and check(tiny_config, folder) is None
    pickled = save_model(tmp_path / "pickled")
    tensors = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    assert check(tiny_config, pickled) is None
    del tensors[NORM]
    torch.save(tensors, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"no weights for 1 .*{NORM}"):
        check(tiny_config, pickled)


def test_a_head_of_its_own_contradicts_a_tie(tiny_config, tmp_path):
    """transformers trains that head, and under ZeRO-3 the embeddings instead."""
    folder = save_model(tmp_path / "tied", LlamaConfig(**SIZES, tie_word_embeddings=True))
    copied = edit_weights(folder, lambda t: t.update({HEAD: t[EMBEDDINGS].half().float()}))
    edit_weights(copied, lambda t: t.update({EMBEDDINGS: t[EMBEDDINGS].half()}))
    assert check(tiny_config, copied) is None, "the same in another precision"
    edit_weights(folder, lambda t: t.update({HEAD: t[HEAD] + 1}))
    problem = f"config.json ties {HEAD} to {EMBEDDINGS}, but they differ in its files; set"
    with pytest.raises(UserError, match=problem):
        check(tiny_config, folder)


def test_quantized_weights_are_refused(tiny_config, tmp_path):
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for kind in ({"quant_method": "awq", "bits": 4}, {"quant_method": "mxfp4"}):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
        with pytest.raises(UserError, match=f"quantized \\({kind['quant_method']}\\), and cannot"):
            check(tiny_config, folder)


def test_experts_that_transformers_puts_together_are_checked_too(tiny_config, tmp_path):
    """The files have a tensor per expert; the model has one for all experts."""
    folder = save_model(
        tmp_path / "model", MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )
    expert = next(n for n in load_file(folder / "model.safetensors") if "experts.3." in n)
    assert check(tiny_config, folder) is None
    edit_weights(folder, lambda t: t.pop(expert))
    problem = r"cannot be built .* missing .*: model\.layers\.\d\.mlp\.experts\."
    with pytest.raises(UserError, match=problem):
        check(tiny_config, folder)


@pytest.mark.launch
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("what", ["missing", "shape"])
def test_no_rank_trains_on_random_weights(forks, tiny_config, tmp_path, tiny_model, stage, what):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if what == "missing":
        edit_weights(folder, lambda t: t.pop(GATE))
    else:
        edit_weights(folder, lambda t: t.update({GATE: t[GATE][:60].clone()}))
    config = tiny_config(model=folder, ds_config=str(strategy(tmp_path, f"zero{stage}")))
    finished = forks.train(config, ranks=2)
    assert finished.code == 2 and len(finished.errors) == 1, finished.output
    assert GATE in finished.errors[0] and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "Traceback" not in finished.output


# --------------------------------------------------------------------------------------------------
# Causality

BERT = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 300}  # fmt: skip
CAUSAL = {
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "bert, decoder": BertConfig(**BERT, is_decoder=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
}  # fmt: skip
SEES_AHEAD = {
    "bert": BertConfig(**BERT),
    "roberta": RobertaConfig(**BERT),
    "electra": ElectraConfig(**BERT),
    "roformer": RoFormerConfig(**BERT),
    "xlnet": XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "xlm": XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=4),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CAUSAL, *SEES_AHEAD])
def test_a_model_that_sees_the_next_tokens_is_refused(name, dtype):
    torch.manual_seed(0)
    if name == "xlnet" and dtype != torch.float32:
        pytest.skip("transformers' XLNet mixes dtypes")
    architecture = (CAUSAL | SEES_AHEAD)[name]
    model = AutoModelForCausalLM.from_config(architecture, dtype=dtype).train()
    if name in CAUSAL:
        check_causal(model, range(5, 64), CPU)
    else:
        with pytest.raises(UserError, match=rf"{type(model).__name__} is not causal .*is_decoder"):
            check_causal(model, range(5, 64), CPU)
    assert model.training


def test_weights_that_give_no_number_are_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="not finite: the weights are damaged"):
        check_causal(model, range(64), CPU)


def test_probes_leave_special_tokens_out(sample_tokenizer):
    ids = ordinary_tokens(sample_tokenizer)
    assert len(ids) > 200 and not set(ids) & set(sample_tokenizer.all_special_ids)


@pytest.mark.launch
def test_an_encoder_is_refused_before_it_trains(forks, tiny_config, tmp_path, sample_tokenizer):
    """At --dry_run if its code shows it, else before the first step; also with the weights
    partitioned by ZeRO 3.
    """
    for name, flags in {"bert": ["--dry_run"], "roformer": []}.items():
        folder = tmp_path / name
        SEES_AHEAD[name].save_pretrained(folder)
        sample_tokenizer.save_pretrained(folder)
        config = tiny_config(
            model=folder, model__from_config=True, ds_config=str(strategy(tmp_path, "zero3"))
        )
        finished = forks.train(config, *flags, ranks=2)
        assert finished.code == 2 and len(finished.errors) == 1, finished.output
        assert "is not causal as it is configured" in finished.errors[0]
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --------------------------------------------------------------------------------------------------
# Families

HARD = ["gemma4", "gemma4_text", "gemma4_unified_text", "dots3_note_text", "gemma3n_text",
        "openelm", "musicgen", "mamba", "bloom", "xlnet", "deepseek_v3", "falcon_h1"]  # fmt: skip


@pytest.mark.parametrize("family", [f for f in HARD if f in CONFIG_MAPPING_NAMES])
def test_every_family_has_sizes_or_one_line(family, tiny_config, sample_tokenizer):
    """No exception but UserError, whatever attributes a config has."""
    architecture = AutoConfig.for_model(family)
    config = parse_command_line(["--config", str(tiny_config(data__max_length=64))]).config
    try:
        assert linear_cost(architecture) > 0 and hidden_size(architecture) > 0
        check_model_fits(config, architecture, sample_tokenizer)
        assert count_parameters(architecture) > 0
        _, why = resolve_batching(config, architecture, CPU, "fp32")
        assert why
    except UserError as error:
        assert family == "musicgen" and "not a causal language model" in str(error)


def test_the_cost_of_layers_that_differ_is_between_those_of_the_layers():
    text = AutoConfig.for_model("gemma4_text")
    dims = [layer.head_dim for layer in text.per_layer_config]
    assert len(set(dims)) > 1
    heads = text.num_attention_heads + text.num_key_value_heads
    attention = linear_cost(text) - 2 * text.intermediate_size
    assert 2 * heads * min(dims) < attention < 2 * heads * max(dims)


def test_masks_of_a_fixed_size_bound_packed_rows(tiny_config):
    """GPT-Neo: positions restart in each example, but masks have max_position_embeddings."""
    neo = GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=8,
                       attention_types=[[["global", "local"], 1]],
                       max_position_embeddings=512)  # fmt: skip
    packed = {"data__batching": "packed", "data__max_length": 256}

    def resolve(architecture, **changes):
        config = parse_command_line(["--config", str(tiny_config(**changes))]).config
        return resolve_batching(config, architecture, CPU, "fp32")[0].data.batching

    problem = "GPTNeoForCausalLM takes at most 512 tokens at a time, and data.micro_batch_tokens is"
    with pytest.raises(UserError, match=problem):
        resolve(neo, **packed, data__micro_batch_tokens=1024)
    assert resolve(neo, **packed, data__micro_batch_tokens=512) == "packed"
    assert resolve(neo, data__max_length=256, data__micro_batch_tokens=1024) == "bucketed"
    gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    assert resolve(gpt2, **packed, data__micro_batch_tokens=1024) == "packed"
