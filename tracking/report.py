"""One self-contained HTML page about one run or several, from what is in their folders."""

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from plotly.offline import get_plotlyjs

from tracking.history import History, number_of, read_history
from tracking.report_charts import (
    COLORS,
    Run,
    charts_of,
    evaluations,
    gpus_of,
    hosts_of,
    ranks_of,
)

TEMPLATE = "report.html"
OWN_KEYS = ("output_dir", "ds_config")  # each run has its own
SHOWN_EVENTS = 300  # of a run, the last ones
SHOWN_STARTS = 100
SHOWN_EVALUATIONS = 8  # with generations
SHOWN_ANSWERS = 50  # of an evaluation and set
SHOWN_CHARACTERS = 4000  # of a text of a run


def report_page(folders: Sequence[Path]) -> str:
    """The page. Texts of the runs are escaped, whatever they are; nothing is loaded from elsewhere.

    Raises:
        UserError: one of them is not a run folder.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(TEMPLATE)
    page = template.render(**content_of(runs_of(folders)), plotly=get_plotlyjs())
    return page.encode("utf-8", "replace").decode()  # JSON may have half a surrogate pair


def runs_of(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each with a name and a color of its own.

    Raises:
        UserError: one of them is not a run folder.
    """
    return [
        Run(name, COLORS[i % len(COLORS)], read_history(folder))
        for i, (name, folder) in enumerate(zip(_names(folders), folders, strict=True))
    ]


def content_of(runs: Sequence[Run]) -> dict[str, Any]:
    """What report.html shows, by its names there: texts as they are, and figures as JSON."""
    with np.errstate(all="ignore"):  # a value of 1e300, or a median of 0
        charts = charts_of(runs)
    figures = ",".join(chart.figure.to_json(engine="json") for chart in charts)
    return {
        "runs": runs,
        "charts": charts,
        "summary": _table([_summary(run) for run in runs]),
        "problems": [(run.name, text) for run in runs for text in _problems(run.history)],
        "events": [event for run in runs for event in _events(run)],
        "generations": [(run, _generations(run.history)) for run in runs],
        "differences": _differences(runs),
        "configs": [
            (run.name, title, _shown(config))
            for run in runs
            for title, config in (
                ("run config", run.history.config),
                ("DeepSpeed config", run.history.ds_config),
            )
        ],
        "starts": [start for run in runs for start in _starts(run)],
        "versions": _table([_versions(run.history) for run in runs]),
        # within <script>, where only `<` could end it
        "figures": f"[{figures}]".replace("<", "\\u003c"),
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _table(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows of the keys of all columns; an empty text where a column lacks one."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [(key, [column.get(key, "") for column in columns]) for key in keys]


def _summary(run: Run) -> dict[str, str]:
    """What a person asks first."""
    records, facts = run.history.records, {}
    train, starts = records.train, records.of("start")
    steps = train["step"]
    facts["steps"] = f"{int(steps[-1]):,}" if len(steps) else "none is finished"
    if len(starts) > 1:
        facts["restarts"] = f"{len(starts) - 1:,}"
    if starts:
        facts["ranks"] = f"{ranks_of(starts[-1])} on {hosts_of(starts[-1])}"
        facts["GPUs"] = gpus_of(starts[-1])
    if len(times := _times(run.history)):
        facts["first record"], facts["last record"] = _clock(min(times)), _clock(max(times))
    if not len(steps):
        return facts
    if "loss" in train:
        facts["loss, last step"] = f"{train['loss'][-1]:.4f}"
    for name, points in evaluations(run.history, ["loss"]).items():
        best = min(points, key=points.__getitem__)
        facts[f"evaluation loss, {name}"] = (
            f"{points[max(points)]:.4f} at step {max(points):,}, "
            f"best {points[best]:.4f} at step {best:,}"
        )
    if "tokens_total" in train or "tokens" in train:
        total = train["tokens_total"][-1] if "tokens_total" in train else np.nansum(train["tokens"])
        facts["tokens"] = f"{total:,.0f}"
    for key, name, form in (
        ("tokens_per_s", "tokens/s, median step", "{:,.0f}"),
        ("mfu", "MFU, median step", "{:.1%}"),
        ("step_seconds", "seconds per step, median", "{:.3g}"),
    ):
        if key in train:
            facts[name] = form.format(np.nanmedian(train[key]))
    if "data_seconds" in train and "step_seconds" in train:
        waited = np.nansum(train["data_seconds"]) / np.nansum(train["step_seconds"])
        facts["waiting for data"] = f"{waited:.1%} of the steps' time"
    if saves := [number_of(save.get("save_seconds")) for save in records.of("save")]:
        facts["saves"] = f"{len(saves):,}, median {statistics.median(saves):.3g} s"
    if skipped := int(np.nansum(train.get("update_skipped", 0))):
        facts["updates skipped"] = f"{skipped:,}"
    return facts


def _times(history: History) -> list[float]:
    records = history.records
    times = [number_of(record.get("time")) for kind in records.others.values() for record in kind]
    if "time" in records.train:
        times += [float(records.train["time"][0]), float(records.train["time"][-1])]
    return [time for time in times if 0 < time < 1e11]  # neither NaN nor beyond the year 5138


def _clock(seconds: float) -> str:
    """Unix time as UTC, since hosts and readers are anywhere."""
    if not 0 < seconds < 1e11:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _problems(history: History) -> list[str]:
    """What is missing or cannot be read, one line each."""
    records, found = history.records, list(history.missing)
    if not len(records.train["step"]):
        began = " after its start" if records.of("start") else ""
        found.append(f"no step is recorded: the run ended, or still is, before its first{began}")
    if bad := records.bad_lines:
        more = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        found.append(f"metrics.jsonl: line {bad[0]:,}{more} cannot be read and is left out")
    return found


def _events(run: Run) -> list[dict[str, str]]:
    events = run.history.records.of("event")[-SHOWN_EVENTS:]
    return [
        {
            "run": run.name,
            "step": f"{event['step']:,}",
            "time": _clock(number_of(event.get("time"))),
            "name": _cut(event.get("name", "")),
            "text": _cut(event.get("text", "")),
        }
        for event in events
    ]


def _starts(run: Run) -> list[dict[str, str]]:
    return [
        {
            "run": run.name,
            "step": f"{start['step']:,}",
            "time": _clock(number_of(start.get("time"))),
            "ranks": ranks_of(start),
            "hosts": _cut(hosts_of(start)),
            "gpus": _cut(gpus_of(start)),
        }
        for start in run.history.records.of("start")[-SHOWN_STARTS:]
    ]


def _versions(history: History) -> dict[str, str]:
    """Of the last start."""
    starts = history.records.of("start")
    versions = starts[-1].get("versions") if starts else None
    found = versions if isinstance(versions, dict) else {}
    return {_cut(name): _cut(version) for name, version in found.items()}


def _generations(history: History) -> list[dict[str, Any]]:
    """The last evaluations' answers, newest first."""
    found = []
    for record in reversed(history.records.of("generations")[-SHOWN_EVALUATIONS:]):
        rows = record.get("rows")
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        found.append({
            "title": f"step {record['step']:,}, {_cut(record.get('set', ''))}",
            "count": len(rows),
            "rows": [
                [_cut(row.get(key, "")) for key in ("prompt", "expected", "answer", "score")]
                for row in rows[:SHOWN_ANSWERS]
            ],
        })  # fmt: skip
    return found


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys of the configs, and versions, that the runs do not share."""
    columns = []
    for run in runs:
        history = run.history
        config = {key: value for key, value in history.config.items() if key not in OWN_KEYS}
        of_deepspeed = {f"DeepSpeed: {key}": value for key, value in history.ds_config.items()}
        versions = {f"version: {name}": v for name, v in _versions(history).items()}
        starts = history.records.of("start")
        ranks = {"ranks": ranks_of(starts[-1])} if starts else {}
        columns.append(_shown({**config, **of_deepspeed, **ranks, **versions}))
    return [(key, values) for key, values in _table(columns) if len(set(values)) > 1]


def _shown(config: dict[str, Any]) -> dict[str, str]:
    """Values as one line of JSON each."""
    return {
        _cut(key): _cut(v if isinstance(v, str) else json.dumps(v, default=str, skipkeys=True))
        for key, v in config.items()
    }


def _cut(value: Any) -> str:
    """A text of a run, without its rest if it is very long."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} ... ({len(text) - SHOWN_CHARACTERS:,} characters more)"
