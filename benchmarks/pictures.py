"""Draw the pages' pictures from docs/pictures/data, where pictures.sh --run puts results.

    python -m benchmarks.pictures

The SVGs follow the reader's color scheme and load nothing. pictures.sh also draws the report.
"""

import io
import re
from pathlib import Path

import pandas as pd
from matplotlib import pyplot
from rich.console import Console
from rich.text import Text

PICTURES = Path("docs/pictures")
DATA = PICTURES / "data"
MARKERS = "osD^v*P"  # one for each run of losses.csv
COLORS = """
:root { --ink: #1f2328; --page: #ffffff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117 } }
text { fill: var(--ink) }
"""


def main() -> None:
    pyplot.style.use(Path(__file__).with_suffix(".mplstyle"))
    draw_losses(read_table("losses.csv"))
    draw_first_run(read_table("first_run.csv"))
    if (DATA / "bf16.csv").exists():
        draw_bf16(read_table("bf16.csv"))
    if (DATA / "offload.csv").exists():
        draw_offload(read_table("offload.csv"))
    draw_efficiency(read_table("efficiency.csv"))
    draw_terminal((DATA / "terminal.txt").read_text())


def read_table(name: str) -> pd.DataFrame:
    """Return a table from a file whose lines are cells: row, column, value."""
    return pd.read_csv(DATA / name, index_col=[0, 1]).squeeze().unstack(sort=False)


def draw_losses(losses: pd.DataFrame) -> None:
    """Draw one curve; in turn, each run has the marker of a step."""
    figure, axes = pyplot.subplots()
    axes.plot(losses.iloc[:, 0], color="gray", linewidth=1)
    for i, name in enumerate(losses):
        points = losses[name][i :: len(losses.columns)]
        axes.plot(points, MARKERS[i], label=name, markersize=9)
    difference = (losses.max(axis=1) / losses.min(axis=1) - 1).max()
    axes.set(
        # 1e-05 is TOLERANCE of scripts/compare_runs.py
        title=f"Training loss of {len(losses.columns)} runs, nats per token\n"
        f"largest relative difference between two runs: {difference:.0e}, allowed: 1e-05",
        xlabel="step",
    )
    figure.legend(loc="outside right center", title="each run marks every 7th step")
    save("losses.svg")


def draw_first_run(losses: pd.DataFrame) -> None:
    figure, axes = pyplot.subplots()
    axes.plot(losses["training"], color="gray", linewidth=1, label="training")
    axes.plot(losses["held out"].dropna(), "o-", label="held out")
    axes.set(title="SmolLM2-135M on gsm8k: loss, nats per token", xlabel="step")
    figure.legend(loc="outside right center")
    save("first_run.svg")


def draw_bf16(losses: pd.DataFrame) -> None:
    figure, axes = pyplot.subplots()
    for run, style, size in (
        ("fp32", "o-", 11),
        ("bf16 spread", "s-", 5),
        ("bf16 loaded", "D--", 5),
    ):
        axes.plot(losses[run], style, markersize=size, label=run.replace(" ", ", masters "))
    axes.set(
        title="Held-out loss of three runs with the same rows, nats per token",
        xlabel="step",
    )
    figure.legend(loc="outside right center")
    save("bf16.svg")


def draw_offload(losses: pd.DataFrame) -> None:
    """Draw one color for each seed, and in it one style for each optimizer."""
    figure, axes = pyplot.subplots()
    smooth = losses.rolling(10).mean()
    styles = {"CPU Adam": "-", "torch's AdamW": "--", "plain loop": ":"}
    for name in losses.filter(regex=r"seed \d+$"):
        kind, seed = name.split(", seed ")
        color = f"C{int(seed) - 1}"
        axes.plot(smooth[name], styles[kind], color=color, linewidth=1.5, label=name)
    axes.set(
        title="Training loss in bf16, nats per token\nmean of the last 10 steps, one row a step",
        xlabel="step",
    )
    figure.legend(loc="outside right center")
    save("offload.svg")


def draw_efficiency(shares: pd.DataFrame) -> None:
    figure, axes = pyplot.subplots()
    shares.plot(ax=axes, logx=True, style=["o-", "o-", "o--", "o--", "o--"], legend=False)
    axes.set_xticks(shares.index)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(
        title="Simulation: share of all ranks' compute that goes into real tokens\n"
        "log-normal lengths, mean 270; 29,500 tokens per rank and step; no communication",
        xlabel="ranks\nrandom: micro-batches of equally many rows, padded to the longest",
    )
    figure.legend(loc="outside right center", title="dashed: Trainer's samplers")
    save("efficiency.svg")


def save(name: str) -> None:
    svg = io.StringIO()
    pyplot.savefig(svg, metadata={"Date": None})
    text = svg.getvalue().replace("#000000", "var(--ink)").replace("#ffffff", "var(--page)")
    (PICTURES / name).write_text(text.replace("*{", f"{COLORS}*{{"))


def draw_terminal(shown: str) -> None:
    console = Console(record=True, width=104, file=io.StringIO())
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="./scripts/demo.sh")
    fonts = "@font-face {.*?}"  # They would be loaded from another host.
    (PICTURES / "terminal.svg").write_text(re.sub(fonts, "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
