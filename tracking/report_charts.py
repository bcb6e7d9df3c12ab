"""The charts of a report (tracking/report.py), drawn by plotly."""

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tracking.history import History, Window, number_of

COLORS = (
    "#3b82d6", "#e07b39", "#2fa36f", "#c85a9e", "#8d72d8", "#b3912b", "#d3525c", "#2a9db0",
)  # fmt: skip
"""One per run; each is readable on white and on black."""
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8a8a"
MOST_POINTS = 2000  # drawn of a series
MOST_SETS = 30  # drawn of the evaluation sets of a run
MOST_MARKS = 2000  # of each kind
MOST_COLUMNS = 250  # of a heat map
MOST_CHARACTERS = 60  # of a text inside of a chart
GIB = 2**30


@dataclass(frozen=True)
class Run:
    """A run in a report."""

    name: str
    color: str
    history: History


@dataclass(frozen=True)
class Chart:
    """A figure with its heading."""

    title: str
    note: str
    """What is drawn, in one line; may be empty."""
    figure: go.Figure
    is_wide: bool = False
    """Whether it takes the width of the page."""


@dataclass(frozen=True)
class Series:
    """A key of the records `train` and how it is drawn."""

    key: str
    title: str
    axis: str
    """Title of the y axis, the unit."""
    scale: float = 1.0
    note: str = ""
    is_noisy: bool = True
    """Whether it is also drawn smoothed."""
    format: str = ""
    """Of the numbers at the y axis, in d3's notation; default: plotly's choice."""
    axis_type: str = "linear"


LOSS = Series(
    "loss", "Loss", "nats per token",
    note="smoothed: exponential moving average, its half-life 1 % of the steps",
)  # fmt: skip
SERIES = (
    Series("lr", "Learning rate", "", is_noisy=False, format=".1e"),
    Series("grad_norm", "Gradient norm", "before clipping", axis_type="log"),
    Series("tokens_per_s", "Throughput", "tokens/s", note="all ranks, without padding"),
    Series("mfu", "MFU", "%", 100, "model FLOP/s over the devices' peak"),
    Series("model_flops_per_s", "Model FLOP/s", "TFLOP/s", 1e-12, "all ranks"),
    Series("padding", "Padding", "% of computed tokens", 100),
    Series("memory_peak_bytes", "Memory peak", "GiB", 1 / GIB, "largest over the ranks", False),
    Series("router_loss", "Router loss", "without its coefficient"),
    Series("expert_load_max", "Busiest expert", "share of its load"),
    Series("experts_unused", "Unused experts", ""),
)
PARTS = ("data", "forward", "backward", "optimizer")
"""Of a step; the records have their seconds."""


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All charts for which any of the runs has data."""
    charts = [_loss(runs), *_evaluation(runs)]
    charts += [_lines(runs, series) for series in SERIES]
    for run in runs:
        suffix = f": {run.name}" if len(runs) > 1 else ""
        charts.append(_step_time(run, suffix))
        charts += _heat_maps(run.history.records.windows, suffix)
    return [chart for chart in charts if chart is not None]


# --------------------------------------------------------------------------------------------------
# Series over steps


def thin(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `most` of the points: of each of most / 2 bins of equally many points the
    smallest and the largest value, so that no spike is lost, and the first that is not finite.

    Args:
        x, y: shape (n,).

    Returns:
        x and y of the points that are left, in order.
    """
    count = len(x)
    if count <= most:
        return x, y
    edges = np.linspace(0, count, most // 2 + 1).astype(int)
    finite = np.isfinite(y)
    low, high = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
    kept = {0, count - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept.add(start + int(low[start:end].argmin()))
        kept.add(start + int(high[start:end].argmax()))
        if not finite[start:end].all():
            kept.add(start + int(finite[start:end].argmin()))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def smooth(y: np.ndarray, half_life: float) -> np.ndarray:
    """The exponential moving average of y, shape (n,), without bias to its beginning: weights
    halve every `half_life` values. Values that are not finite are passed over.
    """
    decay = 0.5 ** (1 / half_life)
    total = weight = 0.0
    averages = []
    for value in y.tolist():
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight if weight else math.nan)
    return np.array(averages)


def _figure(axis: str, legend: bool = False, **y: Any) -> go.Figure:
    """An empty figure over steps, with these properties of the y axis; the page adds colors."""
    return go.Figure(layout={
        "margin": {"l": 60, "r": 12, "t": 8, "b": 40},
        "showlegend": legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "xaxis": {"title": {"text": "step", "standoff": 4}},
        "yaxis": {"title": {"text": axis}, "automargin": True, **y},
        "template": "none",
    })  # fmt: skip


def _line(
    x: np.ndarray, y: np.ndarray, run: Run, name: str, mode: str = "lines", **style: Any
) -> go.Scatter:
    """A line; y is drawn in single precision, which halves the page."""
    return go.Scatter(
        x=x, y=y.astype(np.float32), name=name, mode=mode,
        hovertemplate=f"step %{{x:,}}<br>%{{y:.5g}}<extra>{escape(run.name)}</extra>",
        **style,
    )  # fmt: skip


def escape(text: str) -> str:
    """Text as plotly shows it, which knows some tags and entities of HTML; long ones are cut."""
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return html.escape(text, quote=False)


def _values(history: History, series: Series) -> np.ndarray | None:
    """The values of a series, scaled; None if the run has none."""
    train = history.records.train
    if series.key == "padding":
        values = 1 - train["padding_efficiency"] if "padding_efficiency" in train else None
    else:
        values = train.get(series.key)
    return None if values is None or np.isnan(values).all() else values * series.scale


def _lines(runs: Sequence[Run], series: Series) -> Chart | None:
    """The series of all runs: each step, and smoothed if it is noisy."""
    figure = _figure(series.axis, type=series.axis_type, tickformat=series.format)
    for run in runs:
        if (values := _values(run.history, series)) is None:
            continue
        steps, color = run.history.records.train["step"], run.color
        line, opacity = {"color": color, "width": 1}, 0.4 if series.is_noisy else 1
        raw = _line(*thin(steps, values), run, "each step", line=line, opacity=opacity)
        figure.add_trace(raw)
        if series.is_noisy:
            smoothed = smooth(values, max(1.0, len(values) / 100))
            line = {"color": color, "width": 2}
            figure.add_trace(_line(*thin(steps, smoothed), run, "smoothed", line=line))
    return Chart(series.title, series.note, figure) if figure.data else None


def _loss(runs: Sequence[Run]) -> Chart | None:
    """The loss, with marks for what happened to the runs."""
    if (chart := _lines(runs, LOSS)) is None:
        return None
    figure = chart.figure
    figure.add_traces([mark for run in runs for mark in _marks(run)])
    figure.layout.meta, figure.layout.showlegend = "loss", True
    # of the marks, from the bottom to the top of the chart
    figure.layout.yaxis2 = {
        "overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True,
    }  # fmt: skip
    _name_once(figure)
    return replace(chart, is_wide=True)


def _name_once(figure: go.Figure) -> None:
    """One entry of the legend per name, for the traces of all runs, whose colors the page names."""
    named: set[str] = set()
    for trace in figure.data:
        trace.legendgroup, trace.showlegend = trace.name, trace.name not in named
        named.add(trace.name)


def _marks(run: Run) -> list[go.Scatter]:
    """Saves as ticks at the bottom; restarts as lines, thicker where the cluster changed."""
    records, found = run.history.records, []
    saves = [
        (save["step"], f"saved, {number_of(save.get('save_seconds')):.3g} s")
        for save in records.of("save")[-MOST_MARKS:]
    ]
    if saves:
        steps, texts = zip(*saves, strict=True)
        found.append(go.Scatter(
            x=steps, y=[0.015] * len(steps), yaxis="y2", mode="markers", name="save",
            text=texts, opacity=0.8,
            hovertemplate=f"step %{{x:,}}<br>%{{text}}<extra>{escape(run.name)}</extra>",
            marker={"symbol": "line-ns-open", "size": 9, "color": run.color},
        ))  # fmt: skip
    by_kind: dict[str, list[tuple[int, str]]] = {"restart": [], "change of cluster": []}
    starts = records.of("start")[-MOST_MARKS:]
    for before, start in pairwise(starts):
        changes = [
            f"{name}: {text(before)} -> {text(start)}"
            for name, text in (("ranks", ranks_of), ("hosts", hosts_of), ("GPUs", gpus_of))
            if text(before) != text(start)
        ]
        kind = "change of cluster" if changes else "restart"
        by_kind[kind].append((start["step"], "<br>".join(map(escape, changes)) or "restart"))
    for kind, width, dash in (("restart", 1, "dot"), ("change of cluster", 2, "solid")):
        if marks := by_kind[kind]:
            found.append(go.Scatter(
                x=[x for step, _ in marks for x in (step, step, None)],
                y=[y for _ in marks for y in (0, 1, None)],
                text=[text for _, said in marks for text in (said, said, None)],
                yaxis="y2", mode="lines", name=kind,
                line={"color": GREY, "width": width, "dash": dash},
                hovertemplate=f"step %{{x:,}}<br>%{{text}}<extra>{escape(run.name)}</extra>",
            ))  # fmt: skip
    return found


def ranks_of(start: dict[str, Any]) -> str:
    """The number of ranks in a record `start`."""
    return f"{number_of(start.get('world_size')):g}"


def hosts_of(start: dict[str, Any]) -> str:
    """The hosts in a record `start`."""
    hosts = start.get("hosts")
    return ", ".join(map(str, hosts)) if isinstance(hosts, list) else "not known"


def gpus_of(start: dict[str, Any]) -> str:
    """The GPUs in a record `start`, counted by model."""
    of_hosts = start.get("gpus")
    names: list[str] = []
    for gpus in of_hosts if isinstance(of_hosts, list) else []:
        names += map(str, gpus if isinstance(gpus, list) else [gpus])
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"


# --------------------------------------------------------------------------------------------------
# Evaluation


def _evaluation(runs: Sequence[Run]) -> list[Chart]:
    """Loss, perplexity and scores of each named set."""
    found = []
    for prefixes, title, axis in (
        (("loss",), "Evaluation loss", "nats per token"),
        (("perplexity",), "Perplexity", ""),
        (("exact_match", "score"), "Scores", "mean over the answers"),
    ):
        figure = _figure(axis, legend=True)
        for run in runs:
            for number, (name, points) in enumerate(evaluations(run.history, prefixes).items()):
                color = run.color if len(runs) > 1 else COLORS[number % len(COLORS)]
                steps, values = (np.array(list(part)) for part in zip(*points.items(), strict=True))
                figure.add_trace(_line(
                    *thin(steps, values), run, escape(name), mode="lines+markers",
                    marker={"size": 6},
                    line={"color": color, "width": 2, "dash": DASHES[number % len(DASHES)]},
                ))  # fmt: skip
        if figure.data:
            _name_once(figure)
            one = len({trace.name for trace in figure.data}) == 1
            figure.layout.showlegend, figure.layout.meta = not one, prefixes[0]
            found.append(Chart(title, "", figure))
    return found


def evaluations(history: History, prefixes: Iterable[str]) -> dict[str, dict[int, float]]:
    """Name of the set -> step -> value, of the records `eval`. A score has its metric's name too.
    A run that has only `eval_loss` has one set, held_out.
    """
    prefixes, found = tuple(prefixes), {}
    for record in history.records.of("eval"):
        values = {}
        for key, value in record.items():
            prefix, slash, name = key.partition("/")
            if slash and prefix in prefixes:
                values[name if len(prefixes) == 1 else f"{prefix} {name}"] = number_of(value)
        if not values and "loss" in prefixes:
            values["held_out"] = number_of(record.get("eval_loss"))
        for name, value in values.items():
            if not math.isnan(value) and (name in found or len(found) < MOST_SETS):
                found.setdefault(name, {})[record["step"]] = value
    return found


# --------------------------------------------------------------------------------------------------
# Time


def _step_time(run: Run, suffix: str) -> Chart | None:
    """The parts of a step, stacked: means of bins of steps, and the slowest step of each bin."""
    train = run.history.records.train
    if "step_seconds" not in train:
        return None
    parts = {name: train[f"{name}_seconds"] for name in PARTS if f"{name}_seconds" in train}
    known = np.zeros(len(train["step"]))
    for seconds in parts.values():
        known += np.nan_to_num(seconds)
    parts["rest"] = np.clip(train["step_seconds"] - known, 0, None)
    edges = np.unique(np.linspace(0, len(known), MOST_POINTS // 4 + 1).astype(int))
    if len(known) <= MOST_POINTS // 4:
        edges = np.arange(len(known) + 1)
    sizes, starts = np.diff(edges), edges[:-1]
    x = train["step"][edges[1:] - 1]
    figure = _figure("seconds", legend=True)
    for color, (name, seconds) in zip(COLORS, parts.items(), strict=False):
        mean = np.add.reduceat(np.nan_to_num(seconds), starts) / sizes
        figure.add_trace(_line(x, mean, run, name, stackgroup="parts",
                               line={"width": 0, "color": color}))  # fmt: skip
    slowest = np.fmax.reduceat(train["step_seconds"], starts)
    if sizes.max() > 1:
        figure.add_trace(_line(x, slowest, run, "slowest", line={"width": 1, "color": GREY}))
    # one step of minutes, such as the first one with torch.compile, would flatten all others
    means = np.add.reduceat(np.nan_to_num(train["step_seconds"]), starts) / sizes
    top = 1.3 * max(float(np.percentile(means, 98)), float(np.nanmedian(slowest)))
    figure.layout.yaxis.range = [0, top if top > 0 else 1]
    per = f", means of {sizes.max():,} steps" if sizes.max() > 1 else ""
    return Chart(f"Step time{suffix}", f"of rank 0, without evaluation and saves{per}", figure)


def _heat_maps(windows: Sequence[Window], suffix: str) -> list[Chart]:
    """One row per rank, one column per window: own time and data wait relative to the median rank,
    and what the GPUs report.
    """
    found = []
    for key, title, axis in (
        ("own_seconds", "Time of each rank", "x median"),
        ("data_seconds", "Data wait of each rank", "seconds"),
        ("temperature_celsius", "GPU temperature", "°C"),
        ("sm_clock_mhz", "GPU clock", "MHz"),
        ("power_watts", "GPU power", "W"),
    ):
        of_key = [window for window in windows if key in window.values]
        if not of_key:
            continue
        edges = np.unique(np.linspace(0, len(of_key), MOST_COLUMNS + 1).astype(int))
        grouped = [of_key[start:end] for start, end in pairwise(edges)]
        ranks = max(len(window.values[key]) for window in of_key)
        z = np.full((ranks, len(grouped)), np.nan, dtype=np.float32)
        for column, group in enumerate(grouped):
            for window in group:  # the largest of a group, so that no slow window is lost
                values = window.values[key]
                if key == "own_seconds":
                    values = values / np.nanmedian(values)
                z[: len(values), column] = np.fmax(z[: len(values), column], values)
        steps, hosts = [group[-1].step for group in grouped], of_key[-1].hosts
        found.append(_heat_map(z, steps, hosts, f"{title}{suffix}", axis))
    return found


def _heat_map(
    z: np.ndarray, steps: list[int], hosts: Sequence[str], title: str, axis: str
) -> Chart:
    """A heat map of z, float32 of shape (ranks, columns). Relative values are centered on 1."""
    labels = [
        f"{rank} {escape(hosts[rank])}" if rank < len(hosts) else str(rank)
        for rank in range(len(z))
    ]
    relative = axis == "x median"
    usual, high = "rgba(138,138,138,0.18)", float(np.nanmax(z))
    if relative:
        reach = max(0.2, min(1.0, float(np.nanmax(np.abs(z - 1)))))
        low, high = 1 - reach, 1 + reach
        colors = [[0, "#3b82d6"], [0.5, usual], [1, "#d3525c"]]
    else:
        low = min(float(np.nanmin(z)), 0.8 * high)
        colors = [[0, usual], [1, "#e07b39"]]
    figure = _figure("", type="category", autorange="reversed")
    figure.add_trace(go.Heatmap(
        z=z, x=steps, y=labels, hovertemplate="step %{x:,}<br>rank %{y}<br>%{z:.4g}<extra></extra>",
        colorbar={"title": {"text": axis, "side": "right"}, "thickness": 10},
        colorscale=colors, zmin=low, zmax=high,
    ))  # fmt: skip
    note = "outside of collectives, over the median rank; 1 is usual" if relative else ""
    return Chart(title, note, figure)
