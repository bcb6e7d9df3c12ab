"""One self-contained HTML page about one run or several, from what is in their folders. Texts of a
run come from anybody: they are escaped, and nothing is loaded from elsewhere.
"""

import difflib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from zerotrain.tools.run_records import RunRecords, number, read_run

COLORS = ("#3b82d6", "#e07b39", "#2fa36f", "#c85a9e", "#8d72d8", "#b3912b", "#d3525c", "#2a9db0")
GREY, FAINT = "#7b828c", "rgba(128,128,128,0.25)"  # readable on white and on black
MAX_POINTS = 2000  # drawn of a series
MAX_WINDOWS = 250  # columns of a heat map
MAX_CHARACTERS = 4000  # of a text
CHARTS = {
    "loss": "Loss, nats per token",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "tokens_per_s": "Tokens/s of all ranks, no padding",
    "mfu": "MFU",
    "padding": "Padding, share of computed tokens",
    "memory_gib": "Peak memory, GiB, worst rank",
    "router_loss": "Router loss, no coefficient",
    "exact_match": "Answers that match exactly",
    "step": "Seconds: data, forward, backward, update",
}
PHASES = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


def report_page(folders: Sequence[Path]) -> str:
    """Raises UserError: one of the folders is not a run folder."""
    paths = [folder.resolve() for folder in folders]
    depth = 1  # as many parents as it takes to tell the names apart
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    names = ["/".join(path.parts[-depth:]) for path in paths]
    runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
    facts = [summary(run) for run in runs]
    keys = dict.fromkeys(key for of_run in facts for key in of_run)
    rows = [[key, *(of_run.get(key, "") for of_run in facts)] for key in keys]
    body = [f"<p>⚠ {escape(run.name)}: {escape(text)}</p>" for run in runs for text in run.problems]
    body += [table(["", *names], rows), charts(runs)]
    for run in runs:
        about = escape(f": {run.name}") if len(runs) > 1 else ""
        body += heat_maps(run, about)
        events = [
            [event["step"], event.get("name"), event.get("text")] for event in run.of("event")
        ]
        body.append(section(f"Incidents{about}", table(["step", "event", ""], events)))
        for record in run.of("generations")[-6:]:
            keys = ("prompt", "expected", "answer", "score")
            rows = [[row.get(k) for k in keys] for row in records_of(record.get("rows"))[:50]]
            title = f"Answers at step {record['step']:,}, {escape(shown(record.get('set')))}{about}"
            body.append(section(title, table(keys, rows)))
        keys = ("world_size", "hosts", "gpus", "versions")
        rows = [[s["step"], clock(s.get("time")), *map(s.get, keys)] for s in run.of("start")]
        body.append(section(f"Starts{about}", table(["from step", "time", *keys], rows)))
        configs = f"<details><summary>show</summary><pre>{escape(run.configs)}</pre></details>"
        body.append(section(f"Configs{about}", configs))
    for run in runs[1:]:
        texts = runs[0].configs.splitlines(), run.configs.splitlines()
        diff = "\n".join(difflib.unified_diff(*texts, runs[0].name, run.name, n=0, lineterm=""))
        title = f"Differences of the configs{escape(f': {run.name}')}"
        body.append(section(title, f"<pre>{escape(diff) or 'none'}</pre>"))
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(" · ".join(names)), plotly=get_plotlyjs(), body="\n".join(body)
    )
    return page.encode("utf-8", "replace").decode()  # JSON may have half a surrogate pair


def summary(run: RunRecords) -> dict[str, str]:
    """What a person asks first."""
    train, facts = run.train, {"steps": "none is finished"}
    times = [number(r.get("time")) for kind in run.records.values() for r in kind]
    times += train["time"].tolist() if "time" in train else []
    times = [seconds for seconds in times if 0 < seconds < 1e11]
    if len(train):
        facts["steps"] = f"{train['step'].iloc[-1]:,.0f}"
    if times:
        lasted = timedelta(seconds=round(max(times) - min(times)))
        facts["duration"] = f"{lasted}, from {clock(min(times))} to {clock(max(times))}"
    starts = run.of("start")
    if starts:
        hosts = shown(starts[-1].get("hosts")).strip('[]"').replace('", "', ", ")
        facts["ranks"] = f"{shown(starts[-1].get('world_size'))} on {hosts}"
        facts["restarts"] = f"{len(starts) - 1:,}"
    if "loss" in train:
        facts["loss, last step"] = f"{train['loss'].iloc[-1]:.4f}"
    for name, points in evaluations(run).items():
        best = points.idxmax() if name.startswith("exact_match") else points.idxmin()
        last = f"{points.iloc[-1]:.4f} at step {points.index[-1]:,}"
        facts[name] = f"{last}, best {points[best]:.4f} at step {best:,}"
    for key, form in (("tokens_per_s", "{:,.0f}"), ("mfu", "{:.1%}"), ("step_seconds", "{:.3g}")):
        if key in train:
            facts[f"{key}, median"] = form.format(train[key].median())
    if {"data_seconds", "step_seconds"} <= {*train}:
        share = train["data_seconds"].sum() / train["step_seconds"].sum()
        facts["waiting for data"] = f"{share:.1%} of the steps' time"
    return facts


def evaluations(run: RunRecords) -> dict[str, pd.Series]:
    """Losses and scores of the held-out sets, by name and step."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record in run.records.get("eval", []):
        for key, value in record.items():
            if key.startswith(("loss/", "exact_match/")) and math.isfinite(number(value)):
                found[key][record["step"]] = value
    return {name: pd.Series(found[name]) for name in list(found)[:30]}


def charts(runs: Sequence[RunRecords]) -> str:
    """Everything over steps, one chart below the other with a common axis."""
    measured = {key for run in runs for key in run.train}
    measured |= {name.partition("/")[0] for run in runs for name in evaluations(run)}
    keys = [key for key in CHARTS if key in measured]
    if not keys:
        return ""
    titles = [CHARTS[key] for key in keys]
    figure = make_subplots(len(keys), 1, shared_xaxes=True, subplot_titles=titles,
                           vertical_spacing=0.3 / len(keys),
                           row_heights=[2.0 if key == "loss" else 1.0 for key in keys])  # fmt: skip

    def draw(
        key: str, points: pd.Series, name: str, color: str, run: RunRecords, **style: Any
    ) -> None:
        label = escape(f"{run.name}: {name}" if len(runs) > 1 else name)
        points = thin(points)
        line = {"mode": "lines", "line": {"color": color}, "showlegend": key == "loss", **style}
        trace = go.Scatter(x=points.index, y=points.astype(np.float32), name=label, **line)
        figure.add_trace(trace, keys.index(key) + 1, 1)

    for of_run, run in enumerate(runs):
        train = run.train.set_index("step") if len(run.train) else run.train
        color = COLORS[of_run % len(COLORS)]
        for key in keys:
            if key in train:
                smoothed = train[key].ewm(halflife=max(1.0, len(train) / 100)).mean()
                draw(key, train[key], "each step", color, run, opacity=0.35)
                draw(key, smoothed, "smoothed", color, run)
        for i, (name, points) in enumerate(evaluations(run).items(), start=of_run + 1):
            marked = {"mode": "lines+markers", "showlegend": True}
            draw(name.partition("/")[0], points, name, COLORS[i % len(COLORS)], run, **marked)
        for phase, color in zip(PHASES, COLORS, strict=False):
            if phase in train and run is runs[0]:
                style = {"stackgroup": "one", "line": {"width": 0, "color": color}}
                draw("step", train[phase], phase, color, run, **style)
    restarts = [start["step"] for run in runs for start in run.of("start")[1:] if "loss" in keys]
    dashed = {"type": "line", "y0": 0, "y1": 1, "xref": "x", "yref": "y domain",
              "line": {"color": GREY, "dash": "dash"}}  # fmt: skip
    shapes = [{**dashed, "x0": step, "x1": step} for step in restarts]  # add_vline is quadratic
    figure.update_layout(height=140 * (len(keys) + 1) + 100, shapes=shapes)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return section("Charts, with restarts as dashed lines", figure_html(figure, top=90))


def thin(points: pd.Series) -> pd.Series:
    """At most about MAX_POINTS: of each bin of steps the smallest and the largest value, so that no
    spike is lost.
    """
    if len(points) <= MAX_POINTS:
        return points
    values, kept = points.fillna(points.median()).to_numpy(), {0, len(points) - 1}
    for part in np.array_split(np.arange(len(points)), MAX_POINTS // 2):
        kept |= {part[values[part].argmin()], part[values[part].argmax()]}
    return points.iloc[sorted(kept)]


def heat_maps(run: RunRecords, about: str) -> Iterable[str]:
    """One row per rank and one column per comparison of the ranks; of many the last ones."""
    windows = [w for w in run.of("ranks")[-MAX_WINDOWS:] if isinstance(w.get("hosts"), list)]
    for key, title, low, high in (
        ("probe_seconds", "Matrix products on each rank alone, times the median rank", 0.5, 1.5),
        ("data_seconds", "Waiting for data, % of a step", 0.0, 20.0),
        ("temperature_celsius", "GPU temperature, °C", 0.0, 100.0),
    ):
        of_rank: list[list[float]] = []
        for window in windows:
            gpus = [gpu.get(key) for gpu in records_of(window.get("gpu"))]
            given = window[key] if isinstance(window.get(key), list) else gpus
            values = pd.Series(list(map(number, given)), dtype=float)
            if key == "probe_seconds":
                values = values / values.median()
            if key == "data_seconds":
                values = 100 * values / number(window.get("step_seconds"))
            of_rank.append(values.tolist())
        frame = pd.DataFrame(of_rank, index=[w["step"] for w in windows]).T
        if not np.isfinite(frame.to_numpy()).any():
            continue
        hosts = [escape(shown(host)) for host in windows[-1]["hosts"]]
        labels = [f"{rank} {hosts[rank]}" for rank in frame.index if rank < len(hosts)]
        scale = [[0, COLORS[0] if low else FAINT], [0.5, FAINT], [1, COLORS[6]]]
        steps = [f"{step:,}" for step in frame.columns]
        heat = go.Heatmap(z=frame, x=steps, y=labels, zmin=low, zmax=high, colorscale=scale)
        figure = go.Figure(heat, {"height": 100 + 18 * min(max(len(frame), 4), 60)})
        figure.update_yaxes(type="category", autorange="reversed")
        yield section(title + about, figure_html(figure, top=10))


def figure_html(figure: go.Figure, top: int) -> str:
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0}
    clear = "rgba(0,0,0,0)"
    figure.update_layout(template="none", paper_bgcolor=clear, plot_bgcolor=clear, legend=legend,
                         font_color=GREY, margin={"l": 50, "r": 5, "t": top, "b": 40})  # fmt: skip
    figure.update_xaxes(gridcolor=FAINT, zerolinecolor=FAINT)
    figure.update_yaxes(gridcolor=FAINT, zerolinecolor=FAINT, tickformat=".4~g", automargin=True)
    options = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, config=options)


def records_of(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def clock(seconds: Any) -> str:
    known = 0 < number(seconds) < 1e11
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if known else ""


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."


def table(headings: Iterable[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["".join(f"<th>{escape(heading)}</th>" for heading in headings)]
    lines += ["".join(f"<td>{escape(shown(cell))}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>" if rows else ""


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}" if body else ""
