"""Runs drawn as one page.    pytest tests/test_report.py"""

import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import read_metrics

from checkpoint.lock import RunLock
from runtime.errors import UserError
from scripts import report
from tracking.history import read_history
from tracking.jsonl import JsonlSink
from tracking.report import report_page
from tracking.report_charts import MOST_POINTS, smooth, thin

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=alert(1)> {{7*7}}"


def write_run(folder, steps, hostile="", seed=0, **config):
    """A run folder with every kind of record; returns it."""
    folder.mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(json.dumps({"train": {"seed": seed, **config}}))
    (folder / "resolved_ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    random = np.random.default_rng(seed)
    noise, every = random.standard_normal(steps + 1), max(1, steps // 20)
    names = [f"node-{i // 4}{hostile}" for i in range(8)]
    start = {"hosts": ["node-0", "node-1"], "gpus": [["H200"] * 4] * 2, "world_size": 8,
             "versions": {"torch": "2.13.0", "x" + hostile: hostile}}  # fmt: skip
    records = [{"kind": "start", "step": 0, **start}]
    records.append({"kind": "eval", "step": 0, "loss/math" + hostile: 6.0, "loss/chat": 6.5,
                    "exact_match/chat": 0.0, "perplexity/chat": 660.0})  # fmt: skip
    for step in range(1, steps + 1):
        if step == steps // 2:
            records.append({"kind": "start", "step": step - 1, **start, "world_size": 4,
                            "hosts": ["node-0"], "gpus": [["H200"] * 4]})  # fmt: skip
        seconds = 0.5 + 0.02 * abs(noise[step]) + (step % 997 == 0)
        records.append({
            "kind": "train", "step": step, "loss": 5 / step**0.3 + 0.1 * noise[step],
            "lr": 1e-4 * min(1, step / 100), "grad_norm": math.exp(noise[step]), "tokens": 4096,
            "tokens_per_s": 4096 / seconds, "mfu": 0.4 + 0.01 * noise[step],
            "padding_efficiency": 0.95, "step_seconds": seconds, "data_seconds": 0.01,
            "forward_seconds": 0.15, "backward_seconds": 0.25, "memory_peak_bytes": 2**36,
            "update_skipped": False,
        })  # fmt: skip
        if step % every == 0:
            records.append({"kind": "eval", "step": step, "eval_loss": 3.0,
                            "loss/math" + hostile: 6 / step**0.2, "loss/chat": 6.5 / step**0.2,
                            "exact_match/chat": step / steps, "perplexity/chat": 9.0})  # fmt: skip
            records.append({"kind": "save", "step": step, "save_seconds": 2.5})
            own = (0.4 + 0.01 * random.random(8)) * [1, 1, 1, 1, 1, 1, 1, 1.4]
            gpu = {"temperature_celsius": 60, "sm_clock_mhz": 1900, "power_watts": 650}
            records.append({"kind": "ranks", "step": step, "own_seconds": own.tolist(),
                            "gpu": [gpu] * 8, "hosts": names})  # fmt: skip
            answer = {"prompt": "1+1?" + hostile, "expected": "2", "answer": "\ud800" + hostile}
            records.append({"kind": "generations", "step": step, "set": "chat" + hostile,
                            "rows": [{**answer, "score": 0.5}] * 3})  # fmt: skip
    records.append({"kind": "event", "step": steps, "name": "slow_rank" + hostile,
                    "text": "rank 7 @ node-1: 1.4 times the median rank" + hostile})  # fmt: skip
    lines = [json.dumps({"time": 1.8e9 + r["step"] / 2, **r}) + "\n" for r in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_thinning_keeps_every_spike_and_says_nothing_else():
    y = np.sin(np.arange(100_000) / 9_000)
    y[[7, 31_415, 99_990]], y[50_000] = [9, -9, 8], math.nan
    x = np.arange(1, len(y) + 1.0)
    kept_x, kept_y = thin(x, y)
    assert len(kept_x) <= MOST_POINTS + 10 and np.all(np.diff(kept_x) > 0)
    assert {9.0, -9.0, 8.0} <= set(kept_y) and np.isnan(kept_y).sum() == 1
    assert (kept_x[0], kept_x[-1]) == (1, len(y))
    np.testing.assert_array_equal(kept_y, y[kept_x.astype(int) - 1])
    np.testing.assert_array_equal(thin(x[:500], y[:500])[1], y[:500])


def test_smoothing_is_the_weighted_mean_of_what_was_before():
    y = np.random.default_rng(0).standard_normal(50)
    weights = 0.5 ** (np.arange(50)[::-1] / 4)
    assert smooth(y, 4)[-1] == pytest.approx(np.average(y, weights=weights))
    y[20] = math.inf
    smoothed = smooth(y, 4)
    assert np.isfinite(smoothed).all() and smoothed[20] == smoothed[19] and smoothed[0] == y[0]


def test_every_attempt_of_a_run_is_recorded_up_to_its_checkpoint(tmp_path):
    """Starts, and the time of each record, are kept by a resume; what it repeats is removed."""
    path = tmp_path / "metrics.jsonl"
    for first_step, last, ranks in ((0, 9, 2), (0, 5, 2), (4, 8, 4), (6, 7, 1)):
        sink = JsonlSink(path, first_step, RunLock(tmp_path), {"world_size": ranks})
        for step in range(first_step + 1, last + 1):
            sink.log("train", {"step": step})
        sink.close(1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    starts = [(r["step"], r["world_size"]) for r in records if r["kind"] == "start"]
    assert starts == [(0, 2), (4, 4), (6, 1)]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 8))
    times = [r["time"] for r in records]
    assert times == sorted(times) and time.time() - 60 < times[0] <= times[-1] <= time.time()


def test_the_report_of_a_run_that_was_resumed_on_fewer_ranks(forks, tiny_config, tmp_path, capsys):
    config, folder = tiny_config(train__epochs=None, train__steps=4), tmp_path / "run"
    folder.mkdir()
    (folder / "stop").touch()  # seen after the first step
    stopped = forks.train(config, ranks=2)
    assert stopped.code == 0, stopped.output
    first = read_metrics(folder) + read_metrics(folder, "start")
    resumed = forks.train(config, ranks=1)
    assert resumed.code == 0, resumed.output
    starts, steps = read_metrics(folder, "start"), read_metrics(folder)
    assert [(s["step"], s["world_size"], len(s["hosts"])) for s in starts] == [(0, 2, 1), (1, 1, 1)]
    assert {"python", "torch", "deepspeed", "transformers"} <= starts[1]["versions"].keys()
    assert [steps[0], starts[0]] == first and [step["step"] for step in steps] == [1, 2, 3, 4]

    draw(folder)
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    page = (folder / "report.html").read_text()
    drawn = figures(page)
    loss = {trace["name"]: trace for trace in drawn[0]["data"]}
    assert {"each step", "smoothed", "save", "change of cluster"} <= loss.keys()
    assert loss["change of cluster"]["x"][:2] == [1, 1]
    assert loss["change of cluster"]["text"][0] == "ranks: 2 -&gt; 1"
    for text in ("Evaluation loss", "Learning rate", "Gradient norm", "Throughput", "Padding",
                 "Step time", "restarts", "train.learning_rate", starts[0]["hosts"][0],
                 "zero_optimization.stage", starts[1]["versions"]["torch"]):  # fmt: skip
        assert text in page, text
    assert 'class="problem"' not in page


def draw(*runs, output=None):
    """scripts/report.py, in this process."""
    options = ["--output", output] if output else []
    arguments, sys.argv = sys.argv, ["report.py", *map(str, [*runs, *options])]
    try:
        report.main()
    finally:
        sys.argv = arguments


def figures(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_texts_of_runs_are_shown_and_never_run(tmp_path):
    runs = [write_run(tmp_path / name / "run<b>", 40, HOSTILE, seed) for seed, name in
            enumerate(("one", "two"))]  # fmt: skip
    page = report_page(runs)
    assert "<script>document" not in page and "<img" not in page and "49" not in page[:3000]
    assert page.count("</script>") == 3 and page.encode()
    assert "one/run&lt;b&gt;" in page, "names that tell them apart"
    names = json.dumps(figures(page))
    assert "<" not in names.replace("<br>", "").replace("<extra></extra>", "").replace(
        "<extra>", "").replace("</extra>", "")  # fmt: skip
    assert "train.seed" in page and "train.x" not in page
    assert page.split("Differences of the configs")[1].split("</table>")[0].count("<tr>") == 2


MISTAKES = {
    "no folder": (None, "not a run folder (No such file or directory: "),
    "another folder": ({"x.txt": ""}, "not a run folder (No such file or directory: "),
    "a folder in its place": ({"metrics.jsonl/x": ""}, "not a run folder (Is a directory: "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_is_no_run_folder_is_refused_by_one_line(tmp_path, case):
    files, message = MISTAKES[case]
    for name, text in (files or {}).items():
        (tmp_path / "run" / name).parent.mkdir(parents=True)
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(UserError) as refused:
        draw(tmp_path / "run")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    run = write_run(tmp_path / "run", 2)
    for output, message in (
        (tmp_path / "nowhere" / "page.html", r"cannot write .*; give --output FILE.html elsewhere"),
        (tmp_path / "page.txt", "does not end in .html"),
    ):
        with pytest.raises(UserError, match=message):
            draw(run, output=output)


TRAIN = '{"kind": "train", "step": 1, "loss": 2.0, "step_seconds": 1}\n'
START = '{"kind": "start", "step": 0, "time": 1.8e9, "world_size": 2}\n'
INCOMPLETE = {
    "empty": ("", ["no step is recorded: the run ended, or still is, before its first<"]),
    "died in its first step": (START, ["before its first after its start"]),
    "broken lines": (
        TRAIN + '{"kind": "train", "step": 2, "lo\n[]\n7\n{"kind": "train", "step": -1}\n'
        '{"kind": "train", "step": true}\n{"step": 1}\n\xff\n' + "[" * 10_000,
        ["metrics.jsonl: line 2 and 7 more cannot be read and is left out"],
    ),
    "odd values": (
        TRAIN + '{"kind": "train", "step": 2, "loss": "high", "lr": [1], "tokens": null}\n'
        '{"kind": "train", "step": 3, "loss": NaN, "grad_norm": 1e400, "mfu": ' + "9" * 400 + "}\n"
        '{"kind": "start", "step": 0, "time": "now", "hosts": 3, "gpus": [1], "versions": []}\n'
        '{"kind": "start", "step": 1, "time": 1e300, "hosts": [{}], "world_size": "x"}\n'
        '{"kind": "ranks", "step": 1, "own_seconds": [0, "x", 1e300], "gpu": [1, null]}\n'
        '{"kind": "ranks", "step": 1, "own_seconds": 5, "hosts": 7}\n'
        '{"kind": "eval", "step": 1, "loss/": 1, "/": 1, "eval_loss": []}\n'
        '{"kind": "generations", "step": 1, "set": 3, "rows": [1, {"prompt": {}}]}\n'
        '{"kind": "save", "step": 1, "save_seconds": "long"}\n{"kind": "event", "step": 3}\n',
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_run_is_drawn_and_says_what_is_missing(tmp_path, case):
    text, messages = INCOMPLETE[case]
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    page = report_page([tmp_path])
    for message in [*messages, "resolved_config.yaml: No such file or directory"]:
        assert message in page, message
    if case == "odd values":
        loss = read_history(tmp_path).records.train["loss"]
        assert loss[0] == 2 and np.isnan(loss[1:]).all() and "Loss" in page
    if TRAIN in text:
        assert figures(page)[0]["data"][0]["name"] == "each step"


def test_configs_with_unbounded_aliases_are_not_read(tmp_path):
    run = write_run(tmp_path / "run", 2)
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    (run / "resolved_config.yaml").write_text(bomb)
    (run / "resolved_ds_config.json").write_text("[" * 10_000)
    page = report_page([run])
    assert "its aliases stand for over" in page and len(read_history(run).missing) == 2


PROBE = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("unhandledrejection", event => errors.push(`${event.reason}`));
addEventListener("securitypolicyviolation", event => errors.push(`loads ${event.blockedURI}`));
for (const kind of ["error", "warn"]) console[kind] = (...texts) => errors.push(texts.join(" "));
(function wait() {
  const html = document.documentElement;
  if (html.dataset.drawn === undefined) return setTimeout(wait, 10);
  parent.postMessage({drawn: +html.dataset.drawn, title: document.title, width: innerWidth, errors,
    milliseconds: performance.now(), overflow: html.scrollWidth - html.clientWidth}, "*");
})();
</script>"""
FRAME = """<script>onmessage = event =>
  fetch("/found", {method: "POST", body: JSON.stringify(event.data)})</script>
<iframe src="/page" style="width: 420px; height: 900px; border: 0"></iframe>"""
"""The window of a browser has at least 500 pixels, so the page is in a frame."""


def in_browser(page, folder):
    """What PROBE finds in `page` on a screen of 420 pixels, and what the browser asks for."""
    start, mark, end = page.partition("<meta charset")
    pages, asked, found = {"/": FRAME, "/page": start + PROBE + mark + end}, set(), queue.Queue()

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.add(self.path)
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def do_POST(self):
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever).start()
        browser = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking",
             f"--user-data-dir={folder}/profile", f"http://127.0.0.1:{server.server_port}/"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return found.get(timeout=90), asked - {"/favicon.ico"}
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
def test_the_page_in_a_browser(tmp_path):
    """100,000 steps over another run on a narrow screen: drawn in seconds, nothing is loaded, no
    text of a run is run, nothing is wider than the screen.
    """
    names = {"long": 100_000, "b": 300}
    runs = [write_run(tmp_path / name, steps, HOSTILE, steps) for name, steps in names.items()]
    draw(*runs, output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 6e6, "4.8 MB of it are plotly"
    found, asked = in_browser(page, tmp_path)
    assert found["errors"] == [] and asked == {"/", "/page"}
    assert found["drawn"] > 15 and found["title"] == "long, b"
    assert (found["width"], found["overflow"]) == (420, 0), found
    assert found["milliseconds"] < 20_000, found


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
def test_what_is_wrong_with_a_page_is_found(tmp_path):
    page = f"""<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; script-src 'unsafe-inline'"><pre>{"wide" * 500}</pre><script>
      addEventListener("securitypolicyviolation", () => document.documentElement.dataset.drawn = 1);
      missing.name</script><img src="/x.png">"""
    found, asked = in_browser(page, tmp_path)
    assert found["overflow"] > 2000 and asked == {"/", "/page"}
    assert re.fullmatch(r"Uncaught .*missing is not defined loads http.*/x.png",
                        " ".join(found["errors"]))  # fmt: skip
