"""The plan of a run: its memory, communication and time.
pytest tests/commands/test_planner.py"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness.repository import REPO
from transformers import LlamaConfig

from scripts import plan
from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.config.parse import parse_command_line
from zerotrain.model.architecture import meta_model
from zerotrain.model.trained import count_trained
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine
from zerotrain.tools import strategy
from zerotrain.tools.memory import estimate_memory
from zerotrain.tools.plan import Planner, best_of, daly_seconds, node_memory
from zerotrain.training.setup import Architecture
from zerotrain.training.states import GIB

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
LARGER = SIZES | {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024}
ASSUMED = plan.ASSUMED | {"peak_flops_per_s": 312e12}


def states_of(config, skeleton, counts, ds_config, ranks=4):
    return estimate_memory(config, skeleton, counts, ds_config, ranks).states


def test_what_is_frozen_is_only_its_weights(tiny_config):
    config = parse_command_line(["--config", str(tiny_config(model__lora={"r": 4}))]).config
    skeleton = meta_model(LlamaConfig(**SIZES), False)
    counts = count_trained(skeleton, config.model)
    whole, trained = counts.total, counts.trained
    assert 0 < trained < whole / 2

    def states(stage, run=config):
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        return states_of(run, skeleton, counts, ds_config)

    for stage, weights, gradients, optimizer in (
        (0, 2 * whole, 2 * trained, 12 * trained),
        (2, 2 * whole, 2 * trained / 4, 12 * trained / 4),
        (3, 2 * whole / 4, 2 * trained / 4, 12 * trained / 4),
    ):
        expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        assert {name: states(stage)[name] for name in expected} == expected
    quantized = replace(config, model=replace(config.model, quantization="nf4"))
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)  # of two layers
    expected = 2 * (whole - linear) + linear * 4.127 / 8
    assert states(2, quantized)["weights"] == pytest.approx(expected)


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
    config, _, ds_config = resolve_ds_config(
        config, Machine(4, 1, precision="bf16"), SIZES["hidden_size"]
    )
    cluster = strategy.Cluster(4, 1, 80, ASSUMED)
    run = strategy.Strategy(config, ds_config, skeleton, counts, cluster)
    memory = run.memory(256)
    host, _ = node_memory(run, memory)
    on_gpu = sum(memory.states.values()) - memory.states.get("buffers", 0)
    assert on_gpu == parameters * (gpu + gpu_share / 4)
    assert host == parameters * cpu_share / 4
    text = (REPO / "ds_configs" / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{file}.json`"))
    figures = {float(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", row.split("|")[3])}
    assert figures == {gpu, gpu_share, cpu_share} - {0}, row


def test_groups_divide_what_they_share_and_nvme_holds_what_is_moved_there(tiny_config):
    config = parse_command_line(["--config", str(tiny_config())]).config
    skeleton = meta_model(LlamaConfig(**SIZES), False)
    counts = count_trained(skeleton, config.model)
    total = counts.total

    def memory(stage=1, offload="none", **keys):
        device = {"device": offload}
        zero = {"stage": stage, "offload_optimizer": device, "offload_param": device}
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": zero, **keys}
        cluster = strategy.Cluster(4, 2, 80, ASSUMED)
        run = strategy.Strategy(config, ds_config, skeleton, counts, cluster)
        return run.memory(256), node_memory(run, run.memory(256))

    alone, _ = memory()
    split, _ = memory(tensor_parallel={"autotp_size": 2})
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 320 * 32  # and the head
    assert alone.states["weights"] == 2 * total
    assert split.states["weights"] == 2 * (total - linear / 2)  # embeddings are on every rank
    assert split.states["optimizer"] == 12 * (total - linear / 2) / 2  # over two groups
    sliced, _ = memory(sequence_parallel_size=4)
    assert sliced.states == alone.states and sliced.activations == alone.activations / 4
    _, (_, nvme) = memory(3, "nvme")
    assert nvme == 2 * total / 4 * (2 + 12 + 4)  # the sums stay on the CPU
    _, (host, nvme) = memory(3, "cpu")
    assert nvme == 0 and host == 2 * total / 4 * (2 + 2 + 12 + 4)


@pytest.fixture
def planner(tiny_config):
    """A run of a model of which 0.1 GB of a GPU's memory holds neither all states nor nothing."""
    flags = ["--data.micro_batch_tokens", "1024", "--train.global_batch_size", "64"]
    config = parse_command_line(["--config", str(tiny_config()), *flags]).config
    model = Architecture.of(config, LlamaConfig(**LARGER))
    work = 64 * 250, 64 * 250 * model.flops.token, 100
    return Planner(config, model, *work, strategy.Cluster(8, 4, 1, ASSUMED))


def with_network(planner, gb_per_s):
    assumed = ASSUMED | {"network_gb_per_s": gb_per_s}
    return replace(planner, cluster=replace(planner.cluster, assumed=assumed))


def test_every_file_has_a_row_and_its_largest_budget_is_the_largest_that_fits(planner):
    for file in sorted(REPO.glob("ds_configs/*.json")):
        row = planner.row(str(file), 2)
        assert row.seconds > 0 and row.sent > 0 and row.memory.kept > row.memory.inputs > 0
        readers = 1 if row.simplicity[1] == 3 else 4  # of a node's ranks, as the weights are loaded
        assert row.host >= 2 * planner.architecture.counts.total * readers
        for tokens, fits in (
            (row.largest_budget, True),
            (row.largest_budget + strategy.GRANULE, False),
        ):
            data = replace(planner.config.data, micro_batch_tokens=tokens, max_length=tokens)
            other = replace(planner, config=replace(planner.config, data=data))
            assert other.row(str(file), 2).fits == fits, file.name


def test_what_a_run_would_refuse_has_no_row(planner):
    with pytest.raises(UserError, match="is smaller"):
        planner.row("ds_configs/zero1.json", 17)
    odd = replace(planner, cluster=replace(planner.cluster, gpus=3))
    with pytest.raises(UserError, match="groups of 2"):
        odd.row("ds_configs/zero3_autotp.json", 1)


def test_bytes_sent_are_those_of_the_table_and_stages_2_and_3_send_in_every_micro_step(planner):
    """Elements per parameter with A micro-steps, in ds_configs/README.md; gradients in fp32."""
    ranks, a = 8, 2
    elements = {"zero0": (2, 0), "zero1": (2, 1), "zero2": (2 * a, 1), "zero3": (a, 2 * a)}
    for name, (gradients, weights) in elements.items():
        row = planner.row(f"ds_configs/{name}.json", 2)
        assert row.micro_steps == a
        of_gradient = 2 if name == "zero0" else 4
        sent = planner.architecture.counts.total * (of_gradient * gradients + 2 * weights)
        assert row.sent == pytest.approx(sent * (ranks - 1) / ranks)


def test_a_dry_run_prints_the_model_states_of_its_plan(forks, tiny_config):
    path = tiny_config(train__precision="fp32", ds_config="ds_configs/zero3.json")
    dry = forks.train(path, "--dry_run", ranks=2)
    assert dry.code == 0, dry.output
    config = parse_command_line(["--config", str(path)]).config
    row = plan.make_planner(config, strategy.Cluster(2, 2, 80, ASSUMED)).row(config.ds_config, 1)
    states = {name: row.memory.states[name] for name in ("weights", "gradients", "optimizer")}
    printed = " ".join(dry.output.split())
    assert all(f"{name} {size / GIB:.3g}" in printed for name, size in states.items()), printed


def test_a_slow_network_makes_the_second_node_and_many_messages_dear(planner):
    def rows(network_gb_per_s, nodes):
        slow = with_network(planner, network_gb_per_s)
        return [slow.row(f"ds_configs/zero{stage}.json", nodes) for stage in (1, 2, 3)]

    fast, slow = rows(100, 2), rows(0.1, 2)
    assert all(f.seconds < s.seconds for f, s in zip(fast, slow, strict=True))
    assert best_of(slow, "")[0].file == "ds_configs/zero1.json"
    assert rows(0.1, 1)[0].seconds < slow[0].seconds  # so here one node is faster
    assert rows(0.1, 1)[0].seconds == rows(100, 1)[0].seconds


def test_ranks_of_a_node_share_its_network_whatever_their_groups(planner):
    """A tensor-parallel group of 2 sends half as much in each of two rings at a time."""
    slow = with_network(planner, 1e-3)
    whole, split = (slow.row(f"ds_configs/{name}.json", 2) for name in ("zero1", "zero1_autotp"))
    assert split.seconds == pytest.approx(whole.seconds * (3 / 4) / (7 / 8), rel=0.01)


def test_the_own_choice_comes_first_among_equally_fast_ones(planner):
    rows = [planner.row(f"ds_configs/{name}.json", 1) for name in ("zero1", "zero2", "zero3")]
    timed = [replace(r, seconds=s, fits=True) for r, s in zip(rows, (1.04, 1.0, 1.1), strict=True)]
    for own, first in (("", "zero1"), ("ds_configs/zero2.json", "zero2")):
        names = [Path(row.file).stem for row in best_of(timed, own)]
        assert names[0] == first and names[2] == "zero3"
    tiny = [replace(row, seconds=row.seconds / 1e5) for row in timed]
    assert Path(best_of(tiny, "ds_configs/zero3.json")[0].file).stem == "zero3", "latencies decide"
    assert Path(best_of(tiny, "")[0].file).stem == "zero1"


def test_saves_are_rarer_where_failures_are_and_never_rarer_than_failures():
    assert daly_seconds(60, 1e6) == pytest.approx((2 * 60 * 1e6) ** 0.5, rel=0.01)
    assert daly_seconds(60, 1e4) < daly_seconds(60, 1e6)
    assert daly_seconds(1e6, 100) == 100


def test_the_command_reads_hostfile_links_and_rows(forks, tiny_config, tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("# two nodes\nnode-1 slots=4\nnode-2 slots=4\n")
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"network_gb_per_s": 12.5, "node_gb_per_s": 300.0}))
    command = ["scripts/plan.py", "--config", tiny_config()]
    done = forks.script(*command, "--hostfile", hosts, "--links", links, "--gpu", "h100-80gb")
    assert done.code == 0, done.output
    assert "2 x 4 GPUs, 80 GB" in done.output and "peak_flops_per_s 9.89e+14" in done.output
    assert "node_gb_per_s 300," in done.output and "network_gb_per_s 12.5," in done.output
    names = {file.stem for file in REPO.glob("ds_configs/*.json")}
    first = [line.split()[0] for line in done.output.splitlines() if line.split()]
    assert all(first.count(name) == 2 for name in names), done.output
    assert re.search(r"^use: ds_configs/zero2\.json", done.output, re.MULTILINE), "the run's own"
    assert not re.search(r"\b0\.0+\b", done.output), "sizes of a tiny model"
    impossible = ["--ds_config", "ds_configs/zero1_autotp.json", "--gpus", 3]
    other = forks.script(*command, *impossible)
    assert other.code == 0 and "not possible: ds_configs/zero1_autotp.json" in other.output
    assert "\nuse: ds_configs/" in other.output
    mistakes = (
        ["--gpu", "fast-80gb"], ["--links", hosts], ["--hostfile", links], ["--mean_tokens", -5]
    )  # fmt: skip
    for wrong in mistakes:
        refused = forks.script(*command, *wrong)
        assert refused.code == 2 and len(refused.errors) == 1, refused.output
