"""Draw runs as one HTML page, from the files in their folders.

Texts of a run are untrusted: they are escaped. The page loads nothing.
"""

import difflib
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zerotrain.checkpoint.manifest import stat_inside
from zerotrain.checkpoint.run_folder import METRICS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.runtime.errors import describe
from zerotrain.runtime.files import MAX_TEXT_BYTES
from zerotrain.tools.goodput import Goodput, measure_goodput
from zerotrain.tools.records import MEASURED, PHASES, WINDOWS, SlowRanks, number, read_stalls
from zerotrain.tracking.metrics import metrics_lines, parse_record

# These colors are readable on white and on black.
COLORS = ("#3b82d6", "#e07b39", "#2f9e6e", "#a05fc4", "#c8a02c", "#d3525c")
GRAY = "#7b828c"
FAINT = "rgba(128,128,128,0.25)"
MAX_POINTS = 2000  # drawn points per series
MAX_RECORDS = 50  # Records of a kind that are kept, the last ones; also the rows of a table.
MAX_SERIES = 50  # series per run
MAX_KEY_LENGTH = 200  # characters in the name of a series
OF_RANK = (*MEASURED, "temperature_celsius", "sm_clock_mhz", "power_watts")
MAX_VALUES = 1 << 25  # values of all series of a run; they take 512 MiB
FIRST_CHARTS = {
    "Training loss of each source, nats per token": ("source_loss",),
    "Learning rate": ("lr",),
    "Gradient norm, before clipping": ("grad_norm",),
}
OTHER_CHARTS = {
    "Tokens/s of all ranks, without padding": ("tokens_per_s",),
    "Share of the GPUs' peak (MFU)": ("mfu",),
    "Share of computed tokens that are not padding": ("padding_efficiency",),
    "Peak memory of rank 0, GiB": ("memory_peak_gib",),
    "Share of answers that match exactly": ("exact_match",),
    "Router loss, without its coefficient": ("router_loss",),
    "Computing on each rank alone, seconds of a step": ("compute_seconds of ranks",),
    "Waiting for data on each rank, seconds of a step": ("data_seconds of ranks",),
    "Seconds of a step, and of its phases": ("step_seconds", *PHASES),
}  # fmt: skip
"""Heading of a chart, and its keys in metrics.jsonl."""
DRAWN = {"loss", "time"}.union(*FIRST_CHARTS.values(), *OTHER_CHARTS.values())
"""Drawn keys of metrics.jsonl, up to a "/"."""
MAX_LINE_BYTES = {"start": 1 << 18, "event": 1 << 18, "generations": 1 << 21}
"""Kinds of records that are kept, and the longest lines. A record takes 24 times as much memory as
its line.
"""
MAX_ANSWERED = 4  # held-out sets whose first and last answers are kept


@dataclass(frozen=True)
class RunRecords:
    """The contents of a run folder. The run may still train, or have died at any moment."""

    name: str
    prefix: str
    """Text before the names of series: the run's name, or nothing if it is drawn alone."""
    series: dict[str, pd.Series]
    """Drawn values of steps and evaluations by step, without NaN."""
    records: dict[str, deque[dict[str, Any]]]
    """Last records of other kinds. Only their `kind` and `step` are checked."""
    answers: dict[str, list[dict[str, Any]]]
    """The first record of answers, and the last if it is of another step, by held-out set."""
    counts: Counter[str]
    """Number of records of each kind."""
    goodput: Goodput
    configs: str
    problems: list[str]
    """Missing and unreadable files and lines."""

    @property
    def held_out(self) -> dict[str, pd.Series]:
        """Losses of the held-out sets, by the names of the sets."""
        return {
            f"held out: {label(key)}".removesuffix(": held out"): losses
            for key, losses in self.series.items()
            if key.startswith("loss/")
        }


def read_run(folder: Path, prefix: str = "") -> RunRecords:
    """Read a run's records and resolved configs. The limits above bound the memory for any file.

    Raises:
        UserError: the folder is not a run folder.
    """
    columns = {key: (array("q"), array("d")) for key in ("loss", "time", "tokens_per_s")}
    records = {kind: deque(maxlen=MAX_RECORDS) for kind in ("start", "event")}
    answers = {}
    held_out = {}
    counts = Counter()
    left = MAX_VALUES
    slow = SlowRanks()
    is_cut = False
    for line in metrics_lines(folder):
        record = parse_record(line)
        kind = record["kind"] if record else ""
        if record is None or len(line) > MAX_LINE_BYTES.get(kind, math.inf):
            counts["unreadable"] += 1
        elif kind == "generations":
            name = label(str(record.get("set"))[:MAX_KEY_LENGTH])
            first, *_ = answers.get(name, [record])
            if name in answers or len(answers) < MAX_ANSWERED:
                answers[name] = [first, record][record["step"] == first["step"] :]
        elif kind in records:
            counts[kind] += 1
            records[kind].append(record)
        if kind == "start" and isinstance(sets := record.get("held_out"), dict):
            # Losses of other examples would not show which step is best.
            for name in [name for name in sets if held_out.get(name, sets[name]) != sets[name]]:
                for drawn in ("loss", "exact_match"):
                    columns.pop(f"{drawn}/{name}", None)
            held_out = sets
        if kind in ("start", "ranks"):  # A start ends a sequence of slow windows.
            by_rank = ranks_of(record)
            for rank in slow.add(by_rank, number(record.get("step_seconds"))):
                counts["event"] += 1
                text = slow_rank_text(rank, by_rank[rank])
                records["event"].append({"step": record["step"], "text": text})
        for key, value in values_of(kind, record):
            if len(columns) < MAX_SERIES and len(key) <= MAX_KEY_LENGTH:
                columns.setdefault(key, (array("q"), array("d")))
            if left and key in columns:
                steps, values = columns[key]
                steps.append(record["step"])
                values.append(value)
                left -= 1
            else:
                is_cut = True
    series = {
        key: pd.Series(values, steps, dtype=float).groupby(level=0).last()
        for key, (steps, values) in columns.items()
    }
    stalls = read_stalls(folder)
    for host in [*dict.fromkeys(host for _, host, _ in stalls)][:MAX_SERIES]:
        times, seconds = zip(*((when, s) for when, name, s in stalls if name == host), strict=True)
        text = f"{host[:MAX_KEY_LENGTH]} did not run for {sum(seconds):.1f} s, {len(times)} times"
        done = series["time"][series["time"] <= max(times)]
        records["event"].append({"step": done.last_valid_index() or 0, "text": text})
        counts["event"] += 1
    problems = []
    if counts["unreadable"]:
        problems.append(f"{METRICS}: {counts['unreadable']:,} lines cannot be read")
    if is_cut:
        problems.append(f"{METRICS}: only {MAX_SERIES} series and {MAX_VALUES:,} values are drawn")
    if series["loss"].empty:
        problems.append("no step is recorded: the run has not finished its first step")
    configs = ""
    for name in (RESOLVED_CONFIG, RESOLVED_DS_CONFIG):
        try:
            stat_inside(folder, name, MAX_TEXT_BYTES)
            configs += f"# {name}\n{(folder / name).read_text(errors='replace')}\n"
        except (OSError, ValueError) as error:
            problems.append(describe(error))
    return RunRecords(
        name=str(folder),
        prefix=prefix,
        series=series,
        records=records,
        answers=answers,
        counts=counts,
        goodput=measure_goodput(folder),
        configs=configs,
        problems=problems,
    )


def values_of(kind: str, record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the drawn values of a record, each with the name of its series."""
    if kind in ("train", "eval"):
        for key, value in record.items():
            if key.partition("/")[0] in DRAWN and not math.isnan(value := number(value)):
                yield key, value
    elif kind == "ranks":
        ranks = ranks_of(record)
        for key in ("compute_seconds", "data_seconds"):
            seconds = [rank[key] for rank in ranks]
            if seconds and not math.isnan(sum(seconds)):
                yield f"{key} of ranks/median", median(seconds)
                yield f"{key} of ranks/max", max(seconds)


def ranks_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each rank's host and measurements from a `ranks` record, NaN if missing. Records of
    other kinds give an empty list.
    """
    return [
        {
            "host": str(rank.get("host"))[:MAX_KEY_LENGTH],
            **{key: number(rank.get(key)) for key in OF_RANK},
        }
        for rank in listed(record.get("ranks"))
        if isinstance(rank, dict)
    ]


def slow_rank_text(rank: int, measured: dict[str, Any]) -> str:
    facts = (
        f"{key} {value:.5g}"
        for key, value in measured.items()
        if key != "host" and not math.isnan(value)
    )
    return f"rank {rank} @ {measured['host']} is slow, {WINDOWS} times in a row: {', '.join(facts)}"


def report_page(folders: Sequence[Path]) -> str:
    """Return the page. Raises UserError: a folder is not a run folder."""
    runs = [read_run(folder, f"{folder}: " if len(folders) > 1 else "") for folder in folders]
    body = [f"<p>⚠ {escape(run.name)}: {escape(text)}</p>" for run in runs for text in run.problems]
    for run in runs:
        boxes = (f"<div><b>{value}</b><br>{unit}</div>" for unit, value in figures(run).items())
        text = escape(run.prefix + sentence(run))
        body.append(f"<p>{text}</p><div class=cards>{''.join(boxes)}</div>")
    body.append(f"<div class=first>{loss_chart(runs)}{charts(runs, FIRST_CHARTS)}</div>")
    body.append(folded("Speed and memory", charts(runs, OTHER_CHARTS)))
    for run in runs:
        sections = {"Incidents": table(run.records["event"], "step", "text")}
        parts = [{"part": p, "seconds": f"{s:,.1f}"} for p, s in run.goodput.seconds.items() if s]
        sections["Where the time went"] = table(parts, "part", "seconds")
        for name, records in run.answers.items():
            for record in records:
                answers = table(listed(record.get("rows")), "prompt", "expected", "answer", "score")
                sections[f"Answers at step {record['step']:,}: {name}"] = answers
        sections["Starts"] = table(run.records["start"], "step", "world_size", "ranks")
        sections["Configs"] = f"<pre>{escape(run.configs)}</pre>"
        if run is not runs[0]:
            # The time of a comparison grows with the square of the lines.
            texts = (each.configs.splitlines()[:MAX_POINTS] for each in (runs[0], run))
            lines = escape("\n".join(difflib.unified_diff(*texts, n=0, lineterm="")))
            sections["Configs"] = f"<pre>Differences from {escape(runs[0].name)}:\n{lines}</pre>"
        body += [folded(run.prefix + title, text) for title, text in sections.items()]
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    title = escape(" · ".join(run.name for run in runs))
    text = Template(template).substitute(title=title, plotly=get_plotlyjs(), body="\n".join(body))
    return text.encode("utf-8", "replace").decode()  # A text may have half a surrogate pair.


def sentence(run: RunRecords) -> str:
    """Return a summary of the run."""
    loss = run.series["loss"]
    if loss.empty:
        return "No step is finished."
    text = f"{loss.index[-1]:,} steps"
    if run.records["start"]:
        ranks = shown(run.records["start"][-1].get("world_size"))
        text += f" on {ranks} rank{'s' * (ranks != '1')}"
    text += f"; the training loss went from {loss.iloc[0]:.3f} to {loss.iloc[-1]:.3f}"
    for name, held in run.held_out.items():
        text += f"; {name}: {held.iloc[-1]:.3f}, at best {held.min():.3f} at step {held.idxmin():,}"
    return f"{text}."


def figures(run: RunRecords) -> dict[str, str]:
    """Return the figures of the first screen, by their captions."""
    name, held = next(iter(run.held_out.items()), ("held out", None))
    began, ended = run.series["time"].clip(0, 1e11).agg(["min", "max"]).fillna(0)
    return {
        f"best loss, {escape(name)}, nats per token": "-" if held is None else f"{held.min():.4f}",
        "tokens/s, median": f"{run.series['tokens_per_s'].median():,.0f}",
        f"time, h:min:s, until {datetime.fromtimestamp(ended, UTC):%F %H:%M} UTC": str(
            timedelta(seconds=round(ended - began))
        ),
        "goodput: step time over all time": f"{run.goodput.share:.1%}".replace("nan%", "-"),
        "restarts": f"{max(0, run.counts['start'] - 1):,}",
        "incidents": f"{run.counts['event']:,}",
    }


# --------------------------------------------------------------------------------------------------
# Charts


def loss_chart(runs: Sequence[RunRecords]) -> str:
    """Draw each run's smoothed loss and its held-out losses, each in a color of its own.

    The loss of each step is gray. With several runs, it is drawn after a click on its name.
    """
    traces = []
    colors = cycle(COLORS)
    for run in runs:
        loss = run.series["loss"]
        window = 1 + 2 * max(2, len(loss) // 50)
        smooth = loss.rolling(window, center=True, min_periods=1).mean()
        line = {"mode": "lines", "line_color": next(colors), "line_width": 3}
        gray = {"mode": "lines", "line_color": GRAY, "line_width": 1}
        gray["visible"] = "legendonly" if run.prefix else True
        traces.append((f"{run.prefix}training, each step", loss, gray))
        traces.append((f"{run.prefix}training, mean of {window} steps", smooth, line))
        for name, held in run.held_out.items():
            style = {"mode": "lines+markers", "marker_size": 9, "line_color": next(colors)}
            traces.append((f"{run.prefix}{name}", held, style))
    restarts = [start["step"] for run in runs for start in [*run.records["start"]][1:]]
    dashed = "; a restart is a dashed line" if restarts else ""
    figure = drawn(traces, height=480).update_yaxes(type="log", tickformat="~g", nticks=5)
    for step in restarts[-20:]:
        figure.add_vline(x=step, line_dash="dash", line_color=GRAY)
    return section(f"Loss, nats per token{dashed}", figure)


def charts(runs: Sequence[RunRecords], wanted: dict[str, tuple[str, ...]]) -> str:
    """Return a section for each heading for which a run has values."""
    sections = []
    for heading, keys in wanted.items():
        traces = [
            (run.prefix + label(key), values, {"mode": "lines"})
            for run in runs
            for key, values in run.series.items()
            if key.partition("/")[0] in keys and len(values)
        ]
        if traces:
            figure = drawn(traces, height=215).update_yaxes(rangemode="tozero")
            sections.append(section(heading, figure))
    return "".join(sections)


def label(key: str) -> str:
    """Return the name of a series in a legend: "held out" for exact_match/held_out."""
    return key.rpartition("/")[2].removesuffix("_seconds").replace("_", " ")


def drawn(traces: Sequence[tuple[str, pd.Series, dict[str, Any]]], height: int) -> go.Figure:
    """Return a figure of series over steps. A trace is a name, a series and a style."""
    figure = go.Figure(layout={"showlegend": len(traces) > 1, "height": height})
    for name, values, style in traces:
        points = thin(values)
        figure.add_scatter(x=points.index, y=points, name=escape(name), **style)
    return figure


def thin(points: pd.Series) -> pd.Series:
    """Return at most MAX_POINTS points. Each bin of steps keeps its smallest and largest value, so
    that every spike stays.
    """
    bins = points.groupby(pd.RangeIndex(len(points)) * (MAX_POINTS // 2) // max(1, len(points)))
    return points.loc[sorted({*bins.idxmin(), *bins.idxmax()})]


def section(heading: str, figure: go.Figure) -> str:
    axis = {"gridcolor": FAINT, "zerolinecolor": FAINT}
    figure.update_layout(
        template="none", font_color=GRAY, autosize=True, colorway=COLORS,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 50, "r": 5, "t": 10, "b": 40},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        xaxis={**axis, "title": {"text": "step", "standoff": 5}},
        yaxis={**axis, "automargin": True, "exponentformat": "e"},
    )  # fmt: skip
    options = {"displayModeBar": False, "responsive": True}
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=options)
    return f"<section><h2>{escape(heading)}</h2>{html}</section>"


# --------------------------------------------------------------------------------------------------
# Tables


def folded(title: str, body: str) -> str:
    """Return a section that a click unfolds; nothing if its body is empty."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def table(records: Iterable[Any], *columns: str) -> str:
    """Return the last records as a table; nothing if there are none."""
    rows = [
        "".join(f"<td>{escape(shown(record.get(column)))}</td>" for column in columns)
        for record in [*records][-MAX_RECORDS:]
        if isinstance(record, dict)
    ]
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in columns)
    return f"<table><tr>{head}</tr><tr>" + "</tr><tr>".join(rows) + "</tr></table>" if rows else ""


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def shown(value: Any) -> str:
    """Return a value of a record as text without quotes and brackets; nothing for null."""
    if isinstance(value, dict):
        return ", ".join(f"{count} x {name}" for name, count in value.items())
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else str("" if value is None else value)
    )
