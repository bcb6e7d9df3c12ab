"""The worked changes in docs/changes apply to this tree, alone and together, and do what the page
says.    pytest tests/test_changes.py
"""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, ForkServer, determined, read_metrics, write_rows, write_tiny_config
from test_readme import tracked_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint.shards import Shards

CHANGES = REPO / "docs" / "changes"
DIFFS = sorted(CHANGES.glob("*.diff"))
RENEW = "renew it as docs/changes/README.md says"
Z_LOSS = 0.01
PAIRS = [
    (f"Row {i} of the table is {7 * i} high.\n\nHow high is row {i}?\n\n", f"{7 * i} high")
    for i in range(12)
]


def apply(folder, *arguments):
    done = subprocess.run(
        ["git", "apply", *map(str, arguments)], cwd=folder, capture_output=True, text=True
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_each_change_applies_alone_and_is_on_the_page(diff):
    assert not (problem := apply(REPO, "--check", diff)), f"{RENEW}: {problem}"
    assert f"({diff.name})" in (CHANGES / "README.md").read_text()


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the repository with all changes, and a fork server of it."""
    copy = tmp_path_factory.mktemp("changed")
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, copy / name)
    assert len(DIFFS) == 5
    for diff in DIFFS:
        assert not (problem := apply(copy, diff)), f"{RENEW}: {diff.name}: {problem}"
    for command in (("check", "-q"), ("format", "--check", "-q")):
        subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=copy, check=True)
    server = ForkServer(tmp_path_factory.mktemp("forks"), copy)
    yield server
    server.close()


@pytest.fixture
def start(changed, tmp_path, tiny_model):
    """Trains the tiny model for three steps of twelve rows, in a run folder of its own."""
    squad = [
        {"id": str(i), "context": prompt.split("\n\n")[0], "question": prompt.split("\n\n")[1],
         "answers": {"text": [answer, "high"], "answer_start": [0, 0]}}
        for i, (prompt, answer) in enumerate(PAIRS)
    ]  # fmt: skip
    plain = [{"prompt": prompt, "completion": answer} for prompt, answer in PAIRS]
    write_rows(tmp_path / "squad.jsonl", squad)
    write_rows(tmp_path / "plain.jsonl", plain)

    def run(name, rows, *flags, ranks=1):
        config = write_tiny_config(
            tmp_path, [], tiny_model, data__train_sources=[str(tmp_path / rows)],
            data__eval_sources=None, train__epochs=None, train__steps=3, train__z_loss=Z_LOSS,
            train__warmup_examples=0, tracking__prometheus=str(tmp_path / f"{name}.prom"),
        )  # fmt: skip
        folder = tmp_path / name
        finished = changed.train(config, "--output_dir", folder, *flags, ranks=ranks)
        return folder, finished

    return run


def by_hand(model):
    """The model with the gradient of mean cross entropy plus z-loss over the supervised tokens of
    all rows, in plain torch, one row at a time; what `metrics.jsonl` should say; and the numbers of
    tokens and of supervised ones.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = AutoModelForCausalLM.from_pretrained(model)
    tokens, supervised = 0, []
    for prompt, answer in PAIRS:
        asked = tokenizer(prompt)["input_ids"]
        said = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
        log_z = logits.logsumexp(-1)
        supervised.append(torch.stack([log_z - logits[range(len(said)), said], log_z.square()]))
        tokens += len(asked) + len(said)
    both = torch.cat(supervised, 1)
    loss, z_loss = both.mean(1) * torch.tensor([1, Z_LOSS])
    (loss + z_loss).backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    values = {"loss": loss.item(), "z_loss": z_loss.item(), "grad_norm": norm.item()}
    return model, values, (tokens, both.shape[1])


@pytest.mark.launch
def test_loss_format_metric_and_sink(start, tmp_path, tiny_model):
    """On one rank and SQuAD's rows as on two ranks and the same rows as prompt and completion."""
    folder, finished = start("squad", "squad.jsonl")
    assert finished.code == 0, finished.output
    steps = read_metrics(folder)
    _, expected, counts = by_hand(tiny_model)
    assert {key: steps[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert steps[0]["z_loss"] > 0.05 * steps[0]["loss"], "large enough to be seen in the sum"
    for step in steps:
        assert (step["tokens"], step["supervised_tokens"]) == counts
        assert step["supervised_share"] == counts[1] / counts[0]

    other, finished = start("plain", "plain.jsonl", ranks=2)
    assert finished.code == 0, finished.output
    keys = ("loss", "z_loss", "grad_norm", "supervised_share", "tokens")
    for one, two in zip(steps, read_metrics(other), strict=True):
        assert {key: one[key] for key in keys} == pytest.approx(
            {key: two[key] for key in keys}, rel=1e-5
        )
    assert steps[2]["z_loss"] < steps[0]["z_loss"]
    resolved = (folder / "resolved_config.yaml").read_text()
    assert "z_loss: 0.01" in resolved and "format: auto" in resolved

    lines = (tmp_path / "squad.prom").read_text().splitlines()
    gauges = dict(re.fullmatch(r'(training_\w+)\{run="squad"\} (\S+)', x).groups() for x in lines)
    assert gauges["training_step"] == "3" and gauges["training_exit_code"] == "0"
    for key in ("train_loss", "train_z_loss", "data_supervised_share"):
        assert float(gauges[f"training_{key}"]) == steps[2][key.partition("_")[2]]


@pytest.mark.launch
def test_the_optimizer_is_lion_and_resumes(start, tmp_path, tiny_model):
    lion = [
        "--ds_config", "ds_configs/zero2_lion.json", "--train.adam_betas", "[0.9, 0.99]",
        "--train.learning_rate", "0.001", "--train.lr_schedule", "constant",
        "--train.weight_decay", "0", "--checkpoint.every_steps", "1", "--checkpoint.keep_last", "9",
    ]  # fmt: skip
    folder, finished = start("lion", "plain.jsonl", *lion, ranks=2)
    assert finished.code == 0, finished.output
    first = folder / "checkpoints" / "step_00000001"
    start_model, values, _ = by_hand(tiny_model)
    clip, now, moved = 0.5 / values["grad_norm"], Shards(first), []
    assert clip < 0.5, "the gradient is clipped"
    for name, p in start_model.named_parameters():
        momentum = now.read(name, "exp_avg", 0, p.numel())
        torch.testing.assert_close(
            momentum, (1 - 0.99) * clip * p.grad.flatten(), rtol=1e-3, atol=1e-7
        )
        moved.append((now.weight(name) - p.detach()).flatten())
    moved = torch.cat(moved).abs()
    is_step = (moved - 0.001).abs() < 1e-6
    assert (is_step | (moved == 0)).all() and is_step.float().mean() > 0.95, "a sign times the rate"

    again = tmp_path / "again" / "checkpoints"
    again.mkdir(parents=True)
    shutil.copytree(first, again / first.name)
    resumed, finished = start("again", "plain.jsonl", *lion, ranks=2)
    assert finished.code == 0 and "resuming from" in finished.output, finished.output
    assert determined(resumed) == determined(folder)[1:]

    _, refused = start("adamw", "plain.jsonl", *lion[2:], "--checkpoint.resume", first)
    assert refused.code == 2 and len(refused.errors) == 1, refused.output
    assert "with Lion, 2 shards" in refused.errors[0]
    assert "only AdamW's state of the same parameters can be converted" in refused.errors[0]
