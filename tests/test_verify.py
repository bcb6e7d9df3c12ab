"""Exports are checked against their run by a process that has only the folder; model cards; pushes
to a hub on this machine.    pytest tests/test_verify.py
"""

import json
import math
import re
import shutil
from dataclasses import replace

import huggingface_hub
import pytest
from conftest import REPO, free_port, strategy, write_rows, write_tiny_config
from huggingface_hub import ModelCard
from local_hub import LocalHub
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from row_formats import mix_of_formats
from test_layers import imports_of, modules

from checkpoint.manifest import read_manifest
from checkpoint.model_card import About, model_card
from checkpoint.run_folder import list_complete
from checkpoint.state import read_state
from checkpoint.stranger import prompt_ids
from checkpoint.verify import check_loss, check_prompts, sample_prompts
from config.parse import parse_command_line
from config.schema import Source
from runtime.errors import EXIT_FAILURE, UserError
from scripts import export
from tracking.startup import open_plans


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts/export.py in this process, with --verify unless other flags are given; returns
    its exit code and what it prints.
    """

    def call(run_folder, out, *flags):
        flags = flags or ("--verify",)
        monkeypatch.setattr("sys.argv", ["export.py", str(run_folder), str(out), *flags])
        code = 0
        try:
            export.main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, to which this process is logged in."""
    hub = LocalHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    yield hub
    hub.close()


def rows_of(output):
    """{name: text} of the table of findings."""
    return dict(re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +(.*)$", output, re.MULTILINE))


def test_an_export_that_agrees(forks, command, tiny_config, tmp_path, chat_rows):
    """ZeRO 3 in bf16 with tied heads; some examples are truncated, one has a mark in its text, some
    have several turns.
    """
    rows = [*chat_rows[:30]]
    rows[5] = {"messages": [{"role": "user", "content": "What is <|end|>?"},
                            {"role": "assistant", "content": "a mark"}]}  # fmt: skip
    for i in (8, 9, 10):
        rows[i] = {"messages": [*rows[i]["messages"], *rows[i + 1]["messages"][-2:]]}
    config = tiny_config(
        ds_config=str(strategy(tmp_path, "zero3")), train__precision="bf16", train__epochs=None,
        train__steps=4, eval__every_steps=2, data__max_length=120,
        data__eval_sources=[str(write_rows(tmp_path / "held_out.jsonl", rows[:20]))],
    )  # fmt: skip
    finished = forks.train(config, ranks=2)
    assert finished.code == 0, finished.output
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '{"kind": "eval", "step": 9, "eval_loss": 1.0}\n["eval"]\n{"kind": "eval", "s'
        )
    out = tmp_path / "deep" / "hf"
    code, printed, errors = command(tmp_path / "run", out)
    assert code == 0, printed + errors
    found = rows_of(printed)
    assert (
        found["weights"]
        == "LlamaForCausalLM, bfloat16: every tensor is found, and none is left over"
    )
    loss = read_state(list_complete(tmp_path / "run" / "checkpoints")[-1]).progress.eval_loss
    numbers = re.match(
        r"([\d.]+) over 20 examples, [\d,]+ supervised tokens; the run's at step 4: ([\d.]+); they "
        r"differ by (\S+), rounding allows (\S+)$", found["evaluation loss"],
    )  # fmt: skip
    ours, expected, difference, tolerance = map(float, numbers.groups())
    assert expected == pytest.approx(loss, abs=1e-6) and ours == pytest.approx(loss, abs=0.01)
    assert difference <= tolerance < 0.1
    assert re.match(
        r"apply_chat_template gives the trained token ids in \d\d requests of 19 rows; left out: 1 "
        r"rows whose text has special tokens", found["prompts"],
    )  # fmt: skip
    assert re.match(r"generate\(\) stops at '<\|end\|>' \(\d+\)$", found["end tokens"])
    assert list(out.parent.iterdir()) == [out]
    check_card(ModelCard.load(out / "README.md"))
    check_card_of_the_hub(tmp_path / "run")
    check_tolerance(config, read_state(list_complete(tmp_path / "run" / "checkpoints")[-1]))


def check_card(card):
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license is None and card.data.base_model is None, "a local folder"
    for text in (
        "4 steps", "| precision | bf16 |", "| parallelism | ZeRO stage 3 on 2 ranks |",
        "- training: `train.jsonl`", "- held out: `held_out.jsonl`", "| transformers | 5.",
        "| global batch | 12 examples |", "| learning rate | 0.003, linear |",
    ):  # fmt: skip
        assert text in card.text, text
    curve = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", card.text, re.MULTILINE)
    assert [step for step, _ in curve] == ["0", "2", "4"]
    assert "/" not in card.text, "paths name people and machines"


def check_tolerance(config_file, state):
    """20 examples in bf16: 2 * 2^-8 of the sensitivity, and 4 / sqrt(20) of that."""
    config = parse_command_line(["--config", str(config_file)]).config
    eval_plan = open_plans(config, 2)[-1]["held_out"]
    tolerance = 2 * 2**-8 * 1.5 * 4 / 20**0.5

    def differs(by, state=state, plan=eval_plan, dtype="bfloat16"):
        loss = state.progress.eval_loss or 0.0
        answers = {"loss": loss + by, "sensitivity": 1.5, "dtype": dtype}
        return check_loss(answers, state, plan)

    assert not differs(0.99 * tolerance).differs and not differs(-0.99 * tolerance).differs
    assert not differs(0.99 * tolerance, dtype="float32").differs, "the coarser of the two"
    for by in (1.01 * tolerance, -1.01 * tolerance, math.nan, math.inf):
        assert differs(by).differs
    unknown = replace(state, progress=replace(state.progress, eval_loss=None))
    finding = differs(1.0, unknown)
    assert (
        not finding.differs and "not checked: the run was not evaluated at step 4" in finding.text
    )


# --------------------------------------------------------------------------------------------------
# Requests


def check_requests(config_file):
    """The finding for the requests of a config's training rows, answered in this process."""
    config = parse_command_line(["--config", str(config_file)]).config
    config, tokenizer, plan, _ = open_plans(config, 1)
    given = config.data.sources("train_sources")
    prompts, escaped = sample_prompts(plan.data, given, config, tokenizer)
    served = [prompt_ids(tokenizer, **json.loads(json.dumps(p.request))) for p in prompts]
    return check_prompts(served, prompts, escaped, tokenizer)


@pytest.mark.parametrize("settings", [
    {}, {"supervise": "last"}, {"supervise": "all"}, {"as_chat": True},
    {"max_length": 20, "on_too_long": "split"}, {"max_length": 20, "on_too_long": "truncate"},
])  # fmt: skip
def test_requests_are_the_trained_tokens_in_every_format(
    tiny_config, tmp_path, chat_rows, settings
):
    settings = {f"data__{key}": value for key, value in settings.items()}
    sources = mix_of_formats(tmp_path, chat_rows)
    finding = check_requests(tiny_config(data__train_sources=sources, **settings))
    assert not finding.differs and re.search(r"requests of \d\d rows$", finding.text), finding


CALLS = """{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}
{%- for c in m.tool_calls -%}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}
{%- endfor -%}<|end|>{%- endgeneration -%}{%- else -%}{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>PROMPT{%- endif -%}"""


def test_tool_calls_and_a_prompt_that_training_has_never_seen(tiny_config, tmp_path):
    """Arguments are served as objects. Templates of reasoning models open a block in the prompt;
    rows without reasoning lack it, and a model trained on them is asked for what it has never seen.
    """
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    rows = [
        {"tools": tools, "messages": [
            {"role": "user", "content": f"{i} and 1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": f"It is {i}.", "weight": i % 2}]}
        for i in range(20)
    ]  # fmt: skip
    data = {"data__train_sources": [str(write_rows(tmp_path / "calls.jsonl", rows))]}
    template = tmp_path / "template.jinja"
    data |= {"model__chat_template": str(template), "data__eval_sources": None}
    template.write_text(CALLS.replace("PROMPT", ""))
    finding = check_requests(tiny_config(**data))
    assert not finding.differs and "50 requests of 20 rows" in finding.text, finding
    template.write_text("{{ strftime_now('%d %b %Y') }}" + CALLS.replace("PROMPT", ""))
    finding = check_requests(tiny_config(**data))
    assert not finding.differs, "of another day"
    template.write_text(CALLS.replace("PROMPT", "<think>"))
    config_file = tiny_config(**data)
    finding = check_requests(config_file)
    assert finding.differs
    config = parse_command_line(["--config", str(config_file)]).config
    warning = open_plans(config, 1)[2].data.meta["prompts"]  # before training, too
    assert warning.startswith("WARNING: in 20 rows the text before an answer lacks '<think>', with")
    assert re.search(
        r"calls.jsonl:1: the prompt of message 2: served token \d+ is '<", finding.text
    )


def check_card_of_the_hub(run_folder):
    checkpoint = list_complete(run_folder / "checkpoints")[-1]
    config = parse_command_line(["--config", str(run_folder / "resolved_config.yaml")]).config
    sources = [Source(hub="org/rows", split="train[:9]", revision="abc", weight=2.0)]
    config = replace(
        config,
        model=replace(config.model, name_or_path="org/base", revision="c0ffee"),
        data=replace(config.data, train_sources=sources),
    )
    state, manifest = read_state(checkpoint), read_manifest(checkpoint)
    card = ModelCard(model_card(config, state, manifest, About([], "FusedAdam")))
    assert card.data.base_model == "org/base" and card.data.datasets == ["org/rows"]
    assert "fine-tuned from `org/base` at c0ffee: 4 steps" in card.text
    assert "- training: `org/rows, train[:9]` at abc, weight 2\n" in card.text
    assert "## Evaluation" not in card.text


def change(checkpoint, name, old, new):
    """Replace text in a file of a checkpoint, and its size in the manifest."""
    file, manifest = checkpoint / name, checkpoint / "manifest.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    values = json.loads(manifest.read_text())
    values["files"][name]["bytes"] = file.stat().st_size
    manifest.write_text(json.dumps(values))


def test_whatever_differs_is_named_and_nothing_is_written_or_pushed(
    forks, command, hub, tiny_config, tmp_path
):
    config = tiny_config(train__epochs=None, train__steps=1)
    assert forks.train(config).code == 0
    [checkpoint] = list_complete(tmp_path / "run" / "checkpoints")
    change(checkpoint, "model/chat_template.jinja", "<|assistant|>", "<|user|>")
    change(checkpoint, "model/generation_config.json", '"eos_token_id": 1', '"eos_token_id": 5')
    change(checkpoint, "model/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0')
    code, printed, errors = command(checkpoint, tmp_path / "hf", "--verify", "--push", "lab/tiny")
    assert code == EXIT_FAILURE and not hub.private
    found = rows_of(printed)
    assert [name for name, text in found.items() if text.startswith("DIFFERS: ")] == [
        "evaluation loss", "prompts", "end tokens",
    ]  # fmt: skip
    assert "but rounding explains no more than" in found["evaluation loss"]
    assert re.search(
        r"eval.jsonl:1: the prompt of message \d: served token \d+ is '<\|user\|>', the trained "
        r"one '<\|assistant\|>'", found["prompts"],
    )  # fmt: skip
    assert "but answers were trained to end in '<|end|>'" in found["end tokens"]
    last = errors.splitlines()[-1]
    assert re.fullmatch(r"error: evaluation loss: .*; \S+hf is not written", last)
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


def test_what_cannot_be_checked_is_said(forks, command, tiny_config, tmp_path):
    """Plain rows, no held-out examples; then other rows, none, and no config."""
    rows = [{"prompt": f"{i} and one: ", "completion": f"{i + 1}"} for i in range(30)]
    file = write_rows(tmp_path / "plain.jsonl", rows)
    config = tiny_config(
        data__train_sources=[str(file)], data__eval_sources=None, train__epochs=None, train__steps=1
    )
    assert forks.train(config).code == 0
    code, printed, errors = command(tmp_path / "run", tmp_path / "hf")
    assert code == 0, printed + errors
    found = rows_of(printed)
    assert found["evaluation loss"] == "not checked: the run has no held-out examples"
    assert found["prompts"] == "the tokenizer gives the trained token ids in 20 requests of 20 rows"

    def refuse(message):
        with pytest.raises(UserError, match=message):
            command(tmp_path / "run", tmp_path / "no")
        assert not (tmp_path / "no").exists()

    write_rows(file, [{"prompt": "?", "completion": "!"}] * 30)
    refuse("--verify: the training data, or the options .* have changed since the checkpoint")
    file.unlink()
    refuse(f"--verify: the run's data are needed: no such file or folder: {file}")
    (tmp_path / "run" / "resolved_config.yaml").unlink()
    refuse("--verify: the checkpoint's run has no .*resolved_config.yaml")
    code, printed, _ = command(tmp_path / "run", tmp_path / "bare", "--dtype", "float32")
    assert code == 0 and "no model card: the checkpoint's run has no " in printed
    assert not (tmp_path / "bare" / "README.md").exists()


def test_the_stranger_imports_nothing_of_this_repository():
    assert imports_of(REPO / "checkpoint" / "stranger.py", modules(), types_too=True) == set()


# --------------------------------------------------------------------------------------------------
# Pushing


@pytest.fixture(scope="module")
def run_folder(forks, tiny_model, chat_rows, tmp_path_factory):
    """A run of adapters, with evaluations, and checkpoints of its steps 2 and 3."""
    folder = tmp_path_factory.mktemp("pushed")
    config = write_tiny_config(
        folder, chat_rows, tiny_model, model__lora={"r": 2}, train__epochs=None, train__steps=3,
        eval__every_steps=1, checkpoint={"every_steps": 2},
    )  # fmt: skip
    finished = forks.train(config)
    assert finished.code == 0, finished.output
    return folder / "run"


def test_a_push_is_the_whole_folder_and_replaces_older_weights(
    hub, command, run_folder, tmp_path
):  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    older = run_folder / "checkpoints" / "step_00000002"
    code, printed, _ = command(older, first, "--push", "lab/tiny", "--max_shard_size", "30KB")
    assert code == 0 and f"{hub.url}/lab/tiny (private)" in printed
    pushed = hub.files("lab/tiny")
    assert pushed == {file.name: file.read_bytes() for file in first.iterdir()}
    assert len([name for name in pushed if name.endswith(".safetensors")]) > 2
    assert hub.private == {"lab/tiny": True} and hub.commits == ["step_00000002 of run"]

    flags = "--push", "lab/tiny", "--public", "--license", "apache-2.0"
    code, printed, _ = command(run_folder, second, *flags)
    assert code == 0 and f"{hub.url}/lab/tiny (private)" in printed, "it was, and stays so"
    assert hub.files("lab/tiny") == {file.name: file.read_bytes() for file in second.iterdir()}
    assert hub.commits[1:] == ["step_00000003 of run"]
    before, card = (ModelCard.load(folder / "README.md") for folder in (first, second))
    assert before.data.license is None and "License\n\nNot set." in before.text
    assert card.data.license == "apache-2.0" and "License\n\n`apache-2.0`; the " in card.text
    assert (
        "| optimizer | AdamW, betas 0.9 and 0.999, epsilon 1e-08, weight decay 0.1 |" in card.text
    )
    assert "| adapters | LoRA, rank 2, alpha 32, dropout 0 |" in card.text
    assert "![Loss by step](training_loss.png)" in card.text
    picture = imread(second / "training_loss.png")
    assert picture.shape[:2] == (675, 1200)
    for color in ("#4878a8", "#e08a4a"):  # both lines
        assert (abs(picture[..., :3] - to_rgb(color)).max(-1) < 0.01).sum() > 500

    adapters = tmp_path / "adapters"
    code, printed, _ = command(
        run_folder, adapters, "--adapter", "--push", "ada/adapters", "--public"
    )
    assert code == 0 and f"{hub.url}/ada/adapters (public)" in printed
    assert "adapter_model.safetensors" in hub.files("ada/adapters")
    card = ModelCard.load(adapters / "README.md")
    assert card.data.library_name == "peft"
    assert "LoRA adapters, trained on `tiny_model0` (a local folder): 3 steps" in card.text


def test_nothing_is_exported_that_could_not_be_pushed(
    hub, command, run_folder, tmp_path, monkeypatch
):  # fmt: skip
    out = tmp_path / "hf"

    def refuse(message, repo="lab/tiny", *flags):
        with pytest.raises(UserError, match=message) as refused:
            command(run_folder, out, "--push", repo, *flags)
        assert "\n" not in str(refused.value) and "hf_" not in str(refused.value)
        assert not hub.folder.exists() and not hub.commits
        return str(refused.value)

    refuse(
        "--push: other/tiny is not OWNER/NAME with one of your owners at .*: ada, lab", "other/tiny"
    )
    refuse("--push: tiny is not OWNER/NAME", "tiny")
    refuse("--push: .*: Repo id must use alphanumeric", "lab/my model")
    hub.private["lab/tiny"] = False
    refuse("--push: lab/tiny is public; add --public, or choose another repository")
    hub.private.clear()
    with pytest.raises(UserError, match="--public: add --push OWNER/NAME"):
        command(run_folder, out, "--public")

    monkeypatch.setenv("HF_TOKEN", "hf_read")
    refuse("--push: the token for .* may only read; log in with `hf auth login`, or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    refuse(r"--push: .*: refused \(401\): Invalid user token")
    monkeypatch.delenv("HF_TOKEN")
    refuse("--push: there is no token for .*; log in with `hf auth login`, or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    refuse(f"--push: {nobody}/lab/tiny: cannot be reached or does not answer: ")
    copied = tmp_path / "copied" / "step_00000003"
    shutil.copytree(run_folder / "checkpoints" / copied.name, copied)
    with pytest.raises(UserError, match=r"--push: the checkpoint's run has no .*resolved_config"):
        command(copied, out, "--push", "lab/tiny")
    assert not out.exists() and not list(tmp_path.glob(".hf*"))


def test_a_refused_push_leaves_a_whole_export(hub, command, run_folder, tmp_path):
    out = tmp_path / "hf"
    hub.refuses_to_create = True
    with pytest.raises(UserError, match=r"refused \(403\): You don't have the rights") as refused:
        command(run_folder, out, "--push", "lab/tiny")
    assert str(refused.value).endswith(f"; {out} is complete: `hf upload lab/tiny {out}` pushes it")
    assert not hub.commits and (out / "model.safetensors").exists()
