"""Compare tokenizing with TRL's way on the same chat rows, in turns, from JSONL to Arrow files.

    python -m benchmarks.tokenizing [--rows 2000] [--repeats 5] [--text ROWS.jsonl]

TRL's way is `datasets.map`, row by row, with `apply_chat_template` and its mask of the template's
{% generation %} marks. From a template without them it gets no mask, and a row is encoded turn by
turn instead. Both have the same byte-level BPE tokenizer, trained on the text that the rows are
made of: the sources of Python's standard library, or the strings in the rows of --text. Both run
in one process. The ratio is the median of those of rows/s in the same repeat, with the smallest and
largest one.
"""

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from zerotrain.config.schema import DataConfig
from zerotrain.data.tokenize import open_cache, tokenize_sources
from zerotrain.tools.train_tokenizer import CHAT_TEMPLATE, texts_of, train_tokenizer

UNMARKED = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
SHAPES = {"long": (6, 400), "short": (2, 120)}  # turns of a row, and characters of a turn at most
Tokenize = Callable[[Path, PreTrainedTokenizerFast, str], float]
"""From a file of rows to Arrow files in a folder; returns the mean tokens of a row."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--text", help="rows of any format; default: the standard library")
    parser.add_argument("--vocab_size", type=int, default=32_768)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    texts = list(texts_of(args.text) if args.text else standard_library())
    random.Random(0).shuffle(texts)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        table = Table("rows", "template", "tokens", "TRL's way, rows/s", "ours")
        for shape, (turns, characters) in SHAPES.items():
            file = Path(folder) / f"{shape}.jsonl"
            write_rows(file, texts, args.rows, turns, characters)
            for template, theirs in ((CHAT_TEMPLATE, masked), (UNMARKED, turn_by_turn)):
                tokenizer.chat_template = template
                ways = (ours, by_map(theirs))
                name = "marked" if theirs is masked else "unmarked"
                table.add_row(shape, name, *compare(file, tokenizer, ways, args))
        Console(width=130).print(table)


def compare(
    file: Path,
    tokenizer: PreTrainedTokenizerFast,
    ways: tuple[Tokenize, Tokenize],
    args: argparse.Namespace,
) -> list[str]:
    """Cells of the table for our way and theirs."""
    rates: list[list[float]] = [[], []]
    for repeat in range(args.repeats + 1):
        for found, way in zip(rates, ways, strict=True):
            rate, tokens = measure(way, file, tokenizer, args.rows)
            if repeat:  # the first one imports, compiles the template and so on
                found.append(rate)
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    median, of_theirs = statistics.median(ratios), statistics.median(rates[1])
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [f"{tokens:.0f}", f"{of_theirs:,.0f}", f"{median:.2f} ({spread})"]


def measure(
    way: Tokenize, file: Path, tokenizer: PreTrainedTokenizerFast, rows: int
) -> tuple[float, float]:
    """(rows/s, mean tokens of a row), with nothing cached."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        began = time.perf_counter()
        tokens = way(file, tokenizer, folder)
        return rows / (time.perf_counter() - began), tokens


def ours(file: Path, tokenizer: PreTrainedTokenizerFast, folder: str) -> float:
    config = DataConfig(train_sources=[str(file)], cache_dir=folder, max_length=100_000)
    cache = tokenize_sources(config.sources("train_sources"), tokenizer, config)
    return float(open_cache(cache).lengths.mean())


def by_map(row_to_tokens: Callable[..., dict[str, Any]]) -> Tokenize:
    def tokenize(file: Path, tokenizer: PreTrainedTokenizerFast, folder: str) -> float:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=folder)
        columns = rows.column_names
        mapped = rows.map(row_to_tokens, fn_kwargs={"tokenizer": tokenizer}, remove_columns=columns)
        return len(mapped.data["input_ids"].combine_chunks().flatten()) / len(rows)

    return tokenize


def masked(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    encoded = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    return {key: encoded[key] for key in ("input_ids", "assistant_masks")}


def turn_by_turn(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    before = ""
    for number, message in enumerate(row["messages"], start=1):
        text = tokenizer.apply_chat_template(row["messages"][:number], tokenize=False)
        turn = tokenizer(text.removeprefix(before), add_special_tokens=False)["input_ids"]
        ids += turn
        mask += [int(message["role"] == "assistant")] * len(turn)
        before = text
    return {"input_ids": ids, "assistant_masks": mask}


def standard_library() -> Iterator[str]:
    """The paragraphs of its sources."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from filter(str.strip, file.read_text("utf-8", "ignore").split("\n\n"))


def write_rows(file: Path, texts: list[str], count: int, turns: int, characters: int) -> None:
    supply = cycle(texts)
    with file.open("w") as out:
        for _ in range(count):
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": text[:characters]}
                for i, text in enumerate(islice(supply, turns))
            ]
            out.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
