"""Held-out sets, generations, early stop and the best checkpoint.

pytest tests/test_evaluation.py
"""

import json
import math
import time

import pytest
from conftest import read_metrics, write_rows

from checkpoint.export import export_checkpoint
from checkpoint.find import best_checkpoint
from checkpoint.run_folder import list_complete
from checkpoint.state import Progress
from config.parse import dump_config, parse_command_line
from data.check_sources import parse_with_sources
from data.questions import choose_questions
from data.scorers import contains, exact_match
from data.tokenize import open_cache, tokenize_sources
from runtime.errors import UserError


def complaint(config, *flags):
    with pytest.raises(UserError) as caught:
        parse_with_sources(["--config", str(config), *flags])
    return str(caught.value)


def test_sets_have_names_and_metrics_exist(tiny_config, tmp_path, chat_rows):
    rows = str(write_rows(tmp_path / "rows.jsonl", chat_rows[:4]))
    sets = {"math": [rows], "code": [rows, {"path": rows, "ignore_keys": ["id"]}], "empty": []}
    path = tiny_config(data__eval_sources=sets)
    config = parse_command_line(["--config", str(path)]).config
    assert config.data.set_names() == ["math", "code"]
    assert [s.ignore_keys for s in config.data.sources("eval_sources")] == [[], [], ["id"]]
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert parse_command_line(["--config", str(tmp_path / "dumped.yaml")]).config == config
    assert "data.eval_sources.math[0].pth: unknown key; did you mean" in complaint(
        tiny_config("bad.yaml", data__eval_sources={"math": [{"pth": rows}]})
    )
    assert "'a/b' is not a name for a set" in complaint(
        tiny_config("bad.yaml", data__eval_sources={"a/b": [rows]})
    )
    assert "eval.metric: loss/prose is not measured; choose one of eval_loss, loss/math, " in (
        complaint(path, "--eval.metric", "loss/prose")
    )
    assert "or set eval.generate for scores" in complaint(path, "--eval.metric", "score/math")
    flags = ["--eval.metric", "score/math", "--eval.generate", "2", "--eval.scorer", "contains"]
    assert parse_with_sources(["--config", str(path), *flags]).config.eval.generate == 2
    assert "eval.scorer: os.system is not one of exact_match, contains" in complaint(
        path, "--eval.scorer", "os.system"
    )
    assert "eval.patience: needs eval.every_steps, and" in complaint(path, "--eval.patience", "2")
    assert "eval.generate: needs data.supervise answers or last" in complaint(
        path, "--eval.generate", "2", "--data.supervise", "all"
    )
    for old, new in {"eval_every_steps": "every_steps", "eval_at_start": "at_start"}.items():
        said = complaint(tiny_config("bad.yaml", **{f"train__{old}": 1}))
        assert said.endswith(f": train.{old}: is now eval.{new}") and "bad.yaml:" in said
        assert f"train.{old}: is now eval.{new}" in complaint(path, f"--train.{old}", "1")


def test_a_prompt_is_what_the_template_gives(tiny_config, tmp_path, chat_rows, sample_tokenizer):
    """Also for several turns, with plain text and cut rows left out."""
    chat = [row["messages"] for row in chat_rows[:6]]
    rows = [{"messages": messages} for messages in (chat[0] + chat[1], *chat[2:])]
    many = {"messages": chat[0] * 9}  # cut at data.max_length
    config = tiny_config(data__eval_sources=[str(write_rows(tmp_path / "a.jsonl", [many, *rows]))])
    data = parse_command_line(["--config", str(config)]).config.data
    cache = open_cache(tokenize_sources(data.sources("eval_sources"), sample_tokenizer, data))
    questions = choose_questions("a", cache, data.max_length, 99)
    assert len(questions) == len(rows)
    for row, question in zip(rows, questions, strict=True):
        turns = row["messages"]
        served = sample_tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True)
        assert question.prompt.tolist() == served["input_ids"]
        text = sample_tokenizer.decode(question.expected)
        assert text == turns[-1]["content"] + "<|end|>"
    some = choose_questions("a", cache, data.max_length, 2)
    assert [q.prompt.tolist() for q in some] == [questions[i].prompt.tolist() for i in (0, -1)]
    with pytest.raises(UserError, match="no example of the set a is a question with a whole"):
        choose_questions("a", cache, 2, 1)


def test_scores_and_what_is_best():
    assert exact_match("p", "42", " 42\n") == 1 and exact_match("p", "42", "142") == 0
    assert contains("p", "42", "142") == 1
    progress = Progress(step=2)
    for step, loss, score, best, since in (
        (2, 3.0, 0.1, 2, 0), (4, 2.0, 0.3, 4, 0), (6, 1.0, 0.3, 4, 1), (8, math.nan, 0.2, 4, 2),
    ):  # fmt: skip
        progress = Progress(step=step, best=progress.best)
        progress = progress.evaluated(loss, {"exact_match/a": score}, "exact_match/a")
        assert (progress.best.step, progress.best.evaluations_since) == (best, since)
    progress = Progress(step=9, best=progress.best).evaluated(math.nan, {}, "eval_loss")
    assert progress.best.step == 9, "another metric starts anew"
    assert Progress(step=10, best=progress.best).evaluated(5.0, {}, "eval_loss").best.step == 10


@pytest.fixture
def sets(tmp_path, chat_rows):
    short = sorted(chat_rows, key=lambda row: len(json.dumps(row)))
    return {
        "first": [str(write_rows(tmp_path / "first.jsonl", chat_rows[:9]))],
        "second": [str(write_rows(tmp_path / "second.jsonl", short[:5]))],
    }


def test_the_same_numbers_and_texts_on_any_number_of_ranks(
    forks, tiny_config, tmp_path, sets, sample_tokenizer
):
    """And the answers that generate() gives for the export."""
    config = tiny_config(
        data__eval_sources=sets, train__epochs=None, train__steps=3, train__learning_rate=0.02,
        eval={"generate": 3, "max_new_tokens": 12, "scorer": "contains"},
    )  # fmt: skip
    found = {}
    for ranks, stage in ((1, 0), (2, 3)):
        folder = tmp_path / f"on_{ranks}"
        flags = ["--output_dir", folder, "--ds_config", f"ds_configs/zero{stage}.json"]
        finished = forks.train(config, *flags, ranks=ranks)
        assert finished.code == 0, finished.output
        found[ranks] = read_metrics(folder, "eval"), read_metrics(folder, "generations")
    (alone, alone_texts), (shared, shared_texts) = found.values()
    names = [f"{kind}/{name}" for name in sets for kind in ("loss", "perplexity", "score")]
    assert [e["step"] for e in alone] == [e["step"] for e in shared] == [0, 3]
    for one, other in zip(alone, shared, strict=True):
        assert [key for key in one if "/" in key] == names
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-5)
        assert one["eval_loss"] == one["loss/first"] != one["loss/second"]
        assert one["perplexity/second"] == pytest.approx(math.exp(one["loss/second"]))
    assert [line["rows"] for line in alone_texts] == [line["rows"] for line in shared_texts]
    assert [(t["step"], t["set"], len(t["rows"])) for t in alone_texts] == [
        (0, "first", 3), (0, "second", 3), (3, "first", 3), (3, "second", 3),
    ]  # fmt: skip
    for row in alone_texts[0]["rows"]:
        assert row["prompt"].startswith("<|user|>") and row["prompt"].endswith("<|assistant|>")
        assert row["expected"].startswith(tuple("0123456789")) and "<|end|>" not in row["expected"]

    from transformers import AutoModelForCausalLM

    export_checkpoint(list_complete(tmp_path / "on_2" / "checkpoints")[-1], tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for row in [row for line in alone_texts[2:] for row in line["rows"]]:
        ids = sample_tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=12, do_sample=False)
        said = sample_tokenizer.decode(new[0, ids["input_ids"].shape[1] :])
        assert said.partition("<|end|>")[0] == row["answer"]


def test_it_learns_to_answer(forks, tiny_config, tmp_path, chat_rows):
    """One short row until it is known by heart: exact match goes from 0 to 1."""
    row = min(chat_rows, key=lambda row: len(json.dumps(row)))
    file = str(write_rows(tmp_path / "one.jsonl", [row]))
    config = tiny_config(
        data__train_sources=[file], data__eval_sources=[file], train__epochs=60,
        train__global_batch_size=1, train__warmup_examples=0, train__learning_rate=0.01,
        eval={"generate": 1, "metric": "exact_match/held_out"},
    )  # fmt: skip
    finished = forks.train(config)
    assert finished.code == 0, finished.output
    assert [e["exact_match/held_out"] for e in read_metrics(tmp_path / "run", "eval")] == [0, 1]
    assert "best: step 60, exact_match/held_out 1.0000, " in finished.output
    last = read_metrics(tmp_path / "run", "generations")[-1]["rows"]
    assert [r["answer"] for r in last] == [row["messages"][-1]["content"]]


def test_early_stop_is_the_end_and_the_best_is_kept(forks, tiny_config, tmp_path):
    """At a learning rate of 0 no evaluation is better than the first."""
    config = tiny_config(
        train__epochs=None, train__steps=20, train__learning_rate=0.0, checkpoint={"keep_best": 1},
        eval={"every_steps": 2, "at_start": False, "patience": 2},
    )  # fmt: skip
    folder = tmp_path / "run"
    checkpoints = [folder / "checkpoints" / f"step_0000000{step}" for step in (2, 6)]
    why = "early stop at step 6: 2 evaluations without a better eval_loss (eval.patience)"
    for _ in range(2):  # started again it says so again
        finished = forks.train(config)
        assert finished.code == 0, finished.output
        assert "finished: step 6, 70 examples, " in finished.output and why in finished.output
        assert re_best(finished.output) == str(checkpoints[0])
        assert list_complete(folder / "checkpoints") == checkpoints
        assert [line["step"] for line in read_metrics(folder)] == list(range(1, 7))
        [event] = read_metrics(folder, "event")
        assert (event["step"], event["name"], event["text"]) == (6, "early_stop", why)
    assert best_checkpoint(checkpoints[1]) == checkpoints[0], "what export.py --best exports"
    finished = forks.train(config, "--eval.patience", "3")
    assert finished.code == 0 and "finished: step 8, " in finished.output, finished.output


def re_best(output):
    [line] = [line for line in output.splitlines() if line.startswith("best: step 2, eval_loss ")]
    return line.rpartition(", ")[2]


def test_preempted_while_it_generates(forks, tiny_config, tmp_path, chat_rows):
    """One of two ranks: all stop after the same token, save, and the resumed run begins with the
    evaluation.
    """
    one = str(write_rows(tmp_path / "one.jsonl", chat_rows[:1]))
    config = tiny_config(
        data__eval_sources=[one], train__epochs=None, train__steps=2,
        eval={"every_steps": 2, "at_start": False, "generate": 1, "max_new_tokens": 400},
        ds_config="ds_configs/zero3.json",
    )  # fmt: skip
    process, folder = forks.start(config, ranks=2), tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    process.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    time.sleep(0.1)  # the evaluation of one row takes a hundredth
    process.kill(1, 15)
    finished = process.wait()
    assert finished.code == 75 and "preempted, saved: step 2, " in finished.output, finished.output
    assert not read_metrics(folder, "eval") and not read_metrics(folder, "generations")
    finished = forks.train(config, "--eval.max_new_tokens", "4", ranks=2)
    assert finished.code == 0 and "finished: step 2, " in finished.output, finished.output
    assert [line["step"] for line in read_metrics(folder, "generations")] == [2]
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
