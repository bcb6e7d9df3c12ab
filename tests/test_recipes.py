"""The recipes: memory figures, a dry run at true sizes, two steps of the same family shrunk.
pytest tests/test_recipes.py
"""

import gzip
import json
import random
import re
from collections import Counter

import pytest
import torch
import yaml
from conftest import REPO, SAMPLE, read_metrics, write_rows
from safetensors.torch import load_file, save_file
from test_turns import FAMILIES, WORDS, tokenizer_with
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from checkpoint.export import export_checkpoint
from checkpoint.run_folder import list_complete
from config.parse import parse_command_line
from data.data_plan import make_budget, make_plans
from data.loader import load_steps
from model.architecture import check_model_fits, layer_widths, meta_model
from model.memory import layer_bytes
from runtime.errors import UserError
from scripts import memory

TABLE = (REPO / "recipes" / "README.md").read_text()
RECIPES = sorted(set(re.findall(r"^\| `([^`]+)` \|", TABLE, re.M)))  # a copy has others of its own
SHAPES = json.loads(memory.SHAPES.read_text())
PUBLISHED = {  # "Safetensors, model size" on the hub
    "Qwen/Qwen3-0.6B": 596_049_920,  # 751,632,384 with the tied head counted twice
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "google/gemma-3-4b-it": 4_300_079_472,
}
SMALL = {  # in place of the size of that name, where a shape has one
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 320, "sliding_window": 64, "query_pre_attn_scalar": 8,
    "image_size": 28, "mm_tokens_per_image": 4, "image_token_index": 319, "boi_token_index": 318,
    "eoi_token_index": 317,
}  # fmt: skip


def shrunk(shape: dict, sizes: dict = SMALL) -> dict:
    small = {key: sizes.get(key, value) for key, value in shape.items()}
    return small | {k: shrunk(v, sizes) for k, v in shape.items() if k.endswith("_config")}


def tokenizer_for(name: str):
    """Ours, with a template in the style of the model's own; base models have none."""
    family = {"Qwen": "qwen3", "goog": "gemma", "meta": "llama-3"}[name[:4]]
    template, eos, special, _ = FAMILIES[family]
    tokenizer = tokenizer_with(WORDS, template, special, eos)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "pad_token": "<pad>"})
    if not re.search("Instruct|Qwen|-it$", name):
        tokenizer.chat_template = None
    return tokenizer


def save_as_published(folder):
    """Gemma's vision tower has a prefix in published files, which transformers takes off; beside
    them are those of its image processor.
    """
    file = folder / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    if any("vision" in name for name in tensors):
        (folder / "preprocessor_config.json").write_text('{"do_resize": true}')


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For a model's name: a folder with its config.json at true sizes, and one of the same family
    shrunk, with weights.
    """
    made = {}

    def folder(name: str, true_sizes: bool):
        if (name, true_sizes) not in made:
            path = made[name, true_sizes] = tmp_path_factory.mktemp("model")
            if true_sizes:
                AutoConfig.for_model(**SHAPES[name]).save_pretrained(path)
            else:
                torch.manual_seed(0)
                config = AutoConfig.for_model(**shrunk(SHAPES[name]))
                AutoModelForCausalLM.from_config(config).save_pretrained(path)
                save_as_published(path)
            tokenizer_for(name).save_pretrained(path)
        return made[name, true_sizes]

    return folder


def rows_like(recipe: dict, chat_rows, path):
    """Rows with the keys of the recipe's data sets."""
    chats = [row["messages"] for row in chat_rows]
    columns = recipe["data"].get("columns")
    if columns:
        rows = [
            {columns["prompt"]: chat[0]["content"], columns["completion"]: chat[1]["content"]}
            for chat in chats
        ]
    elif recipe["data"].get("format") == "text":
        rows = [{"text": "\n".join(m["content"] for m in chat), "dump": "a"} for chat in chats]
    else:
        rows = [{"messages": chat, "prompt": chat[0]["content"]} for chat in chats]
    return write_rows(path, rows)


def overrides(recipe: dict, rows, model, tmp_path) -> list[str]:
    """Flags that put local rows and a local model in place of those on the hub."""
    evaluates = "eval_sources" in recipe["data"] or "eval_fraction" in recipe["data"]
    return [
        "--model.name_or_path", str(model), "--output_dir", str(tmp_path / "run"),
        "--data.train_sources", f"[{rows}]", "--data.cache_dir", str(tmp_path / "cache"),
        "--data.eval_sources", f"[{rows}]" if evaluates else "[]", "--data.eval_fraction", "0",
        "--tracking.wandb", "disabled",
    ]  # fmt: skip


def load(name: str) -> tuple[str, dict]:
    text = (REPO / "recipes" / name).read_text()
    return text, yaml.safe_load(text)


# --------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_comment_has_what_the_script_prints(name):
    file = REPO / "recipes" / name
    text, recipe = load(name)
    cluster = memory.cluster_of(text)
    assert cluster, "no cluster line"
    config = parse_command_line(["--config", str(file)]).config
    estimate, _ = memory.plan(config, cluster)
    written = memory.HEAD_MEMORY.search(text)[0]
    assert written == memory.head_lines(estimate), "renew it: scripts/memory.py --write --config"
    assert estimate.peak <= memory.SPARE * cluster.gpu_memory_gib * memory.GIB
    assert f"recipes/{name}" in re.search("#   command .*", text)[0]
    assert re.search(rf"^\| `{name}` \|.*\| {cluster} \|$", TABLE, re.MULTILINE), str(cluster)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert recipe["train"]["precision"] == "bf16" and recipe["model"]["activation_checkpointing"]


def test_the_script_says_what_does_not_fit(monkeypatch, capsys):
    def output(*flags):
        argv = ["memory.py", "--config", "recipes/llama-3.1-8b.yaml", *flags]
        monkeypatch.setattr("sys.argv", argv)
        memory.main()
        return capsys.readouterr().out

    fits = output()
    assert "8,030,261,248 parameters" in fits
    assert re.search(r"weights +15\.0 GiB   2 bytes x all", fits)
    assert re.search(r"optimizer +11\.2 GiB   12 bytes x trained / 8 ranks", fits)
    assert fits.splitlines()[-1].startswith("fits")
    alone = output("--gpus", "1")
    assert re.search(r"optimizer +89\.7 GiB", alone)
    assert alone.splitlines()[-1].startswith("DOES NOT FIT")
    with pytest.raises(UserError, match="positive numbers"):
        output("--gpus", "0")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shapes_have_the_published_number_of_parameters(name):
    skeleton = meta_model(AutoConfig.for_model(**SHAPES[name]), trust_remote_code=False)
    assert sum(p.numel() for p in skeleton.parameters()) == PUBLISHED[name]


def test_stages_and_offload_divide_what_they_should(tmp_path):
    def gib(ds_config, cluster, **changes):
        flags = [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()]
        config = parse_command_line(
            ["--config", "recipes/llama-3.1-8b.yaml", "--ds_config", f"ds_configs/{ds_config}.json",
             *flags]
        ).config  # fmt: skip
        estimate, _ = memory.plan(config, memory.Cluster(*cluster, 80))
        parts = {part.name: part.size for part in estimate.states}
        return estimate, {key: parts.get(key, 0.0) / 8_030_261_248 for key in SHARED}

    SHARED = ("weights", "gradients", "optimizer")
    shares = {
        "zero0": (2, 2, 12), "zero1": (2, 6, 12 / 16), "zero2": (2, 4 / 16, 12 / 16),
        "zero3": (2 / 16, 4 / 16, 12 / 16), "zero2_offload": (2, 0, 0), "zero3_offload": (0, 0, 0),
    }  # fmt: skip
    for stage, wanted in shares.items():
        estimate, found = gib(stage, (2, 8))
        assert tuple(found.values()) == pytest.approx(wanted), stage
        host = {"zero2_offload": 18, "zero3_offload": 18}.get(stage, 0) / 2  # bytes, on each of two
        assert estimate.host / 8_030_261_248 == pytest.approx(host), stage
    plain, _ = gib("zero3", (2, 8))
    copied, _ = gib("zero3", (2, 8), checkpoint__async_save="true")
    assert copied.host - plain.host == pytest.approx(12 * 8_030_261_248 / 2)
    assert plain.loading == 2 * 8_030_261_248
    whole, _ = gib("zero3", (2, 8), model__activation_checkpointing="false")
    assert whole.peak > 2 * plain.peak
    half, _ = gib("zero3", (2, 8), data__micro_batch_tokens=8192)
    assert half.backward[0].name == "layer inputs"
    assert half.backward[0].size == plain.backward[0].size / 2


def test_adapters_and_chunks_of_logits_need_less():
    def states(*flags):
        recipe = "recipes/llama-3.1-8b-lora.yaml"
        config = parse_command_line(["--config", recipe, *flags]).config
        estimate, skeleton = memory.plan(config, memory.Cluster(1, 1, 40))
        trained = sum(p.numel() for p in skeleton.parameters() if p.requires_grad)
        return estimate, trained, {part.name: part.size for part in estimate.states}

    # per layer 16 x (in + out) of q, k, v, o and of gate, up, down
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    estimate, trained, parts = states()
    assert trained == adapters
    assert parts["optimizer"] == 12 * adapters and parts["gradients"] == 4 * adapters
    assert estimate.checkpoint == 14 * adapters
    quantized = states("--model.quantization", "nf4")[2]
    # embeddings, head and adapters stay in 16 bits
    assert 0.25 < quantized["weights"] / parts["weights"] < 0.4
    whole = states("--model.loss_chunk_tokens", "0")[0]
    logits = {part.name: part.size for part in whole.backward}["logits"]
    assert logits > 12 * 8192 * 128_256 and whole.peak > estimate.peak


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
def test_a_layer_keeps_what_the_formula_says(name):
    """The bytes that autograd keeps for one more layer, in bf16."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32, "vocab_size": 320,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    experts = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 4}

    def kept(layers):
        shape = SHAPES[name] | sizes | {k: v for k, v in experts.items() if k in SHAPES[name]}
        config = AutoConfig.for_model(**shape | {"num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = (tensor, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=torch.zeros(1, 64, dtype=torch.int64), use_cache=False)
        return sum(size for _, size in found.values()) / 64, config

    (more, config), (less, _) = kept(3), kept(2)
    formula, _ = layer_bytes(config)
    widths = (384, 4) if "num_experts" in SHAPES[name] else (352, 1)
    assert layer_widths(config) == (128, 128, 64, *widths)
    assert more - less == pytest.approx(formula, rel=0.2)


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("name", [name for name in RECIPES if "debug/" not in name])
def test_a_dry_run_at_true_sizes(forks, folders, chat_rows, tmp_path, name):
    _, recipe = load(name)
    model = recipe["model"]["name_or_path"]
    batch = recipe["train"].get("global_batch_size", 0)
    rows = rows_like(recipe, chat_rows * (1 + batch // len(chat_rows)), tmp_path / "rows.jsonl")
    flags = overrides(recipe, rows, folders(model, True), tmp_path)
    if not batch:  # a megatoken of sample rows would take long to write
        flags += ["--train.global_batch_tokens", "4096"]
    finished = forks.train(REPO / "recipes" / name, *flags, "--dry_run")
    assert finished.code == 0, finished.output
    config = parse_command_line(["--config", str(REPO / "recipes" / name)]).config
    _, skeleton = memory.plan(config, memory.Cluster(1, 1, 80))
    total = sum(p.numel() for p in skeleton.parameters())  # with adapters
    assert f"{total / 1e6:,.1f} M parameters, pretrained" in finished.output
    trained = sum(p.numel() for p in skeleton.parameters() if p.requires_grad)
    assert (f"{trained:,} of {total:,} parameters" in finished.output) == (trained < total)
    stage = json.loads((REPO / recipe["ds_config"]).read_text())["zero_optimization"]["stage"]
    assert f"bf16, ZeRO stage {stage} ({recipe['ds_config']})" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [name for name in RECIPES if "debug/" not in name])
def test_the_shrunk_family_trains_and_resumes(forks, folders, chat_rows, tmp_path, name):
    _, recipe = load(name)
    rows = rows_like(recipe, chat_rows, tmp_path / "rows.jsonl")
    folder = folders(recipe["model"]["name_or_path"], False)
    flags = overrides(recipe, rows, folder, tmp_path)
    unit = "tokens" if "global_batch_tokens" in recipe["train"] else "examples"
    batch = ["--train.global_batch_tokens", "2048"] if unit == "tokens" else []
    batch = batch or ["--train.global_batch_size", "16"]
    flags += [
        *batch, "--train.epochs", "null", "--train.steps", "2", f"--train.warmup_{unit}", "16",
        "--data.max_length", "256", "--data.micro_batch_tokens", "1024", "--train.weight_decay",
        "0.1",
    ]  # fmt: skip
    ranks = 2 if "zero3" in recipe["ds_config"] else 1
    folder_of_run = tmp_path / "run"
    folder_of_run.mkdir()
    (folder_of_run / "stop").touch()  # seen after the first step
    stopped = forks.train(REPO / "recipes" / name, *flags, ranks=ranks)
    assert stopped.code == 0, stopped.output
    resumed = forks.train(REPO / "recipes" / name, *flags, ranks=ranks)
    assert resumed.code == 0 and "resuming from" in resumed.output, resumed.output
    steps = read_metrics(folder_of_run)
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[1]["loss"] < steps[0]["loss"] + 1
    if recipe["model"]["name_or_path"].startswith("google/gemma"):
        check_other_parts(folder, folder_of_run, tmp_path / "out")


@pytest.fixture
def debug(forks, folders, tmp_path):
    """Runs a recipe of recipes/debug on a shrunk model and short rows: no answer of six digits can
    be told from the others or from its question.
    """
    digits = random.Random(0)

    def run(name, count, *flags):
        _, recipe = load(f"debug/{name}")
        answers = [str(digits.randrange(10**5, 10**6)) for _ in range(count)]
        rows = [{"question": f"Under {i}?", "answer": text} for i, text in enumerate(answers)]
        file = write_rows(tmp_path / "rows.jsonl", rows)
        folder = folders(recipe["model"]["name_or_path"], False)
        given = overrides(recipe, file, folder, tmp_path)
        finished = forks.train(REPO / "recipes" / "debug" / name, *given, *flags)
        assert finished.code == 0, finished.output
        return read_metrics(tmp_path / "run")

    return run


def test_one_batch_is_learned_by_heart(debug):
    """At 200 times the rate: the shrunk model has 1/20,000 of the weights. Six of the 26 supervised
    tokens of a row are random digits: without them the loss is at least 6 * log(10) / 26 = 0.53.
    """
    steps = debug("overfit-one-batch.yaml", 16, "--train.learning_rate", "1e-2")
    losses = [step["loss"] for step in steps]
    assert {step["supervised_tokens"] for step in steps} == {26 * 16}, "the same batch"
    assert len(losses) == 60 and losses[0] > 4 and losses[-1] < 0.45, losses


def test_one_percent_runs_all_parts(debug, tmp_path):
    every = "--eval.every_steps", "1", "--checkpoint.every_steps", "1"
    steps = debug("one-percent.yaml", 16, *every)
    assert [step["step"] for step in steps] == [1, 2], "two epochs of one step"
    assert [line["step"] for line in read_metrics(tmp_path / "run", "eval")] == [0, 1, 2]
    assert len(list_complete(tmp_path / "run" / "checkpoints")) == 2


def test_a_profile_says_where_the_time_goes(debug, tmp_path):
    steps = debug("profile.yaml", 48, "--profile.start", "2", "--profile.steps", "2")
    assert len(steps) == 3
    folder = tmp_path / "run" / "profile" / "step_00000002"
    trace = json.loads(gzip.decompress((folder / "rank_0.json.gz").read_bytes()))
    counts = Counter((event.get("cat"), event["name"]) for event in trace["traceEvents"])
    updates = counts["user_annotation", "Optimizer.step#AdamW.step"]
    assert updates == 4, "two steps of two parameter groups"
    assert counts["cpu_op", "aten::mm"] > 20
    assert "Self CPU" in (folder / "rank_0.txt").read_text()


# --------------------------------------------------------------------------------------------------
# Models with other parts than text


def check_other_parts(given, run_folder, out):
    """The exported model has the class and the names of the given one, other weights in its
    language model, and the same ones elsewhere.
    """
    export_checkpoint(list_complete(run_folder / "checkpoints")[-1], out)
    names = [load_file(path / "model.safetensors").keys() for path in (given, out)]
    assert names[0] == names[1]
    assert (out / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (given, out))
    assert type(before) is type(after)
    found, changed = after.state_dict(), set()
    for key, weight in before.to(after.dtype).state_dict().items():
        if not torch.equal(weight, found[key]):
            changed.add(key)
    text = {key for key in found if "language_model" in key or key == "lm_head.weight"}
    assert changed == text and text < found.keys()


def test_a_vision_tower_stays_as_it_is_under_zero_3(forks, folders, chat_rows, tmp_path):
    """As in gemma-3-4b.yaml, whose own run, under ZeRO 2, checks this too."""
    _, recipe = load("gemma-3-4b.yaml")
    rows = rows_like(recipe, chat_rows, tmp_path / "rows.jsonl")
    folder = folders("google/gemma-3-4b-it", False)
    finished = forks.train(
        REPO / "recipes" / "gemma-3-4b.yaml", *overrides(recipe, rows, folder, tmp_path),
        "--train.epochs", "null", "--train.steps", "2", "--train.global_batch_size", "16",
        "--data.max_length", "256", "--data.micro_batch_tokens", "1024", "--train.weight_decay",
        "0.1", "--ds_config", "ds_configs/zero3.json", "--train.warmup_examples", "0",
        "--train.precision", "fp32", ranks=2,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    check_other_parts(folder, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "mistral3"])
def test_models_without_a_class_for_text_alone_are_refused_by_name(kind, tmp_path):
    config = parse_command_line(["--config", "recipes/demo.yaml"]).config
    with pytest.raises(UserError) as refused:
        check_model_fits(
            config, AutoConfig.for_model(kind), AutoTokenizer.from_pretrained(SAMPLE / "model")
        )
    assert str(refused.value).startswith(f"model.name_or_path: {kind} is a multimodal model")


# --------------------------------------------------------------------------------------------------
# Long documents


def test_pieces_of_a_long_document_cover_it_once_and_are_apart(sample_tokenizer, tmp_path):
    """A document of over three times data.max_length, between short ones, as the recipe for
    continued pretraining reads it.
    """
    long = " ".join(f"{n} and {n * n}." for n in range(45))
    rows = [{"text": text} for text in ("First.", long, "Last one.")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    config = parse_command_line(
        ["--config", "recipes/llama-3.2-1b-pretraining.yaml", "--data.train_sources", f"[{file}]",
         "--data.eval_fraction", "0", "--data.max_length", "64", "--data.micro_batch_tokens", "256",
         "--train.global_batch_tokens", "128", "--data.cache_dir", str(tmp_path / "cache"),
         "--data.batching", "packed"]
    ).config  # fmt: skip
    eos = [sample_tokenizer.eos_token_id]
    documents = [sample_tokenizer(row["text"])["input_ids"] + eos for row in rows]
    assert len(documents[1]) > 3 * 64

    plan, _ = make_plans(config, sample_tokenizer, make_budget(config.data, 1, 100))
    pieces, targets = [], 0
    for step in load_steps(plan, 0, 0, plan.steps_per_epoch):
        for batch in step.micro_batches:
            starts = [*(batch.position_ids[0] == 0).nonzero().flatten().tolist()]
            ends = [*starts[1:], batch.input_ids.shape[1]]
            for start, end in zip(starts, ends, strict=True):
                assert batch.position_ids[0, start:end].tolist() == list(range(end - start))
                pieces.append(batch.input_ids[0, start:end].tolist())
                # every token of a piece but the first is a target, predicted by the one before
                assert set(range(start, end - 1)) <= set(batch.positions.tolist())
            targets += len(batch.targets)
    assert max(map(len, pieces)) == 64
    assert targets == sum(len(document) - 1 for document in documents)
    assert sorted(p for p in pieces if len(p) < 20)  # the short ones are whole
    for document in documents:
        left, covered = document, document[:1]
        while len(covered) < len(document):  # a piece begins with the last token of the one before
            [piece] = [
                p for p in pieces
                if p[0] == covered[-1] and p == document[len(covered) - 1 :][: len(p)]
                and len(p) == min(64, len(document) - len(covered) + 1)
            ]  # fmt: skip
            covered = covered + piece[1:]
            pieces.remove(piece)
        assert covered == left
    assert not pieces
