"""Draw what runs have left in docs/pictures/data; pictures.sh makes it, and draws the report.

    python -m benchmarks.pictures

The SVGs follow the reader's color scheme, and load nothing.
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
COLORS = """
:root { --ink: #1f2328; --page: #ffffff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117 } }
text { fill: var(--ink) }
"""


def main() -> None:
    pyplot.style.use(Path(__file__).with_suffix(".mplstyle"))
    draw_losses(read_table("losses.csv"))
    draw_efficiency(read_table("efficiency.csv"))
    draw_terminal((DATA / "terminal.txt").read_text())


def read_table(name: str) -> pd.DataFrame:
    """A file with a line for each cell: its row, its column, its value."""
    return pd.read_csv(DATA / name, index_col=[0, 1]).squeeze().unstack(sort=False)


def draw_losses(losses: pd.DataFrame) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    for i, name in enumerate(losses):
        # each line is narrower than those that it lies on
        left.plot(losses[name], linewidth=2 * (len(losses.columns) - i))
        right.semilogy(abs(losses[name] - losses.iloc[:, 0]), label=name, nonpositive="mask")
    left.set(title="Training loss, nats per token", xlabel="step")
    right.set(title="Difference from the first run", xlabel="step")
    figure.legend(loc="outside lower center", ncols=4)
    save("losses.svg")


def draw_efficiency(shares: pd.DataFrame) -> None:
    figure, axes = pyplot.subplots()
    shares.plot(ax=axes, logx=True, style=["o-", "o-", "o--", "o--", "o--"], legend=False)
    axes.set_xticks(shares.index)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set(title="Share of all ranks' time that goes into real tokens")
    figure.legend(loc="outside right center", title="dashed: Trainer's")
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
    fonts = "@font-face {.*?}"  # of another host
    (PICTURES / "terminal.svg").write_text(re.sub(fonts, "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
