"""Recipes fit their cluster, and a copy's first run learns with a small model of each family.
pytest tests/template/test_recipes.py
"""

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("copier")

from copier import run_copy
from harness.inputs import chat, read_config, write_rows
from harness.processes import run
from harness.repository import REPO, SAMPLE, copy_repository
from harness.runs import read_metrics
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scripts import plan
from zerotrain.model.architecture import meta_model
from zerotrain.runtime.machine import GIB
from zerotrain.tools.estimate import GpuCluster, estimate, find_gpu

TABLE = (REPO / "recipes" / "README.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \|[^|]*\| ([^|]+) \| (\d+) \| (\d+) \|$", TABLE, re.MULTILINE)
SHAPES = json.loads((REPO / "recipes" / "shapes.json").read_text())
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen3-0.6B": 596_049_920,  # 751,632,384 with the tied head counted twice
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3.5-4B": 4_210_000_000,
    "Qwen/Qwen3.5-9B": 8_950_000_000,
    "Qwen/Qwen3.5-35B-A3B": 34_660_000_000,
    "Qwen/Qwen3.8-27B": 26_900_000_000,
    "google/gemma-4-E4B-it": 7_460_000_000,
    "google/gemma-4-31B-it": 30_700_000_000,
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": 8_490_000_000,
    "allenai/Olmo-3-7B-Instruct": 7_298_011_136,
    "zai-org/GLM-4.7-Flash": 29_940_000_000,
    "unsloth/gpt-oss-20b-BF16": 20_914_757_184,
    "LiquidAI/LFM2.5-1.2B-Instruct": 1_170_340_608,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
}
"""Parameters of the text part, by "Safetensors, model size" on the hub, or rounded by llama-bench
(4.21 B).
"""
SMALL = {  # sizes of the small models
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2,
    "head_dim": 16, "global_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 384,
    "vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 16, "sliding_window": 64,
}  # fmt: skip
FAMILIES = (
    "qwen3.5-9b", "qwen3.5-35b-a3b", "gemma-4-e4b", "gemma-4-31b", "ministral-3-8b", "olmo-3-7b",
    "glm-4.7-flash", "gpt-oss-20b", "lfm2.5-1.2b", "llama-3.2-1b-pretraining",
    "llama-3.3-70b-lora",
)  # fmt: skip


def config_of(name, *flags):
    return read_config(REPO / "recipes" / name, *flags)


def test_every_recipe_is_in_the_table_and_every_shape_is_as_published():
    folder = REPO / "recipes"
    named = {name for name, *_ in ROWS} | {"demo.yaml"}
    files = [*folder.glob("*.yaml"), *folder.glob("debug/*.yaml")]
    assert {str(file.relative_to(folder)) for file in files} == named
    assert {config_of(name).model.name_or_path for name, *_ in ROWS} == set(PUBLISHED)
    for name, parameters in PUBLISHED.items():
        text = AutoConfig.for_model(**SHAPES[name]).get_text_config()
        skeleton = meta_model(text, trust_remote_code=False)
        count = sum(p.numel() for p in skeleton.parameters())
        assert parameters in (count, round(count, -7)), name


@pytest.mark.parametrize("name, cluster, gib, least", ROWS, ids=lambda value: str(value))
def test_a_recipe_needs_the_memory_that_the_table_says(name, cluster, gib, least):
    text = (REPO / "recipes" / name).read_text()
    nodes, gpus, memory = plan.cluster_in(text)
    described = f"{nodes} x {gpus} GPUs, {memory} GB"
    assert described == cluster and f"recipes/{name}" in text.split("command")[1].split("\n")[0]
    config = config_of(name)
    workload = plan.make_workload(config, mean_tokens=500)
    gpu = find_gpu(f"a100-{memory}gb")

    def peak(nodes, gpus):
        """Bytes per GPU; 0 if it does not fit."""
        found = estimate(workload, config.ds_config, GpuCluster(nodes, gpus, gpu))
        fits = found.fits and found.largest_micro_batch >= config.data.micro_batch_tokens
        return fits * found.memory.peak

    assert round(peak(nodes, gpus) / GIB) == int(gib)
    assert peak(1, int(least)) and (least == "1" or not peak(1, int(least) - 1))


@pytest.fixture
def small_run(tmp_path):
    """Makes a small model of the same family, and returns the flags of a run with it."""

    def flags(name):
        def shrunk(shape):
            small = {key: value and SMALL.get(key, value) for key, value in shape.items()}
            parts = {k: shrunk(v) for k, v in shape.items() if k.endswith("_config") and v}
            if layers := getattr(AutoConfig.for_model(**shape), "layer_types", None):
                # The last two share the keys and values of the two before them, if any do.
                small["layer_types"] = layers[-2:] * (2 if "num_kv_shared_layers" in shape else 1)
                small["num_hidden_layers"] = len(small["layer_types"])
            if shape.get("num_key_value_heads", 0) == shape.get("num_attention_heads"):
                small["num_key_value_heads"] = SMALL["num_attention_heads"]
            return small | parts

        torch.manual_seed(0)
        config = AutoConfig.for_model(**shrunk(SHAPES[name]), pad_token_id=0, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(SAMPLE / "model").save_pretrained(tmp_path / "model")
        folders = (
            ("model.name_or_path", "model"),
            ("output_dir", "run"),
            ("data.cache_dir", "cache"),
        )
        return [word for key, name in folders for word in (f"--{key}", tmp_path / name)]

    return flags


@pytest.fixture(scope="module")
def copied_recipe(tmp_path_factory):
    """Makes a copy with a given recipe and rows, and returns the path of its recipe."""
    template = tmp_path_factory.mktemp("template")
    for name in (".copier", "recipes"):
        shutil.copytree(REPO / name, template / name)
    shutil.copy(REPO / "copier.yml", template)

    def render(recipe, rows, **more):
        copy = tmp_path_factory.mktemp("copy")
        answers = {"recipe": recipe, "train_data": str(rows), "wandb_project": "", **more}
        run_copy(str(template), copy, data=answers, defaults=True, quiet=True)
        return copy / "recipes" / "my-project.yaml"

    return render


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_run_of_a_copy_learns(forks, small_run, copied_recipe, tmp_path, name):
    """There are 50 rows, and an evaluation halfway. The rest of the recipe follows the answers."""
    turns = [(f"{i}+7?", f"{i}+7={i + 7}") for i in range(50)]
    rows = [{"text": " ".join(texts)} if "pretraining" in name else chat(*texts) for texts in turns]
    recipe = copied_recipe(name, write_rows(tmp_path / "rows.jsonl", rows))
    flags = small_run(read_config(recipe).model.name_or_path)
    forks.finish(recipe, *flags, "--eval.every_steps", 9)
    losses = [record["eval_loss"] for record in read_metrics(tmp_path / "run", "eval")]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True), losses


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (2, 8), (4, 8)])
def test_a_copy_takes_100_steps_with_300_rows_or_says_how(
    forks, small_run, copied_recipe, tmp_path, nodes, gpus
):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(f"{i}?", f"{i}") for i in range(300)])
    recipe = copied_recipe("qwen3-8b", rows, nodes=nodes, gpus_per_node=gpus)
    start = [recipe, "--dry_run", *small_run("Qwen/Qwen3-8B")]

    def steps(*flags):
        table = forks.finish(*start, *flags).output
        return int(re.search(r"\n  steps +(\d+) = ", table)[1]), table

    given, table = steps()
    assert f"300 give {given} steps" in recipe.read_text()
    assert ("few steps" in table) == (given < 100) == (nodes == 4)
    if given < 100:
        flags = re.findall(r"(--train\.\w+) (\w+)", table.split("few steps")[1])
        assert steps(*sum(flags, ()))[0] == 100


def test_the_overfit_recipe_memorizes_one_batch(forks, small_run, tmp_path):
    """The learning rate is 200 times higher, since the small model has 1/6,000 of the weights.
    Answers are six random digits, so they cannot be guessed.
    """
    digits = random.Random(0)
    rows = [
        {"question": f"Under {i}?", "answer": f"{digits.randrange(10**6):06}"} for i in range(16)
    ]
    config = config_of("debug/overfit-one-batch.yaml")
    [source] = config.data.train_sources
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "columns": source.columns}
    forks.finish(
        REPO / "recipes/debug/overfit-one-batch.yaml", *small_run(config.model.name_or_path),
        "--data.train_sources", json.dumps([source]), "--tracking.wandb", "disabled",
        "--train.learning_rate", "1e-2",
    )  # fmt: skip
    losses = [step["loss"] for step in read_metrics(tmp_path / "run")]
    assert len(losses) == 60 and losses[0] > 4 and losses[-1] < 0.7, losses


@pytest.mark.launch
@pytest.mark.timeout(7200)
def test_first_run_shows_answers_before_and_after(small_run, tmp_path):
    """With SMOLLM2="FOLDER ROWS" the model is the real one, and learns to write calculations as
    gsm8k does. Otherwise it is small, with random weights, for three steps on one rank: deepspeed,
    which demo.sh also starts, imports everything twice more.
    """
    given = os.environ.get("SMOLLM2", "").split()
    copy, venv = tmp_path / "copy", Path(sys.prefix)
    copy_repository(copy)
    if not given:
        small_run("HuggingFaceTB/SmolLM2-135M-Instruct")
        rows = [{"question": f"{i}?", "answer": f"It is {i}."} for i in range(60)]
        given = [tmp_path / "model", write_rows(tmp_path / "rows.jsonl", rows)]
        given += ["--train.steps", "3", "--eval.max_new_tokens", "4"]
        venv = tmp_path / "venv"
        (venv / "bin").mkdir(parents=True)
        for name in ("lib", "pyvenv.cfg", "bin/python"):
            (venv / name).symlink_to(Path(sys.prefix, name))
        deepspeed = venv / "bin" / "deepspeed"
        deepspeed.write_text('#!/bin/bash\nexec python "${@:7}"\n')  # after six options
        deepspeed.chmod(0o755)
    (copy / ".venv").symlink_to(venv)
    done = run(["scripts/first_run.sh", *given], timeout=7000, cwd=copy)
    assert done.code == 0, done.output
    [folder] = (copy / "runs").iterdir()
    losses = [record["eval_loss"] for record in read_metrics(folder, "eval")]
    assert f"{losses[0]:.4f}, {losses[-1]:.4f}" in done.output
    assert (folder / "model" / "model.safetensors").exists()
    answers = re.findall(r"^--- after:\n(.*?)\n$", done.output, re.MULTILINE | re.DOTALL)
    assert len(answers) == 2
    if "SMOLLM2" in os.environ:
        assert losses[-1] < 0.9 < 1.3 < losses[0]
        assert all("<<" in answer for answer in answers), answers
