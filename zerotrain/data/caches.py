"""The token caches of a run: which folders they are, and the program that makes missing ones."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import xxhash
from transformers import PreTrainedTokenizerBase

from zerotrain.config.parse import dump_config
from zerotrain.config.schema import COMMIT, Config, Source, chat_template_file
from zerotrain.data.cache import CACHE_VERSION, TokenizedRows, open_cache
from zerotrain.runtime.errors import EnvironmentFailure, UserError
from zerotrain.runtime.files import files_of, read_text

REPOSITORY = Path(__file__).resolve().parents[2]
ERROR_LINE = re.compile(r"(?:\[rank .*?\] )?error: (.*)")  # exit_on_error prints it.
# tar, rsync and container images keep size and time of a file that they replace, but not the rest.
STATUS = operator.attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
NOT_OF_TOKENS = {
    "train_sources", "eval_sources", "eval_fraction", "batching", "micro_batch_tokens", "cache_dir",
}  # fmt: skip
"""Keys of the data section that do not change the tokens of a row."""


def sets_of(config: Config) -> dict[str, list[Source]]:
    """Return the sources of the training data, and of each held-out set, by their keys."""
    held_out = {f"data.eval_sources.{name}": s for name, s in config.data.eval_sources.items()}
    return {"data.train_sources": config.data.train_sources, **held_out}


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
    given = []
    for source in sources:
        options = {k: v for k, v in asdict(source).items() if k not in ("path", "repeat")}
        files = {*map(os.path.realpath, files_of(source.path) if source.path else ())}
        files = sorted(filter(os.path.exists, files))  # A link may lead to nothing.
        given += [options, [[file, *STATUS(os.stat(file))] for file in files]]  # noqa: PTH116
    template = chat_template_file(config.model.chat_template or "")
    key = json.dumps(
        [
            CACHE_VERSION,
            given,
            {key: value for key, value in asdict(data).items() if key not in NOT_OF_TOKENS}
            | config.model.chat_template_kwargs,
            read_text(str(template), "model.chat_template: ") if template.is_file() else None,
            tokenizer,
        ]
    )
    return Path(data.cache_dir) / ".links" / xxhash.xxh3_128_hexdigest(key.encode())


def cache_of(sources: list[Source], tokenizer: str, config: Config) -> tuple[Path, str] | None:
    """Return the folder of the cache of these sources, and what the sources have that was not read;
    None if the cache has to be made or checked.
    """
    with suppress(OSError):
        name, _, unread = link_of(sources, tokenizer, config).read_text().partition("\n")
        folder = Path(config.data.cache_dir) / name
        return (folder, unread) if folder.is_dir() else None
    return None


def check_of(config: Config, tokenizer: str) -> Path:
    """Return the file in data.cache_dir that exists if the sets were compared with each other: each
    of them may have a cache, but not as part of the same run.

    Args:
        tokenizer: as for link_of.
    """
    links = [link_of(sources, tokenizer, config) for sources in sets_of(config).values()]
    return links[0].with_name(xxhash.xxh3_128_hexdigest(str(links).encode()))


def make_missing_caches(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run the program that tokenizes rows, unless all caches of the config exist and their sources
    have been compared. It also runs for a hub data set without a commit, which may have changed.

    Raises:
        UserError: the program's one line.
    """
    key = tokenizer_key(tokenizer)
    if check_of(config, key).exists() and all(
        cache_of(given, key, config)
        and all(source.path or COMMIT.fullmatch(source.revision or "") for source in given)
        for given in sets_of(config).values()
    ):
        return
    trust = ["--model.trust_remote_code", str(config.model.trust_remote_code)]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        program = subprocess.Popen(
            # -P: the working folder may have another package of this name.
            [sys.executable, "-P", "-m", "scripts.tokenize", "--config", file.name, *trust],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,  # Its summary: the start-up table says the same.
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # It ends with all processes of its pool.
        )
        error = ""
        try:
            for line in program.stderr:
                if found := ERROR_LINE.match(line):
                    error = found[1]
                else:
                    print(line, end="", file=sys.stderr)
            code = program.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
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
    for sources in sets_of(config).values():
        found = cache_of(sources, key, config)
        if found is None:
            raise UserError("a file of a source changed while it was read; start again")
        folder, unread = found
        rows = replace(open_cache(folder), unread=unread)
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
