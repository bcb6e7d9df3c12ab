"""Compares every row of the sources with its decoded tokens and loss mask, for
`scripts/prove.py data`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from data import sources
from data.messages import METADATA, canonical_row
from data.options import RenderOptions
from data.render import SPLIT, fit, render
from data.sources import BadRow
from data.supervision import Ends, check_turns, keys_in_text, segments, turns_of
from data.tokenize import TokenizedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from config.schema import DataConfig, Source

NAMED = 5  # at most so many problems of each kind are listed by file and line


class RowProof:
    """Goes through rows, counts their contents and collects problems."""

    def __init__(
        self, config: "DataConfig", tokenizer: "PreTrainedTokenizerBase", cache: TokenizedRows
    ) -> None:
        self.config, self.tokenizer, self.cache = config, tokenizer, cache
        self.row_of = np.asarray(cache.rows["row"][:])  # of each example in the cache, ascending
        self.compared = 0  # examples of the cache
        self.counts: Counter[str] = Counter({"rows": 0})
        self.roles: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.unseen: dict[str, list[str]] = {}  # key -> places of the rows that lack its text
        self.wrong: dict[str, list[str]] = {"loss masks": [], "tokenized examples": []}
        self.ends = Ends()

    def read(self, source: "Source", report: Callable[[int], None]) -> None:
        """Check the rows of the next source of the cache, and `report` how many rows are done."""
        own = {f.name for f in fields(source)} & {f.name for f in fields(RenderOptions)}
        options = replace(
            RenderOptions.of(self.config), **{name: getattr(source, name) for name in own}
        )
        for file, raw in sources.read_rows(source, self.config.max_row_characters):
            number, place = self.counts["rows"], f"{file}:{raw.place}"
            self.counts["rows"] += 1
            report(number)
            try:
                row = sources.parse_row(raw, options.columns, options.ignore_keys)
                if options.format == "auto":
                    kind = sources.detect_format(row, bool(options.columns))
                    options = replace(options, format=kind)
                ids, mask = render(row, self.tokenizer, options)
                pieces = fit(ids, mask, options)
            except BadRow as error:
                self._check_cache(number, place, [])
                self.counts[f"bad rows: {error.reason}"] += 1
                continue
            self._check_cache(number, place, [p[:2] for p in pieces if p[2] <= SPLIT])
            self._check_row(place, row, (ids, mask), options)

    def _check_row(
        self,
        place: str,
        row: dict[str, Any],
        tokens: tuple[list[int], list[bool]],
        options: RenderOptions,
    ) -> None:
        """Compare a row with its decoded tokens."""
        ids, mask = tokens
        self.counts["tokens"] += len(ids)
        self.counts["supervised tokens"] += sum(mask)
        pieces = segments(ids, mask, self.tokenizer)
        self.keys.update(key for key in row if _is_metadata(key))
        row = canonical_row(row, options)
        seen: dict[str, bool] = {}
        for key, is_seen in keys_in_text(row, "".join(piece.text for piece in pieces)):
            seen[key] = seen.get(key, True) and is_seen
        self.keys.update(seen.keys())
        for key in (key for key, is_seen in seen.items() if not is_seen):
            self.unseen.setdefault(key, []).append(place)
        if options.format == "text" or options.supervise == "all":
            if not all(mask[1:]):
                self.wrong["loss masks"].append(f"{place}: a token is not supervised")
            return
        turns = turns_of(row, options.supervise)
        problems, runs = check_turns(turns, pieces)
        if problems:
            turns = turns_of(row, options.supervise, self._as_decoded)
            problems, runs = check_turns(turns, pieces)
        self.roles.update(turn.role for turn in turns)
        self.counts["supervised turns"] += sum(turn.supervised for turn in turns)
        self.wrong["loss masks"] += [f"{place}: {problem}" for problem in problems]
        if not problems:
            self.ends.add(runs, place)

    def _as_decoded(self, text: str) -> str:
        """A text after tokenizing and decoding: some tokenizers change case or accents."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _check_cache(
        self, number: int, place: str, expected: list[tuple[list[int], list[bool]]]
    ) -> None:
        """Compare the cached examples of a row with what the row gives now."""
        first, last = np.searchsorted(self.row_of, [number, number + 1]).tolist()
        self.compared += last - first
        wrong = self.wrong["tokenized examples"]
        if last - first != len(expected):
            wrong.append(f"{place}: {last - first} examples in the cache, not {len(expected)}")
            return
        found = self.cache.fetch(np.arange(first, last)) if expected else ([], [])
        for example, ids, mask, (expected_ids, expected_mask) in zip(
            range(first, last), *found, expected, strict=True
        ):
            differing = {
                "tokens": ids.tolist() != expected_ids,
                "loss mask": mask.tolist() != expected_mask,
                "length": self.cache.lengths[example] != len(expected_ids),
                "supervised token count": self.cache.supervised[example] != sum(expected_mask),
            }
            names = " and ".join(name for name, differs in differing.items() if differs)
            if names:
                wrong.append(f"{place}: the cache differs from the row in {names}")

    def report(self) -> bool:
        """Print counts and problems; return whether there are no problems."""
        lines = dict(self._counted())
        width = max(map(len, lines))
        for key, text in lines.items():
            print(f"  {key:<{width}}  {text}")
        if self.compared < len(self.cache):
            stray = len(self.cache) - self.compared
            self.wrong["tokenized examples"].append(
                f"{stray:,} examples in the cache belong to no row"
            )
        if self.wrong["tokenized examples"]:
            print(f"  delete {self.cache.folder} to have it recreated")
        keys = [
            f"{place}: the text of key {key!r} is not in the tokens"
            for key, places in self.unseen.items()
            if not _is_metadata(key)
            for place in places
        ]
        kinds = {**self.wrong, "end marks": list(self.ends.problems()), "keys": keys}
        for kind, problems in kinds.items():
            if problems:
                print(f"  {kind}: {len(problems):,} problems")
            for problem in problems[:NAMED]:
                print(f"    {problem}")
        return not any(kinds.values())

    def _counted(self) -> Iterator[tuple[str, str]]:
        for name, count in self.counts.items():
            yield name, f"{count:,}"
        yield "turns", ", ".join(f"{n:,} {role}" for role, n in self.roles.items()) or "none"
        yield "tokenized examples", f"{self.compared:,} of {len(self.cache):,} compared"
        for (text, is_last, _), count in self.ends.after.most_common():
            where = "at the end of rows" if is_last else "within rows"
            yield f"end mark {text[:40]!r} {where}", f"{count:,} turns"
        for text, count in self.ends.before.most_common():
            if text:
                yield f"supervised before the answer: {text[:40]!r}", f"{count:,} turns"
        for key, count in sorted(self.keys.items()):
            missing = len(self.unseen.get(key, ()))
            said = "meta-data" if _is_metadata(key) else f"NOT in the tokens of {missing:,}"
            in_text = "meta-data" if _is_metadata(key) else "in the tokens"
            yield f"key {key!r}", f"{count:,} rows, {said if missing else in_text}"


def _is_metadata(key: str) -> bool:
    return key.rpartition(".")[2].lower() in METADATA
