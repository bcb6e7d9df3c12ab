"""Mixtures of experts: router loss, load of the experts, ranks without tokens for one.

pytest tests/test_router_loss.py
"""

import json
import shutil
from collections import defaultdict

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from conftest import read_metrics, strategy
from engine_logits import TOKENS
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from checkpoint.export import export_adapter, export_checkpoint
from checkpoint.run_folder import list_complete
from config.parse import parse_command_line
from data.data_plan import make_budget, make_plans
from model.architecture import linear_cost

pytestmark = pytest.mark.launch

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "num_experts_per_tok": 2,
         "initializer_range": 0.2, "output_router_logits": True,
         "router_aux_loss_coef": 0.3}  # fmt: skip
EXPERTS = 12
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=40, num_local_experts=EXPERTS),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=EXPERTS, head_dim=8),
    "gpt_oss": GptOssConfig(
        **SIZES, intermediate_size=40, num_local_experts=EXPERTS, head_dim=8, sliding_window=16
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sample_tokenizer):
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        config.eos_token_id = sample_tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers if name == "gpt_oss" else ():
            torch.nn.init.constant_(layer.mlp.router.bias[0], -1e3)  # no token chooses expert 0
        model.save_pretrained(made[name])
        sample_tokenizer.save_pretrained(made[name])
    return made


def chosen_experts(router_logits):
    """Tokens of each expert, int64 [layers, experts]."""
    return torch.stack([
        F.one_hot(layer.topk(2).indices, EXPERTS).sum((0, 1)) for layer in router_logits
    ])  # fmt: skip


def balance(router_logits, experts):
    """Experts x sum of (share of choices x mean probability), over the tokens of all layers: eq. 4
    to 6 of Switch Transformers, as transformers extends them to the two best experts.
    """
    probabilities = torch.cat([F.softmax(layer, -1) for layer in router_logits])
    chosen = F.one_hot(probabilities.topk(2).indices, experts).sum(1).double()
    return experts * (chosen.mean(0) * probabilities.double().mean(0)).sum()


def train_plainly(config_file, tokenizer, ranks):
    """Metrics by name, and the model; one example at a time, without padding.

    `ranks`: of each step, because the router loss is one of each rank's micro-batch.
    """
    config = parse_command_line(["--config", str(config_file)]).config
    model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    if lora := config.model.lora:
        torch.manual_seed(config.train.seed)
        modules = ATTENTION if lora.target_modules == "all-linear" else lora.target_modules
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, target_modules=modules,
            target_parameters=lora.target_parameters,
        ))  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    plans = {}
    for number in set(ranks):
        budget = make_budget(config.data, number, linear_cost(model.config))
        plans[number], _ = make_plans(config, tokenizer, budget)
    optimizer = torch.optim.AdamW(trained, lr=config.train.learning_rate, eps=1e-8,
                                  betas=config.train.adam_betas, weight_decay=0)  # fmt: skip
    metrics, without_tokens = defaultdict(list), 0
    for k, number in enumerate(ranks):
        plan = plans[number]
        step = plan.step(k)
        loss, router_loss = torch.zeros((2,), dtype=torch.float64)
        load = torch.zeros((model.config.num_hidden_layers, EXPERTS), dtype=torch.int64)
        for group in (g for micro_step in step.micro_batches for g in micro_step if len(g)):
            of_group, tokens = [], 0
            for ids, mask in zip(*plan.data.fetch(group), strict=True):
                ids = torch.from_numpy(ids.astype(np.int64))[None]
                out = model(input_ids=ids)
                wanted = torch.from_numpy(mask)[1:]
                logits, targets = out.logits[0, :-1][wanted], ids[0, 1:][wanted]
                loss = loss + F.cross_entropy(logits, targets, reduction="sum")
                of_group.append(out.router_logits)
                tokens += ids.numel()
            layers = [torch.cat(layer) for layer in zip(*of_group, strict=True)]
            router_loss = router_loss + balance(layers, EXPERTS) * tokens
            load += chosen_experts(layers)
            without_tokens += int((chosen_experts(layers) == 0).sum())
        loss, router_loss = loss / step.supervised_tokens, router_loss / step.tokens
        (loss + 0.3 * router_loss).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
        for name, value in {
            "loss": loss, "router_loss": router_loss, "grad_norm": norm,
            "expert_load_max": (load.amax(1) / load.double().mean(1)).max(),
            "experts_unused": (load == 0).sum(),
        }.items():  # fmt: skip
            metrics[name].append(value.item())
    assert without_tokens > 0, "every rank has tokens for every expert in every micro-step"
    return metrics, model


@pytest.mark.parametrize(
    "name, stage, ranks, batching, checkpointing, compiled",
    [
        ("mixtral", 0, 1, "bucketed", False, False),
        ("mixtral", 1, 2, "bucketed", False, False),
        ("qwen3_moe", 1, 2, "bucketed", False, False),
        ("gpt_oss", 1, 2, "packed", True, False),
        ("qwen3_moe", 2, 2, "bucketed", True, False),
        ("mixtral", 3, 1, "bucketed", False, True),
        ("qwen3_moe", 3, 2, "bucketed", True, False),
        ("gpt_oss", 3, 2, "bucketed", False, False),
    ],
)
def test_training_is_that_of_a_plain_loop(
    forks, folders, tiny_config, tmp_path, sample_tokenizer, name, stage, ranks, batching,
    checkpointing, compiled,
):  # fmt: skip
    config = tiny_config(
        model=folders[name], ds_config=str(strategy(tmp_path, f"zero{stage}")),
        model__activation_checkpointing=checkpointing, model__compile=compiled,
        data__batching=batching, data__micro_batch_tokens=400, data__eval_sources=None,
        train__epochs=None, train__steps=4, train__lr_schedule="constant", train__warmup_examples=0,
        train__weight_decay=0.0, train__gradient_clipping=0.0, train__global_batch_size=11,
    )  # fmt: skip
    expected, model = train_plainly(config, sample_tokenizer, [ranks] * 4)
    finished = forks.train(config, ranks=ranks, module="changed_blocks")
    assert finished.code == 0, finished.output
    steps = read_metrics(tmp_path / "run")
    for key, plain in expected.items():
        np.testing.assert_allclose([s[key] for s in steps], plain, rtol=1e-5, err_msg=key)
    assert min(expected["router_loss"]) > 1.001, "the experts should not be balanced"

    out = tmp_path / "hf"
    export_checkpoint(list_complete(tmp_path / "run" / "checkpoints")[-1], out)
    trained = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for key, parameter in model.named_parameters():
        assert (trained[key] - parameter).norm() < 2e-5 * parameter.norm(), key


ADAPTERS = {
    "qwen3_moe": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
    "gpt_oss": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
}


@pytest.mark.parametrize(
    "name, modules, legs, batching, checkpointing",
    [
        ("qwen3_moe", "all-linear", [(3, 2)], "packed", True),
        ("gpt_oss", [], [(2, 2), (3, 1)], "bucketed", False),
    ],
)
def test_adapters_of_experts_are_those_of_plain_peft(
    forks, folders, tiny_config, tmp_path, sample_tokenizer, name, modules, legs, batching,
    checkpointing,
):  # fmt: skip
    """Of routers too. A run of two legs is resumed on another number of ranks and stage."""
    config = tiny_config(
        model=folders[name], model__activation_checkpointing=checkpointing,
        model__lora={"r": 3, "target_modules": modules, "target_parameters": ADAPTERS[name]},
        data__batching=batching, data__micro_batch_tokens=256, data__eval_sources=None,
        train__epochs=None, train__steps=4, train__lr_schedule="constant",
        train__warmup_examples=0, train__weight_decay=0.0, train__gradient_clipping=0.0,
        train__global_batch_size=11, train__learning_rate=3e-2,
    )  # fmt: skip
    expected, plain = train_plainly(config, sample_tokenizer, [legs[0][1]] + [legs[-1][1]] * 3)
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for k, (stage, ranks) in enumerate(legs):
        is_last = k == len(legs) - 1
        if not is_last:
            (run_folder / "stop").touch()  # seen after the first step
        file = strategy(tmp_path, f"zero{stage}")
        ds_config = json.loads(file.read_text())
        ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # all are gathered
        file.write_text(json.dumps(ds_config))
        finished = forks.train(config, "--ds_config", file, ranks=ranks, module="engine_logits")
        assert finished.code == 0, finished.output
    if modules == "all-linear":
        where = "on q_proj, k_proj, v_proj, o_proj, down_proj, gate_up_proj, gate\n"
        assert where in finished.output, finished.output
    steps = read_metrics(run_folder)
    for key, values in expected.items():
        np.testing.assert_allclose([s[key] for s in steps], values, rtol=1e-5, err_msg=key)

    checkpoint = list_complete(run_folder / "checkpoints")[-1]
    files = list((checkpoint / "deepspeed").iterdir())
    assert sum(file.stat().st_size for file in files) < 4 * 4 * trained + 15_000 * len(files)
    export_checkpoint(checkpoint, tmp_path / "merged")
    export_adapter(checkpoint, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folders[name])
    expected = torch.load(run_folder / "logits.pt")
    with torch.no_grad():
        assert (base.eval()(TOKENS, use_cache=False).logits - expected).abs().max() > 0.1
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        for model in (merged, loaded):
            logits = model(input_ids=TOKENS, use_cache=False).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_it_is_left_out_where_the_config_does_not_ask_for_it(forks, folders, tiny_config, tmp_path):
    folder = tmp_path / "silent"
    shutil.copytree(folders["mixtral"], folder)
    architecture = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(architecture | {"output_router_logits": False}))
    lines = {}
    for model in (folder, folders["mixtral"]):
        config = tiny_config(
            model=model, output_dir=str(tmp_path / model.name), train__epochs=None, train__steps=1
        )
        finished = forks.train(config)
        assert finished.code == 0, finished.output
        lines[model] = read_metrics(tmp_path / model.name)[0]
    without, asked = lines.values()
    assert "router_loss" not in without and "router_loss" in asked
    assert without["loss"] == asked["loss"], "the loss is the cross entropy alone"
    assert without["grad_norm"] != asked["grad_norm"]
    evals = [read_metrics(tmp_path / model.name, "eval")[0]["eval_loss"] for model in lines]
    assert evals[0] == evals[1]


CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class Layer(nn.Module):
    def __init__(self, size, experts=16):
        super().__init__()
        self.gate = nn.Linear(size, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i in chosen.unique().tolist():
            at = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, at, self.experts[i](flat[at]) * weight[at, None])
        return out.view_as(x)

class MoeLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Layer(config.hidden_size)
        self.post_init()
"""


@pytest.mark.parametrize("stage", range(4))
def test_experts_that_are_single_modules(
    forks, tiny_model, sample_tokenizer, tiny_config, tmp_path, stage
):
    """Of code that comes with a model: a rank calls only the experts that its tokens choose."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "moe.py").write_text(CODE)
    architecture = json.loads((folder / "config.json").read_text())
    architecture["auto_map"] = {"AutoModelForCausalLM": "moe.MoeLlama"}
    (folder / "config.json").write_text(json.dumps(architecture))
    curves = []
    for ranks, name in ((2, "two_ranks"), (1, "one_rank")):
        config = tiny_config(
            model=folder, model__from_config=True, model__trust_remote_code=True,
            ds_config=str(strategy(tmp_path, f"zero{stage}")), output_dir=str(tmp_path / name),
            data__batching="bucketed", data__eval_sources=None, train__epochs=None,
            train__steps=3, data__micro_batch_tokens=256,
        )  # fmt: skip
        finished = forks.train(config, ranks=ranks)
        if stage == 2:
            assert finished.code == 2 and "use stage 1 or 3" in finished.errors[0], finished.output
            return
        assert finished.code == 0, finished.output
        steps = read_metrics(tmp_path / name)
        curves.append([(s["loss"], s["grad_norm"]) for s in steps])
    np.testing.assert_allclose(*curves, rtol=1e-5)
