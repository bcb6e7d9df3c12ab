"""Runs drawn as one page.    pytest tests/tools/test_report.py"""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from harness.cures import refused

pytest.importorskip("plotly")

from scripts import compare_runs, report
from zerotrain.runtime.errors import UserError
from zerotrain.tools.report import (
    MAX_POINTS,
    MAX_SERIES,
    loss_chart,
    read_run,
    report_page,
    thin,
)

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=alert(1)> {{7*7}}"


def write_run(folder, steps, hostile=""):
    """A run folder with every kind of record, once resumed on fewer ranks; returns it."""
    folder.mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(f"train:\n  seed: {steps}\n  x: {hostile}\n")
    (folder / "resolved_ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    start = {"kind": "start", "step": 0, "world_size": 8, "ranks": {"node-0: x" + hostile: 8}}
    records = [start]
    for step in range(1, steps + 1):
        if step == steps // 2:
            records.append({**start, "step": step - 1, "world_size": 4})
        records.append({
            "kind": "train", "step": step, "loss": 5 / step**0.3 + step % 2, "lr": 1e-4,
            "source_loss/math": 4.0, "source_loss/chat": 6.0,
            "grad_norm": 1.0 + step % 7, "tokens_per_s": 8000.0, "mfu": 0.4,
            "padding_efficiency": 0.95, "step_seconds": 0.5, "data_seconds": 0.00025,
            "forward_seconds": 0.15, "backward_seconds": 0.25, "memory_peak_gib": 64.0,
        })  # fmt: skip
        if step % max(1, steps // 10) == 0:
            answer = {"prompt": "1+1?" + hostile, "answer": "\ud800" + hostile, "score": 0.0}
            records += [
                {"kind": "eval", "step": step, "loss/held_out" + hostile: 3, "exact_match/b": 0.5},
                {"kind": "generations", "step": step, "set": "b" + hostile, "rows": [answer] * 3},
                {"kind": "ranks", "step": step, "step_seconds": 0.5, "ranks": [
                    {"host": f"node-{i // 4}{hostile}", "compute_seconds": 1.0 + i,
                     "work": 1.0 + i, "data_seconds": 0.1 * (i == 7)} for i in range(8)]},
            ]  # fmt: skip
    records.append({"kind": "event", "step": steps, "name": "x" + hostile, "text": hostile})
    lines = [json.dumps({"time": 1.8e9 + r["step"] / 2, **r}) + "\n" for r in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    stalls = [
        {"time": 1.8e9 + second, "host": f"node-1{hostile}", "stalled_seconds": 2.5}
        for second in (20, 30)
    ]
    (folder / "stalls.jsonl").write_text("\n".join(map(json.dumps, [*stalls, [1], {}])))
    return folder


@pytest.fixture
def draw(monkeypatch):
    """scripts/report.py, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        report.main()

    return run


def test_a_run_is_drawn_with_all_that_it_has_recorded(draw, tmp_path, capsys):
    draw(write_run(tmp_path / "run", 200))
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"
    page = (tmp_path / "run" / "report.html").read_text().partition("<h1>")[2]
    first, *folded = page.split("<details")
    for text in (
        "200 steps on 4 ranks", "held out: 3.000", "<b>0:01:40</b><br>time", "<b>1</b><br>restarts",
        "<b>4</b><br>incidents", "<b>8,000</b><br>tokens/s", "Learning rate", "of each source",
        '"name":"math"',
        "Gradient norm", "<b>100.0%</b><br>goodput",
    ):  # fmt: skip
        assert text in first, text
    for text in (
        "<td>useful steps</td>",
        "MFU", "match exactly", "not padding", "Peak memory", "Seconds of a step", "Computing on",
        "Waiting for data", '"name":"max"', "Incidents",
        "<td>1+1?</td><td></td><td>?</td><td>0.0</td>", "<tr><td>0</td><td>8</td>",
        "<td>60</td><td>rank 7 @ node-1 is slow, 3 times in a row: compute_seconds 8, work 8",
        "<td>60</td><td>node-1 did not run for 5.0 s, 2 times</td>",
        "<td>99</td><td>4</td><td>8 x node-0: x</td>", "seed: 200",
    ):  # fmt: skip
        assert any(text in part for part in folded), text
    assert re.findall(r"Answers at step [^<]*", page) == [
        f"Answers at step {n}: b" for n in (20, 200)
    ]
    assert page.count('"text":"step"') == page.count("Plotly.newPlot(") > 8


def test_the_best_loss_is_of_the_set_as_it_is_now(tmp_path):
    """A resumed run has other examples in one of its sets."""
    run = write_run(tmp_path / "run", 1)
    lines = [
        {"kind": kind, "step": step, **values}
        for step, a in ((0, "1"), (2, "2"), (2, "2"))
        for kind, values in (
            ("start", {"held_out": {"a": a, "b": "1"}}),
            ("eval", {"loss/a": float(a), "loss/b": step + 1.0, "exact_match/a": 0.1}),
        )
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    series = read_run(run).series
    assert [dict(series[key]) for key in ("loss/a", "exact_match/a")] == [{2: 2.0}, {2: 0.1}]
    assert dict(series["loss/b"]) == {0: 1.0, 2: 3.0}


def test_each_kind_of_loss_has_a_color_and_few_steps_are_smoothed_too(tmp_path):
    run = write_run(tmp_path / "run", 36)
    chart = loss_chart([read_run(run)])
    traces, _ = json.JSONDecoder().raw_decode(chart, chart.index("[{"))
    raw, smooth, held_out = traces
    assert len({trace["line"]["color"] for trace in traces}) == 3
    assert held_out["name"] == "held out" and raw["y"] != smooth["y"]


def test_thinning_keeps_every_spike():
    y = pd.Series(np.sin(np.arange(100_000) / 9_000), index=np.arange(1, 100_001))
    y.iloc[[7, 31_415, 99_990]] = [9, -9, 8]
    kept = thin(y)
    assert len(kept) <= MAX_POINTS + 10 and kept.index.is_monotonic_increasing
    assert {9.0, -9.0, 8.0} <= set(kept) and (kept == y[kept.index]).all()


def test_an_incomplete_run_is_drawn_and_says_what_is_missing(tmp_path):
    broken = (
        '{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "train", "step": 2, "lo\n[]\n7\n\xff\n'
        '{"kind": "train", "step": -1}\n{"kind": "train", "step": true}\n' + "[" * 10_000
    )
    for text, problem in (
        ("", "no step is recorded"),
        (broken, "metrics.jsonl: 7 lines cannot be read"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
        assert problem in report_page([tmp_path])
    assert read_run(tmp_path).series["loss"].tolist() == [2.0]


def test_memory_and_time_do_not_follow_from_what_a_stranger_has_written(tmp_path):
    """Keys of its own in each step, many events, a nested one, and configs of many lines."""
    runs = []
    for name in "ab":
        runs.append(write_run(tmp_path / name, 3))
        lines = [f"{name}{i}: 1" for i in range(20_000)]
        (runs[-1] / "resolved_config.yaml").write_text("\n".join(lines))
        with (runs[-1] / "metrics.jsonl").open("a") as file:
            for step in range(4, 304):
                keys = {f"{kind}{step}_{i}": 1 for kind in ("loss/", "x") for i in range(20)}
                file.write(json.dumps({"kind": "train", "step": step, **keys}) + "\n")
                file.write(json.dumps({"kind": "event", "step": step, "text": step}) + "\n")
            file.write('{"kind": "event", "step": 9, "text": ' + "[" * 700 + "]" * 700 + "}\n")
    run = read_run(runs[0])
    assert len(run.series) == MAX_SERIES and "x4_0" not in run.series
    page = report_page(runs)
    assert "50 series" in page and "<b>304</b><br>incidents" in page
    assert "+b1999: 1" not in page and "+b1990: 1" in page


def test_what_cannot_be_drawn_is_refused(draw, tmp_path):
    refused("not a run folder", draw, tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    refused("not a regular file", draw, tmp_path)
    run = write_run(tmp_path / "run", 2)
    (tmp_path / "secret").write_text("hunter2")
    (run / "resolved_config.yaml").unlink()
    (run / "resolved_config.yaml").symlink_to(tmp_path / "secret")
    os.truncate(run / "resolved_ds_config.json", 1 << 40)
    page = report_page([run])
    assert "hunter2" not in page and "resolved_ds_config.json has more than" in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
def test_the_page_in_a_browser_is_drawn_and_runs_no_text_of_a_run(draw, tmp_path):
    """20,000 steps over another run, on a telephone: all charts are there, none scrolls sideways,
    and the title is the runs' names.
    """
    runs = [write_run(tmp_path / n / "run<b>", k, HOSTILE) for n, k in (("a", 20_000), ("b", 9))]
    page = tmp_path / "page.html"
    to = [*runs, "--output"]
    named = "cannot write ... ; give another file with --output"
    refused(named, lambda words: draw(*words), [*to, tmp_path], [*to, page])
    assert page.stat().st_size < 10e6, "4.8 MB of it are plotly"
    measure = "setTimeout(() => { document.body.dataset.width = document.body.scrollWidth }, 9000)"
    narrow = "max-width: 388px; margin: 0;"  # and its padding: 420
    assert "max-width: 84rem; margin: 0 auto;" in page.read_text()
    drawn = page.read_text().replace("max-width: 84rem; margin: 0 auto;", narrow)
    page.write_text(f"{drawn}<script>{measure}</script>")
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
         f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         f"file://{page}"],
        capture_output=True, text=True, timeout=500, check=True,
    ).stdout  # fmt: skip
    assert f"<title>{tmp_path}/a/run&lt;b&gt; · {tmp_path}/b/run&lt;b&gt;</title>" in shown
    assert shown.count('class="main-svg"') >= 3 and "<img" not in shown.partition("<h1>")[2]
    assert "train.x" not in shown and "-  seed: 20000" in shown, "the configs' difference"
    assert int(re.search(r'data-width="(\d+)"', shown)[1]) <= 420


@pytest.mark.parametrize(
    "changed, code",
    [
        ({}, 0),
        ({step: None for step in range(16, 21)}, 0),  # it is shorter
        ({15: None}, 1),
        ({20: math.nan}, 1),
        ({7: 2.1}, 1),
        (dict.fromkeys(range(1, 21)), "no steps; give a run that has trained"),
    ],
)
def test_curves_are_compared(tmp_path, monkeypatch, capsys, changed, code):
    """A run of 20 steps and one whose loss differs in some, where None is a missing step."""
    losses = dict.fromkeys(range(1, 21), 2.0)
    runs = {tmp_path / "before": losses, tmp_path / "after": losses | changed}
    for folder, run in runs.items():
        folder.mkdir()
        records = [
            {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0}
            for step, loss in run.items()
            if loss is not None
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, runs)])
    with pytest.raises((SystemExit, UserError)) as ended:
        compare_runs.main()
    assert str(code) in str(ended.value), capsys.readouterr().out
