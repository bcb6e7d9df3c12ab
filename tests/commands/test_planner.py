"""Memory, communication and time of a run, for scripts/plan.py.
pytest tests/commands/test_planner.py"""

import json
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.inputs import read_config
from harness.processes import run
from harness.repository import REPO
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from scripts.plan import make_workload, show
from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.estimate import (
    BUDGET_STEP,
    GpuCluster,
    Rates,
    Workload,
    estimate,
    fastest,
    find_gpu,
)
from zerotrain.tools.memory import estimate_memory, measure_saved
from zerotrain.training.setup import Architecture, Setup, resolve

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
LARGER = SIZES | {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024}
LINEAR = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)  # weights of SIZES' two layers


@pytest.fixture
def setup_of(tiny_config):
    """A function: the run of a model with SIZES in bf16 on 4 ranks under a DeepSpeed config."""

    def setup(merged, local_ranks=1, **settings):
        config = read_config(tiny_config(**settings))
        model = Architecture.of(config.model, LlamaConfig(**SIZES))
        machine = Machine(4, local_ranks, precision="bf16")
        return Setup(config, machine, model, {"bf16": {"enabled": True}, **merged}, "")

    return setup


def test_frozen_weights_have_no_gradients_and_no_optimizer(setup_of):
    def states(stage, **settings):
        setup = setup_of({"zero_optimization": {"stage": stage}}, model__lora={"r": 4}, **settings)
        return setup.architecture.counts, estimate_memory(setup).states

    for stage, of_weights, of_trained in ((0, 1, 1), (2, 1, 1 / 4), (3, 1 / 4, 1 / 4)):
        (trained, whole), found = states(stage)
        assert 0 < trained < whole / 2
        assert found["weights"] == 2 * whole * of_weights
        assert found["gradients"] == 2 * trained * of_trained
        assert found["optimizer"] == 12 * trained * of_trained
    (_, whole), found = states(2, model__quantization="nf4")
    assert found["weights"] == pytest.approx(2 * (whole - LINEAR) + LINEAR * 4.127 / 8)


@pytest.mark.parametrize(
    "file, gpu, gpu_share, cpu_share",
    [("zero0", 16, 0, 0), ("zero1", 8, 12, 0), ("zero2", 2, 16, 0), ("zero3", 0, 18, 0),
     ("zero2_offload", 2, 4, 18), ("zero3_offload", 0, 0, 22)],
)  # fmt: skip
def test_model_states_equal_the_table(setup_of, file, gpu, gpu_share, cpu_share):
    """The table in ds_configs/README.md has bytes per parameter on 4 ranks in bf16."""
    setup = setup_of({}, ds_config=f"ds_configs/{file}.json")
    config, ds_config = resolve_ds_config(setup.config, setup.machine, SIZES["hidden_size"])
    memory = estimate_memory(replace(setup, config=config, ds_config=ds_config))
    parameters = setup.architecture.counts.total
    on_gpu = sum(memory.states.values()) - memory.states.get("buffers", 0)
    assert on_gpu == parameters * (gpu + gpu_share / 4)
    assert memory.cpu == parameters * cpu_share / 4
    text = (REPO / "ds_configs" / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{file}.json`"))
    figures = {float(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", row.split("|")[3])}
    assert figures == {gpu, gpu_share, cpu_share} - {0}, row


def test_groups_divide_states_and_nvme_holds_offloaded_states(setup_of):
    def memory(stage=1, offload="none", **keys):
        device = {"device": offload}
        zero = {"stage": stage, "offload_optimizer": device, "offload_param": device}
        setup = setup_of({"zero_optimization": zero, **keys}, local_ranks=2)
        return setup.architecture.counts.total, estimate_memory(setup)

    total, alone = memory()
    _, split = memory(tensor_parallel={"autotp_size": 2})
    divided = LINEAR + 320 * 32  # Embeddings are on every rank, the head is divided.
    assert alone.states["weights"] == 2 * total
    assert split.states["weights"] == 2 * (total - divided / 2)
    assert split.states["optimizer"] == 12 * (total - divided / 2) / 2
    _, sliced = memory(sequence_parallel_size=4)
    assert sliced.states == alone.states and sliced.activations == alone.activations / 4
    assert memory(3, "nvme")[1].nvme == 2 * total / 4 * (2 + 12 + 4)
    _, on_cpu = memory(3, "cpu")
    assert on_cpu.nvme == 0 and on_cpu.cpu == 2 * total / 4 * (2 + 2 + 12 + 4)


MIXERS = {
    "qwen3_5_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_moe", *MIXERS])
@pytest.mark.parametrize("trained", ["", "q_proj"])
def test_saved_activations_are_those_of_a_model_with_weights(kind, trained):
    """Norms, q and k norms, experts, mixers; and fewer are saved for frozen weights."""
    sizes = {**SIZES, **MIXERS.get(kind, {}), "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **sizes, head_dim=8)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    for name, parameter in skeleton.named_parameters():
        parameter.requires_grad_(trained in name)
    model = deepcopy(skeleton).to_empty(device="cpu").bfloat16()
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()

    with saved_tensors_hooks(save, lambda _: None):
        model.get_decoder()(torch.zeros(1, 512, dtype=torch.int64), use_cache=False)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage(), None)
    measured = measure_saved(skeleton, 2, False, False, 1, 1, 512).kept
    assert measured == pytest.approx(sum(saved.values()), rel=0.005)


# Model, layers, DeepSpeed config, ranks, tokens, settings, and the peak in GiB of torch's memory,
# with a library in place of CUDA that computes nothing, and a group in which only rank 0 exists.
MEASURED = {
    "DoRA": ("Qwen/Qwen3-0.6B", 28, "zero1", 1, 8192,
             {"model__lora": {"r": 16, "options": {"use_dora": True}}}, 25.68),
    "dropout": ("Qwen/Qwen3-0.6B", 28, "zero1", 1, 8192,
                {"model__lora": {"r": 16, "dropout": 0.1}}, 19.63),
    "shared sequences, recomputed": ("Qwen/Qwen2.5-1.5B", 28, "ulysses", 2, 32768,
                                     {"model__activation_checkpointing": True}, 17.66),
    "experts": ("Qwen/Qwen3-30B-A3B", 4, "zero3", 8, 8192, {}, 20.67),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_estimates_are_within_a_tenth_of_what_was_measured(tiny_config, name):
    model, layers, ds_config, ranks, tokens, settings, measured = MEASURED[name]
    shape = json.loads((REPO / "recipes" / "shapes.json").read_text())[model]
    config = read_config(tiny_config(
        ds_config=f"ds_configs/{ds_config}.json", train__precision="bf16", **settings,
        data={"micro_batch_tokens": tokens, "max_length": tokens, "train_sources": ["none"]},
    ))  # fmt: skip
    shape = AutoConfig.for_model(**shape | {"num_hidden_layers": layers})
    machine = Machine(ranks, ranks, "cuda", "bf16")
    setup = resolve(config, machine, Architecture.of(config.model, shape))
    assert measured == pytest.approx(estimate_memory(setup).peak / GIB, rel=0.1)


def test_a_tensor_parallel_rank_has_whole_mixers():
    for kind, least, most in (("llama", 0.6, 0.8), ("qwen3_5_text", 0.95, 1)):
        config = AutoConfig.for_model(kind, **SIZES, **MIXERS.get(kind, {}))
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        whole, part = (measure_saved(skeleton, 2, False, False, n, 1, 128).kept for n in (1, 2))
        assert least < part / whole < most, kind


def test_a_model_that_cannot_be_measured_is_said_to_have_a_rule_of_thumb(workload, capsys):
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **SIZES))
    assert "kernels" in measure_saved(mamba, 2, None, False, 1, 1, 64).caveat
    model = Architecture.of(workload.config.model, AutoConfig.for_model("jetmoe", **SIZES))
    show(replace(workload, architecture=model), NODE, "", None)
    assert capsys.readouterr().out.count("by a rule of thumb") == 1


NODE = GpuCluster(1, 4, find_gpu("a100-1gb"))
TWO_NODES = replace(NODE, nodes=2)


@pytest.fixture
def workload(tiny_config):
    """A run whose model states fit into 1 GB of GPU memory only in part."""
    flags = ["--data.micro_batch_tokens", "1024", "--train.global_batch_size", "64"]
    config = read_config(tiny_config(), *flags)
    model = Architecture.of(config.model, LlamaConfig(**LARGER))
    tokens = 64 * 250
    return Workload(
        config,
        model,
        tokens=tokens,
        supervised=tokens,
        attention=tokens * 125 * model.flops.pair,
        recomputed=0.0,
        steps=100,
    )


def of_file(workload, name, cluster):
    return estimate(workload, f"ds_configs/{name}.json", cluster)


def test_every_file_has_an_estimate_and_its_largest_micro_batch_fits(workload):
    for path in sorted(REPO.glob("ds_configs/*.json")):
        found = of_file(workload, path.stem, TWO_NODES)
        memory = found.memory
        assert found.seconds > 0 and found.sent > 0 and memory.kept > memory.inputs > 0
        readers = 1 if found.setup.ds_config["zero_optimization"]["stage"] == 3 else 4
        assert memory.loading == 2 * workload.architecture.counts.total * readers
        largest = found.largest_micro_batch
        for tokens, fits in ((largest, True), (largest + BUDGET_STEP, False)):
            data = replace(workload.config.data, micro_batch_tokens=tokens, max_length=tokens)
            other = replace(workload, config=replace(workload.config, data=data))
            assert of_file(other, path.stem, TWO_NODES).fits == fits, path


def test_bytes_sent_equal_the_table(workload):
    """ds_configs/README.md has elements per parameter with A micro-steps. Gradients are in fp32."""
    ranks, a = 8, 2
    elements = {"zero0": (2, 0), "zero1": (2, 1), "zero2": (2 * a, 1), "zero3": (a, 2 * a)}
    for name, (gradients, weights) in elements.items():
        found = of_file(workload, name, TWO_NODES)
        assert found.micro_steps == a
        of_gradient = 2 if name == "zero0" else 4
        sent = workload.architecture.counts.total * (of_gradient * gradients + 2 * weights)
        assert found.sent == pytest.approx(sent * (ranks - 1) / ranks)


def test_a_slow_network_favors_one_node_and_stage_1(workload):
    """The ranks of a node share its network. A tensor-parallel group of 2 sends half as much in
    each of two rings.
    """

    def found(network_gb_per_s, cluster, names=("zero1", "zero2", "zero3")):
        slow = replace(cluster, rates=Rates(network_gb_per_s=network_gb_per_s))
        return [of_file(workload, name, slow) for name in names]

    fast, slow = found(100, TWO_NODES), found(0.1, TWO_NODES)
    assert all(f.seconds < s.seconds for f, s in zip(fast, slow, strict=True))
    assert fastest(slow, "")[0].file == "ds_configs/zero1.json"
    assert found(0.1, NODE)[0].seconds < slow[0].seconds
    assert found(0.1, NODE)[0].seconds == found(100, NODE)[0].seconds
    whole, split = found(1e-3, TWO_NODES, ("zero1", "zero1_autotp"))
    assert split.seconds == pytest.approx(whole.seconds * (3 / 4) / (7 / 8), rel=0.01)


def test_the_runs_own_config_comes_first_if_about_as_fast(workload):
    names = ("zero1", "zero2", "zero3")
    found = [of_file(workload, name, NODE) for name in names]
    timed = [replace(e, seconds=s, fits=True) for e, s in zip(found, (1.04, 1, 1.1), strict=True)]
    for own, order in (("", ["zero1", "zero2", "zero3"]), ("zero2", ["zero2", "zero1", "zero3"])):
        ranked = fastest(timed, f"ds_configs/{own}.json")
        assert [Path(each.file).stem for each in ranked] == order


def test_own_rows_need_no_hub_and_rows_held_out_are_not_trained_on(tiny_config, tmp_path):
    """A GPU that nobody has named is said to be assumed above the tables."""
    file = tiny_config(
        model__name_or_path="Qwen/Qwen3-8B", data__eval_sources={}, data__eval_fraction=0.2
    )
    # 100 rows, or the 70 of the file: 80 or 56 are trained on, 12 in a step, in 2 epochs.
    assert make_workload(read_config(file), mean_tokens=50, rows=100).steps == 14
    hub = ["HF_ENDPOINT=http://127.0.0.1:9", f"HF_HOME={tmp_path}"]  # nothing answers there
    done = run(["env", *hub, sys.executable, "-m", "scripts.plan", "--config", file])
    above = done.output.partition("\n\n")[0]
    assert re.search("10 steps of.*\n1 x 1 A100.*assumed.*--gpu", above), done.output


def test_the_command_reads_links_and_rows(forks, tiny_config, tmp_path):
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"network_gb_per_s": 12.5, "node_gb_per_s": 300.0}))
    command = ["scripts.plan", "--config", tiny_config()]
    named = ["--nodes", 2, "--gpus", 4, "--links", links, "--gpu", "h100-80gb"]
    done = forks.script(*command, *named, "--price", 1000)
    assert done.code == 0, done.output
    assert "2 x 4 H100, 80 GB, 989 TFLOP/s" in done.output
    assert "node_gb_per_s=300," in done.output and "network_gb_per_s=12.5," in done.output
    assert not re.search("matmul_share.{90}", done.output)
    names = {file.stem for file in REPO.glob("ds_configs/*.json")}
    first = [line.split()[0] for line in done.output.splitlines() if line.split()]
    assert all(first.count(name) >= 2 for name in names), done.output
    assert re.search(r"^use: ds_configs/\w+\.json", done.output, re.MULTILINE)
    assert not re.search(r"\b0\.0+\b", done.output), "sizes of a tiny model"
    on_nodes = done.output.partition("\nfastest config that fits")[2].splitlines()
    for nodes, line in zip((1, 2), on_nodes[2:4], strict=True):
        assert int(line.split()[1]) == nodes
        hours, cost = re.search(r"(\S+) +(\S+) +(?:\d+ %|unseen) █", line).groups()
        assert float(cost) == pytest.approx(float(hours) * 4 * nodes * 1000, rel=0.01)
    impossible = ["--ds_config", "ds_configs/zero1_autotp.json", "--gpus", 3]
    other = forks.script(*command, *impossible)
    assert other.code == 0 and "not possible: ds_configs/zero1_autotp.json" in other.output
    assert "\nuse: ds_configs/" in other.output
    links.write_text(json.dumps({"network_gb_per_s": 10**400}))
    mistakes = (
        ["--gpu", "fast-80gb"], ["--links", REPO / "README.md"], ["--links", links],
        ["--mean_tokens", -5], ["--nodes", 0], ["--nodes", 10**400], ["--price", "nan"],
    )  # fmt: skip
    for wrong in mistakes:
        refused = forks.script(*command, *wrong)
        assert refused.code == 2 and len(refused.errors) == 1, refused.output
        assert str(wrong[1]) in refused.errors[0]
