"""One self-contained HTML page about runs, from what is in their folders. Texts of a run are
untrusted: they are escaped, and nothing is loaded from elsewhere.
"""

import difflib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.runtime.errors import UserError, describe

# readable on white and on black
GRAY = "#7b828c"
FAINT = "rgba(128,128,128,0.25)"
MAX_POINTS = 2000  # drawn of a series
MAX_RECORDS = 250  # of a kind other than steps, the last ones
CHARTS = {  # heading: keys of metrics.jsonl
    "Loss, nats per token; restarts are dashed lines": ("loss", "loss, smoothed"),
    "Learning rate": ("lr",),
    "Gradient norm, before clipping": ("grad_norm",),
    "Tokens/s of all ranks, no padding": ("tokens_per_s",),
    "MFU": ("mfu",),
    "Computed tokens that are no padding": ("padding_efficiency",),
    "Peak memory of rank 0, GiB": ("memory_peak_gib",),
    "Router loss, no coefficient": ("router_loss",),
    "Answers that match exactly": ("exact_match",),
    "Seconds of a step": (
        "step_seconds", "data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RunRecords:
    """A run that is still training, has ended, or died at any moment."""

    name: str
    series: dict[str, pd.Series]
    """Values over steps: what the records of steps and evaluations hold."""
    records: dict[str, list[dict[str, Any]]]
    """Other lines of metrics.jsonl by kind. Only `step` is checked."""
    configs: str
    problems: list[str]
    """What is missing or cannot be read."""


def read_run(folder: Path) -> RunRecords:
    """Raises UserError: it is not a run folder."""
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    problems = []
    configs = ""
    try:
        stat_inside(folder, METRICS)  # a pipe would be waited for, a link could lead anywhere
        lines = (folder / METRICS).read_bytes().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a run folder ({describe(error)}); give output_dir of a run"
        ) from None
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)  # which may have half a surrogate pair
            record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
            if type(record["step"]) is not int or not 0 <= record["step"] < 1 << 53:
                raise ValueError("not a step")
            records[str(record["kind"])].append(record)
    unreadable = len(lines) - sum(len(of_kind) for of_kind in records.values())
    if unreadable:
        problems.append(f"{METRICS}: {unreadable:,} lines cannot be read")
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for record in [*records.pop("train", []), *records.pop("eval", [])]:
        for key, value in record.items():
            values[key][record["step"]] = number(value)
    if "loss" not in values:
        problems.append("no step is recorded: the run ended, or still is, before its first")
    frame = pd.DataFrame(values).sort_index().dropna(axis="columns", how="all")
    series = {key: points.dropna() for key, points in frame.items()}
    if "loss" in series:
        halflife = max(1.0, len(series["loss"]) / 100)
        series["loss, smoothed"] = series["loss"].ewm(halflife=halflife).mean()
    for name in (RESOLVED_CONFIG, RESOLVED_DS_CONFIG):
        try:
            stat_inside(folder, name)
            configs += f"# {name}\n{(folder / name).read_text(errors='replace')}\n"
        except (OSError, ValueError) as error:
            problems.append(describe(error))
    last = {kind: of_kind[-MAX_RECORDS:] for kind, of_kind in records.items()}
    return RunRecords(str(folder), series, last, configs, problems)


def report_page(folders: Sequence[Path]) -> str:
    """Raises UserError: one of the folders is not a run folder."""
    runs = [read_run(folder) for folder in folders]
    facts = pd.DataFrame({run.name: summary(run) for run in runs}).fillna("")
    body = [f"<p>⚠ {escape(run.name)}: {escape(text)}</p>" for run in runs for text in run.problems]
    body += [table(["", *facts], facts.reset_index().to_numpy().tolist()), *charts(runs)]
    for run in runs:
        body += [f"<h1>{escape(run.name)}</h1>" * (len(runs) > 1), *heat_maps(run)]
        body.append(records_table("Incidents", run.records.get("event"), "step", "name", "text"))
        for record in run.records.get("generations", [])[-6:]:
            title = f"Answers at step {record['step']:,}: {shown(record.get('set'))}"
            columns = ("prompt", "expected", "answer", "score")
            body.append(records_table(title, record.get("rows"), *columns))
        columns = ("step", "world_size", "hosts", "devices")
        body.append(records_table("Starts", run.records.get("start"), *columns))
        text = run.configs
        if run is not runs[0]:
            texts = (runs[0].configs.splitlines(), run.configs.splitlines())
            text = "\n".join(difflib.unified_diff(*texts, runs[0].name, run.name, n=0, lineterm=""))
        title = "Configs" if run is runs[0] else f"Configs: differences from {runs[0].name}"
        body.append(section(title, f"<details><pre>{escape(text) or 'none'}</pre></details>"))
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    names = escape(" · ".join(run.name for run in runs))
    return Template(template).substitute(title=names, plotly=get_plotlyjs(), body="\n".join(body))


def summary(run: RunRecords) -> dict[str, str]:
    """The table at the top of the page."""
    facts = {"steps": "none is finished"}
    starts = run.records.get("start", [])
    if "loss" in run.series:
        facts["steps"] = f"{run.series['loss'].index[-1]:,}"
        facts["loss, last step"] = f"{run.series['loss'].iloc[-1]:.4f}"
    if "time" in run.series:
        times = run.series["time"].clip(0, 1e11)
        lasted = timedelta(seconds=round(times.max() - times.min()))
        facts["duration"] = f"{lasted}, to {datetime.fromtimestamp(times.max(), UTC):%F %H:%M} UTC"
    if starts:
        start = starts[-1]
        facts["ranks"] = f"{shown(start.get('world_size'))} on {shown(start.get('hosts'))}"
        facts["restarts"] = f"{len(starts) - 1:,}"
    for name, points in run.series.items():
        if "/" in name:
            best = points.idxmax() if name.startswith("exact_match") else points.idxmin()
            last = f"{points.iloc[-1]:.4f} at step {points.index[-1]:,}"
            facts[name] = f"{last}, best {points[best]:.4f} at step {best:,}"
    for key in ("tokens_per_s", "mfu", "step_seconds", "data_seconds"):
        if key in run.series:
            facts[f"{key}, median"] = f"{run.series[key].median():,.4g}"
    return facts


def charts(runs: Sequence[RunRecords]) -> Iterator[str]:
    restarts = [start["step"] for run in runs for start in run.records.get("start", [])[1:]]
    for heading, keys in CHARTS.items():
        parts = []
        for run in runs:
            for name, points in run.series.items():
                if name.partition("/")[0] in keys:
                    label = f"{run.name}: {name}" if len(runs) > 1 else name
                    part = thin(points).rename("value").rename_axis("step").reset_index()
                    parts.append(part.assign(series=escape(label)))
        if parts:
            points = pd.concat(parts)
            figure = px.line(points, x="step", y="value", color="series", render_mode="svg")
            height = 200 + 20 * len(parts)
            figure.update_layout(showlegend=len(parts) > 1, height=height, yaxis_title_text="")
            for step in restarts[-20:]:
                figure.add_vline(x=step, line_dash="dash", line_color=GRAY)
            yield section(heading, figure_html(figure))


def thin(points: pd.Series) -> pd.Series:
    """At most MAX_POINTS: of each bin of steps the smallest and the largest value, so that no spike
    is lost.
    """
    bins = points.groupby(pd.RangeIndex(len(points)) * (MAX_POINTS // 2) // len(points))
    return points.loc[sorted({*bins.idxmin(), *bins.idxmax()})]


def heat_maps(run: RunRecords) -> Iterator[str]:
    """One row per rank and one column per comparison of the ranks."""
    for key, title, limits in (
        ("probe_seconds", "Matrix products on each rank alone, times the median rank", (0.5, 1.5)),
        ("data_seconds", "Waiting for data, % of a step", (-20, 20)),
    ):
        columns = {}
        for record in run.records.get("ranks", []):
            values = pd.Series([number(value) for value in listed(record.get(key))], dtype=float)
            whole = values.median()
            if key == "data_seconds":
                whole = number(record.get("step_seconds")) / 100
            columns[f"{record['step']:,}"] = values / whole
            hosts = listed(record.get("hosts"))
        frame = pd.DataFrame(columns)
        if frame.notna().any(axis=None):
            names = [escape(shown(host)) for host in hosts] + [""] * len(frame)
            frame.index = [f"{rank} {names[rank]}" for rank in frame.index]
            heat = px.imshow(
                frame, zmin=limits[0], zmax=limits[1], aspect="auto",
                color_continuous_scale=["#3b82d6", FAINT, "#d3525c"],
                height=60 + 18 * min(len(frame), 60),
            )  # fmt: skip
            heat.update_coloraxes(showscale=False)
            yield section(title, figure_html(heat))


def figure_html(figure: go.Figure) -> str:
    figure.update_layout(
        template="none", font_color=GRAY, legend_title_text="", autosize=True,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 50, "r": 5, "t": 10, "b": 40},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=FAINT, zerolinecolor=FAINT)
    figure.update_yaxes(gridcolor=FAINT, zerolinecolor=FAINT, automargin=True)
    options = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, config=options)


def records_table(title: str, records: Any, *columns: str) -> str:
    rows = [[r.get(c) for c in columns] for r in listed(records)[-50:] if isinstance(r, dict)]
    return section(title, table(columns, rows)) if rows else ""


def table(headings: Iterable[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["".join(f"<th>{escape(heading)}</th>" for heading in headings)]
    lines += ["".join(f"<td>{escape(shown(cell))}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def number(value: Any) -> float:
    """`value` as a float; NaN if it is not a number that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else math.nan
