"""The token cache: a folder of tokenized examples, which every rank maps into its memory.

    examples.arrow      an Arrow stream with the columns of SCHEMA, one line per example
    meta.json           Meta
    rejected_rows.jsonl the rows that on_bad_row: skip left out, with reasons

`python -m scripts.tokenize` (zerotrain/rows/) makes one folder for the training sources and one for
each held-out set. The trainer knows nothing about rows but this format. data/README.md describes it
for other programs that write it.
"""

import glob
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from zerotrain.config.parse import dump_config
from zerotrain.config.schema import Config, Source, chat_template_file
from zerotrain.data.epoch_order import permute
from zerotrain.runtime.errors import EnvironmentFailure, UserError, describe

CACHE_VERSION = 18
"""Increase it when the same rows give another cache than before, or when the format changes."""
REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = re.compile("[0-9a-f]{40}")
# tar, rsync and container images keep size and time of a file that they replace, but not the rest.
STATUS = operator.attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
NOT_OF_TOKENS = {
    "train_sources", "eval_sources", "eval_fraction", "batching", "micro_batch_tokens", "cache_dir",
}  # fmt: skip
"""Keys of the data section that do not change the tokens of a row."""
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "length": pa.int32(),  # tokens
        "supervised": pa.int32(),  # tokens that carry loss
        "file": pa.string(),
        "place": pa.int64(),  # line of the file, or number of the row in it
        "row": pa.int64(),  # number among all rows read, the same for pieces of a row
        "content": pa.uint64(),  # hash of input_ids
    }
)


@dataclass(frozen=True)
class Meta:
    """What is known of all examples of a cache: meta.json."""

    version: int
    """CACHE_VERSION of the program that wrote it."""
    content: str
    """A hash of all tokens and masks. A run resumes only on the content that it started with."""
    end_tokens: list[int]
    """Ids of the tokens that end answers."""
    chat_template: str | dict[str, str] | None
    """The tokenizer's chat templates as the rows were rendered; exports have the same."""
    masks: str
    """What is supervised, for the start-up table."""
    sources: list[str]
    formats: list[str]
    """Row format of each source."""
    source_examples: list[int]
    """Examples of each source; the examples are in the order of the sources."""
    revisions: list[str | None]
    """Commit of each source that is a hub data set, None for others."""
    rows_read: int
    over_length: dict[str, int]
    """Outcome -> number of rows longer than data.max_length that had it."""
    rejected: dict[str, int]
    """Reason -> number of rows that were left out for it."""
    unprompted: dict[str, int]
    """End of a server's generation prompt -> number of rows that lack it before an answer."""


@dataclass(frozen=True)
class TokenizedRows:
    """The examples `index`, int64 [examples], of a memory-mapped cache. Index i of every array is
    the same example.
    """

    table: pa.Table
    index: np.ndarray
    meta: Meta
    folder: Path

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [examples], in tokens."""
        return self.column("length")

    @cached_property
    def supervised(self) -> np.ndarray:
        """int32 [examples], the number of tokens that carry loss."""
        return self.column("supervised")

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> np.ndarray:
        """A column of numbers of SCHEMA, [examples]."""
        # pyarrow's to_numpy would import pandas
        return np.from_dlpack(self.table[name].combine_chunks())[self.index]

    def fetch(self, examples: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids and loss mask (0 or 1) of each example: n arrays int64 [2, tokens].

        Args:
            examples: n indices.
        """
        columns = self.table["input_ids"], self.table["loss_mask"]
        return [
            np.stack([np.from_dlpack(column[row].values.cast("int64")) for column in columns])
            for row in self.index[examples]
        ]

    def place_of(self, example: int) -> str:
        """FILE:LINE of the row that an example came from."""
        row = self.index[example]
        return f"{self.table['file'][row]}:{self.table['place'][row]}"


# --------------------------------------------------------------------------------------------------
# Which cache belongs to which sources


def sets_of(config: Config) -> list[list[Source]]:
    """Return the sources of the training data, and of each held-out set."""
    return [config.data.train_sources, *config.data.eval_sources.values()]


def files_of(path: str) -> list[str]:
    """Return all files of a path, a folder (with subfolders) or a glob, in any order. ~ and
    variables are expanded, hidden files are left out.
    """
    path = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111
    # As a glob, as a name that may contain brackets, and as a folder.
    patterns = (path, glob.escape(path), f"{glob.escape(path)}/**/*")
    return [f for pattern in patterns for f in glob.glob(pattern, recursive=True)]  # noqa: PTH207


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text with everything about a tokenizer that decides the tokens of a row."""
    return json.dumps(
        [
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            # tokenizer.json does not say which tokens are eos and bos.
            str(sorted(tokenizer.special_tokens_map.items())),
        ]
    )


def link_of(sources: list[Source], tokenizer: str, config: Config) -> Path:
    """Return the file in data.cache_dir that names the cache of these sources. A change of a file,
    the tokenizer or a setting of tokens leads to another link. Only the status of files is read.

    Args:
        tokenizer: tokenizer_key before the run's chat template is set.
    """
    data = config.data
    files = {*map(os.path.realpath, (f for s in sources if s.path for f in files_of(s.path)))}
    template = chat_template_file(config.model.chat_template or "")
    key = json.dumps(
        [
            CACHE_VERSION,
            [asdict(replace(source, repeat=1)) for source in sources],
            [[file, *STATUS(os.stat(file))] for file in sorted(files)],  # noqa: PTH116
            {key: value for key, value in asdict(data).items() if key not in NOT_OF_TOKENS},
            template.read_text() if template.is_file() else None,
            tokenizer,
        ]
    )
    return Path(data.cache_dir) / ".links" / xxhash.xxh3_128_hexdigest(key.encode())


def cache_of(sources: list[Source], tokenizer: str, config: Config) -> Path | None:
    """Return the folder of the cache of these sources; None if it has to be made or checked."""
    with suppress(OSError):
        folder = Path(config.data.cache_dir) / link_of(sources, tokenizer, config).read_text()
        return folder if folder.is_dir() else None
    return None


def make_missing_caches(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run the program that tokenizes rows, unless all caches of the config exist. It also runs for
    a hub data set without a commit, which may have changed.

    Raises:
        UserError: the program's one line.
    """
    key = tokenizer_key(tokenizer)
    if all(
        cache_of(given, key, config)
        and all(source.path or COMMIT.fullmatch(source.revision or "") for source in given)
        for given in sets_of(config)
    ):
        return
    trust = ["--model.trust_remote_code", str(config.model.trust_remote_code)]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        program = subprocess.Popen(
            [sys.executable, "-m", "scripts.tokenize", "--config", file.name, *trust],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,  # Its summary: the start-up table says the same.
            stderr=subprocess.PIPE,
            text=True,
        )
        error = ""
        try:
            for line in program.stderr:
                _, is_error, message = line.partition("error: ")
                error = message.strip() if is_error else error
                if not is_error:
                    print(line, end="", file=sys.stderr)
            code = program.wait()
        finally:
            program.kill()
    if code:
        kind = UserError if code == UserError.exit_code else EnvironmentFailure
        raise kind(error or f"python -m scripts.tokenize ended with exit code {code}; see above")


def open_caches(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[TokenizedRows]:
    """Memory-map the examples of the training data, and of each held-out set.

    Raises:
        UserError: a cache is missing, damaged or not of this config.
    """
    key = tokenizer_key(tokenizer)
    opened = []
    for sources in sets_of(config):
        folder = cache_of(sources, key, config)
        if folder is None:
            raise UserError("a file of a source changed while it was read; start again")
        rows = open_cache(folder)
        if len(rows.meta.sources) > len(sources):  # One source, which is a cache of several.
            meta = replace(
                rows.meta,
                sources=[str(folder)],
                formats=["token cache"],
                source_examples=[len(rows)],
                revisions=[None],
            )
            rows = replace(rows, meta=meta)
        opened.append(rows)
    return opened


def open_cache(path: Path) -> TokenizedRows:
    """Memory-map a cache folder.

    Raises:
        UserError: a file cannot be read, lacks its end, or is not in this format.
    """
    try:
        meta = TypeAdapter(Meta).validate_json((path / "meta.json").read_bytes())
        if meta.version != CACHE_VERSION:
            raise ValueError(f"its version is {meta.version}, not {CACHE_VERSION}")
        table = pa.ipc.open_stream(pa.memory_map(str(path / "examples.arrow"))).read_all()
        table.validate()  # that lists end within the file
        if table.schema != SCHEMA:
            raise ValueError("its columns differ from the format in data/README.md")
        ids, mask = (pc.list_value_length(table[name]) for name in ("input_ids", "loss_mask"))
        # A stream that ends between two batches can be read, but lacks examples.
        is_whole = len(table) == sum(meta.source_examples)
        if not is_whole or not ids == mask == table["length"]:
            raise ValueError("its numbers of examples or tokens differ")
        return TokenizedRows(table, np.arange(len(table)), meta, path)
    except Exception as error:  # pydantic and pyarrow raise their own.
        raise UserError(
            f"data.cache_dir: cannot read {path} ({describe(error)}); delete it, and the rows are "
            "tokenized again, or set data.cache_dir to a folder of your own"
        ) from error


def hold_out(
    data: TokenizedRows, fraction: float, seed: int
) -> tuple[TokenizedRows, TokenizedRows]:
    """Return (training, held-out) examples: a random `fraction` of the rows is held out.

    The pieces of a split row stay together, or the model would be evaluated on rows that it was
    partly trained on.
    """
    # Number the rows again: rows without an example have left gaps.
    _, index = np.unique(data.column("row"), return_inverse=True)
    rows = int(index[-1]) + 1
    count = max(1, round(rows * fraction))
    if count == rows:
        raise UserError(
            f"data.eval_fraction: {fraction:g} of {rows:,} rows leaves none to train on; lower it, "
            "or set data.eval_sources"
        )
    held = np.isin(index, permute(np.arange(count), rows, seed))
    ends = np.cumsum(data.meta.source_examples)

    def part(is_in: np.ndarray) -> TokenizedRows:
        index = np.flatnonzero(is_in)
        meta = replace(
            data.meta,
            # A run cannot resume with another fraction or seed, since its data would differ.
            content=xxhash.xxh3_64_hexdigest(data.meta.content.encode() + index.tobytes()),
            source_examples=np.diff(np.searchsorted(index, ends), prepend=0).tolist(),
        )
        return replace(data, index=index, meta=meta)

    return part(~held), part(held)
