"""Say what to do about a bad row, with a command that works on its file.

LAYOUTS has layouts of other tools, each with a jq program that writes rows of data/README.md. All
jq programs of messages are for files with a row on each line. For other files the command begins
with a program that reads their rows.
"""

import json
import re
import shlex
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from zerotrain.rows.messages import (
    FORMAT_KEYS,
    IN_PROMPT,
    MEDIA,
    METADATA,
    REASONING_KEYS,
    ROLES,
    TOOL_KEYS,
    parsed,
)
from zerotrain.rows.readers import (
    MAX_ROW_CHARACTERS,
    TEXT_AT_ONCE,
    BadRow,
    JsonObject,
    begins_list,
    open_text,
    parse_json,
)
from zerotrain.rows.sources import FORMAT, RawRow, split_of

ROW_COMMAND = re.compile(r"jq -c '([^']*)' OLD\.jsonl > NEW\.jsonl")
DECOMPRESS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2"}
LOAD = (
    "python -c 'import datasets, sys; datasets.load_dataset(*sys.argv[1:-1], split=sys.argv[-1])"
    '.to_json("OLD.jsonl")\' '
)
# Encodings other than UTF-8, by names that Python and iconv know.
ENCODINGS = (
    "CP1252", "CP1250", "CP1251", "GB18030", "BIG5", "CP932", "EUC-JP", "CP949", "KOI8-R", "CP1253",
    "CP1254", "CP1255", "CP1256",
)  # fmt: skip
QUESTIONS = ("question", "query", "prompt", "instruction", "human", "user", "input")
ANSWERS = ("answer", "response", "completion", "output", "assistant", "gpt", "bot", "reply")
CONTEXTS = ("input", "context")
TURNS = {"conversations", "conversation", "messages", "dialog", "dialogue", "turns"}
ANY_QUESTION, ANY_ANSWER = (" // ".join(f".{k}" for k in keys) for keys in (QUESTIONS, ANSWERS))
ASKED = (
    "([.instruction // .prompt // .question // .query, .input | strings | "
    'select(. != "")] | join("\\n\\n"))'
)
PAIR_KEYS = f".instruction, .prompt, .question, .query, .input, {ANY_ANSWER.replace(' //', ',')}"
MEDIA_PART = re.compile("(input_)?(image|video|audio)(_url)?")
NO_MEDIA = (
    "select([., (.[] | arrays[] | objects | ., (.content | arrays[] | objects)) | to_entries[] | "
    f'select((.key | test("^({MEDIA.pattern})$"; "i")) and (.value | IN(null, "", []) | not) or '
    f'.key == "type" and (.value | tostring | test("^({MEDIA_PART.pattern})$")))] == [])'
)
TEXT_OF = (
    'def text: if type == "array" then map(.text // .refusal // error("not text")) | join("") else '
    ". end; "
)


class Layout(NamedTuple):
    """Rows that another tool writes or reads."""

    name: str
    key_of: Callable[[JsonObject], str | None]
    """Returns the key by which a row shows this layout, "" if it needs no key; None if the row has
    another layout.
    """
    program: str
    """A jq program that converts a row. KEY stands for the key."""


def _is_list(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, kind) for v in value)


def _parts(row: JsonObject) -> list[tuple[str, JsonObject]]:
    """Return the parts of messages, each with the key of its list of messages."""
    return [
        (key, part)
        for key, turns in _chats(row)
        for turn in turns
        if _is_list(turn.get("content"), dict)
        for part in turn["content"]
    ]


def _chats(row: JsonObject) -> list[tuple[str, list[JsonObject]]]:
    """Return the lists of turns in a row, with their keys."""
    return [
        (key, value)
        for key, value in row.items()
        if _is_list(value, dict) and any({"role", "from"} & turn.keys() for turn in value)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _first(keys: Any) -> str | None:
    return next(iter(keys), None)


def _pairs(row: JsonObject) -> str | None:
    def is_pair(turn: JsonObject) -> bool:
        texts = turn.keys() - {"system"}
        return len(texts) == 2 and all(texts & {*names} for names in (QUESTIONS, ANSWERS))

    lists = ((key, row[key]) for key in row if key in TURNS and _is_list(row[key], dict))
    return _first(key for key, pairs in lists if all(map(is_pair, pairs)))


def _columns(row: JsonObject) -> str | None:
    """Each key has the values of all rows, as DataFrame.to_json and Dataset.to_dict write them."""
    lists = all(
        isinstance(value, list) and value and not isinstance(value[0], dict)
        for value in row.values()
    )
    is_one = len(row) == 1 and not _is_list(_first(row.values()), list)
    numbered = all(isinstance(v, dict) and v and all(map(str.isdigit, v)) for v in row.values())
    same = len({len(value) for value in row.values() if isinstance(value, list | dict)}) == 1
    return "" if same and "input_ids" not in row and ((lists and not is_one) or numbered) else None


def _wrapped(row: JsonObject) -> str | None:
    lists = [key for key, value in row.items() if _is_list(value, dict)]
    is_row = any({*keys} <= row.keys() for keys in FORMAT_KEYS.values()) or _chats(row)
    lists = ["train"] if "train" in lists else lists
    # The rows may be held out, or lack a text that is beside them.
    texts = [k for k, v in row.items() if isinstance(v, str) and k.lower() not in METADATA]
    is_only = len(lists) == 1 and split_of(lists[0]) == "tr" and not texts and not is_row
    return lists[0] if is_only and lists[0] not in {*TURNS, *TOOL_KEYS} else None


def _media(row: JsonObject) -> str | None:
    objects = [row, *(t for _, turns in _chats(row) for t in turns), *(p for _, p in _parts(row))]
    return _first(
        key
        for value in objects
        for key in value
        if (MEDIA.fullmatch(key) and value[key] not in ("", []))
        or (key == "type" and MEDIA_PART.fullmatch(_text(value[key])))
    )


def _reasoning(row: JsonObject) -> str | None:
    keys = re.findall(r"\w+", PAIR_KEYS)
    texts = {key for key in (*keys, *REASONING_KEYS) if isinstance(row.get(key), str)}
    is_pair = texts & {*ANSWERS} and texts & {*keys}.difference(ANSWERS)
    return _first(key for key in REASONING_KEYS if is_pair and key in texts)


def _turns_with(is_it: Callable[[JsonObject], Any]) -> Callable[[JsonObject], str | None]:
    return lambda row: _first(key for key, turns in _chats(row) if any(map(is_it, turns)))


def _is_value(turn: JsonObject) -> bool:
    """Whether the content is a number or an object that is not a part."""
    content = turn.get("content", turn.get("value"))
    is_object = isinstance(content, dict) and not {"type", "text"} & content.keys()
    return is_object or isinstance(content, int | float)


LAYOUTS = [
    Layout(
        "images, audio and video are not read, and the text may refer to them; to leave such rows "
        "out",
        _media,
        NO_MEDIA,
    ),
    Layout(
        "it has pairs of a question and an answer",
        _pairs,
        'KEY as $pairs | del(KEY) | .messages = [$pairs[] | (.system | strings | select(. != "") | '
        '{role: "system", content: .}), {role: "user", content: '
        f'({ANY_QUESTION})}}, {{role: "assistant", content: ({ANY_ANSWER})}}]',
    ),
    Layout(
        "it has texts without roles; if they are the user's and the assistant's in turn",
        lambda row: _first(k for k, v in row.items() if k in {*TURNS, "data"} and _is_list(v, str)),
        "KEY as $texts | del(KEY) | .messages = [$texts | to_entries[] | "
        '{role: (if .key % 2 == 0 then "user" else "assistant" end), content: .value}]',
    ),
    Layout(
        "the keys of its turns are their roles",
        lambda row: _first(
            k
            for k, v in row.items()
            if _is_list(v, dict) and all(len(t) == 1 and {*t} <= ROLES.keys() for t in v)
        ),
        "KEY as $turns | del(KEY) | .messages = [$turns[] | to_entries[] | {role: .key, content: "
        ".value}]",
    ),
    Layout(
        "its turns are lists of a role and a text",
        lambda row: _first(
            k
            for k, v in row.items()
            if _is_list(v, list)
            and all(_is_list(t, str) for t in v)
            and {len(t) for t in v} == {2}
            and {t[0].lower() for t in v} <= ROLES.keys()
        ),
        "KEY as $turns | del(KEY) | .messages = [$turns[] | {role: .[0], content: .[1]}]",
    ),
    Layout(
        "its turns are an object of lists",
        lambda row: _first(
            k
            for k, v in row.items()
            if isinstance(v, dict)
            and {"role", "from"} & v.keys()
            and all(isinstance(values, list) for values in v.values())
        ),
        "KEY |= (. as $turns | [first(.[]) | keys[] as $i | $turns | map_values(.[$i])])",
    ),
    Layout(
        "it is a request to Gemini",
        lambda row: "" if _is_list(row.get("contents"), dict) else None,
        '([(.systemInstruction // .system_instruction | objects | {role: "system", content: '
        '[.parts[].text] | join("")}), (.contents[] | {role, content: [.parts[] | .text // '
        'error("not text")] | join("")})]) as $turns | del(.contents, .systemInstruction, '
        ".system_instruction) | .messages = $turns",
    ),
    Layout(
        "its system prompt is a list of parts",
        lambda row: "" if _is_list(row.get("system"), dict) else None,
        '.system |= (map(.text // error("not text")) | join("\\n"))',
    ),
    Layout(
        "its question follows the turns in history",
        lambda row: (
            "history"
            if _is_list(row.get("history"), list) and {len(turn) for turn in row["history"]} == {2}
            else None
        ),
        '([.system | strings | select(. != "") | {role: "system", content: .}] + [KEY // [] | .[] '
        '| {role: "user", content: .[0]}, {role: "assistant", content: .[1]}] + [{role: "user", '
        f'content: {ASKED}}}, {{role: "assistant", content: ({ANY_ANSWER})}}]) as $turns | '
        f"del(KEY, .system, {PAIR_KEYS}) | .messages = $turns",
    ),
    Layout(
        "its reasoning belongs to its answer",
        _reasoning,
        f'[{{role: "user", content: {ASKED}}}, {{role: "assistant", content: ({ANY_ANSWER}), '
        f"reasoning_content: KEY}}] as $turns | del(KEY, {PAIR_KEYS}) | .messages = $turns",
    ),
    Layout(
        "all rows are in its table",
        lambda row: "" if _is_list(row.get("columns"), str) and "data" in row else None,
        ".columns as $names | .data[] | [$names, .] | transpose | map({(.[0]): .[1]}) | add",
    ),
    Layout(
        "each key has the values of all rows",
        _columns,
        ". as $table | first(.[]) | keys_unsorted[] as $i | $table | map_values(.[$i])",
    ),
    Layout(
        "each key has a row",
        lambda row: (
            "" if all(k.isdigit() and isinstance(v, dict) for k, v in row.items()) else None
        ),
        ".[]",
    ),
    Layout(
        "rows of the hub's API are in their key row",
        lambda row: "" if _is_list(row.get("rows"), dict) and "row" in row["rows"][0] else None,
        ".rows[].row",
    ),
    Layout(
        "it has the labeled segments of one text",
        lambda row: "" if "segments" in row and "text" not in row else None,
        ".segments as $all | range(0; $all | length) as $i | "
        'select($all[$i].label | tostring | ascii_downcase | IN("1", "1.0", "true")) | {prompt: '
        '([$all[:$i][].text] | join("")), completion: $all[$i].text}',
    ),
    Layout(
        "it is a request and a response of OpenAI's API",
        lambda row: (
            "output"
            if _is_list(row.get("output"), dict) and isinstance(row.get("input"), str | list)
            else None
        ),
        TEXT_OF
        + '([.instructions | strings | {role: "system", content: .}] + [(.input | if type == '
        '"string" then {role: "user", content: .} else .[] end), .output[] | if .type == '
        '"function_call" then {role: "assistant", content: "", tool_calls: [{id: .call_id, type: '
        '"function", function: {name, arguments}}]} elif .type == "function_call_output" then '
        '{role: "tool", tool_call_id: .call_id, content: (.output | text)} elif .type == '
        '"reasoning" then {role: "assistant", content: "", reasoning: (.summary | text)} else '
        "{role, content: (.content | text)} end]) as $turns | del(.input, .output, .instructions) "
        "| .messages = $turns",
    ),
    Layout(
        "calls and results of tools are parts of its messages",
        lambda row: _first(
            k
            for k, part in _parts(row)
            if _text(part.get("type"))[:5] == "tool_" and "value" not in part
        ),
        TEXT_OF + 'KEY |= [.[] | if (.content | type) != "array" then . else (.content[] | '
        'select(.type == "tool_result") | {role: "tool", tool_call_id: .tool_use_id, content: '
        '(.content // "" | text)}), ([.content[] | select(.type == "tool_use") | {id, type: '
        '"function", function: {name, arguments: .input}}] as $calls | .content |= '
        'map(select(.type | IN("tool_use", "tool_result") | not)) | if $calls == [] then '
        "select(.content != []) else .tool_calls = $calls end) end]",
    ),
    Layout(
        "its parts have their text in value",
        lambda row: _first(k for k, part in _parts(row) if "value" in part),
        'KEY |= map(if (.content | type) != "array" then . else [.content[] | select(.type == '
        '"tool_call") | {type: "function", function: (.value | if type == "string" then fromjson '
        'else . end)}] as $calls | .content |= map(select(.type != "tool_call") | {type, text: '
        ".value}) | if $calls == [] then . else .tool_calls = $calls end end)",
    ),
    Layout(
        "its answers are texts of whole chats; to keep the chosen one",
        lambda row: "chosen" if _text(row.get("chosen")).lstrip().startswith("Human:") else None,
        '[KEY | scan("(Human|Assistant):((?:(?!\\n\\n(?:Human|Assistant):)[\\\\s\\\\S])*)") | '
        '{role: (if .[0] == "Human" then "user" else "assistant" end), content: '
        '(.[1] | ltrimstr(" "))}] as $turns | del(.chosen, .rejected) | .messages = $turns',
    ),
    Layout(
        "a content is a number or an object; to write it as JSON",
        _turns_with(_is_value),
        "(.[] | arrays[] | objects | .content, .value | numbers, booleans, (objects | "
        'select(has("type") or has("text") | not))) |= tojson',
    ),
    Layout("all rows are in its key KEY", _wrapped, "KEY[]"),
    *(
        Layout(
            f"{key} belong to the row",
            _turns_with(lambda turn, key=key: turn.get(key)),
            f'.tools = [.[] | arrays[] | objects | .{key} | if type == "string" then fromjson else '
            f". end | arrays[]] | del((.[] | arrays[] | objects).{key})",
        )
        for key in TOOL_KEYS
    ),
]


def explained(error: BadRow, raw: RawRow, columns: dict[str, str]) -> str:
    """Return what is wrong with a row, and what to do: for its layout, if LAYOUTS has it.

    Args:
        columns: the columns of its source.
    """
    if not _is_unicode(raw.text):
        return _fitted(f"not UTF-8; {_encoding_fix(raw)}", raw, is_decoded=True)
    given = _row_of(raw)
    row = decoded(given)
    fix = row and _layout_fix(row, columns)
    if not fix and not re.search(r":\s*null", raw.text):  # Other rows may have a value for the key.
        fix = row and _columns_fix(row, error)
    return _fitted(fix or str(error), raw, is_decoded=row == given)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no surrogates, which stand for bytes that are not UTF-8."""
    return not re.search("[\udc80-\udcff]", text)


def _encoding_fix(raw: RawRow) -> str:
    """Return how to convert a file that is not UTF-8."""
    return _converted(_foreign_lines(raw.file) or (raw.text,))


@lru_cache(maxsize=8)
def _foreign_lines(file: str) -> tuple[str, ...]:
    """Return the first lines of a text file that are not ASCII."""
    try:
        with open_text(file) as stream:
            lines = stream.read(TEXT_AT_ONCE).splitlines()
    except (OSError, ValueError):  # a table or a hub data set
        lines = []
    return tuple(line for line in lines if not line.isascii())


@lru_cache(maxsize=8)
def _converted(foreign: tuple[str, ...]) -> str:
    """Return how to convert lines that are not UTF-8. Their encoding can only be guessed, so the
    user chooses the one in which some words read right.
    """
    if 2 * sum(map(_is_unicode, foreign)) > len(foreign):
        return "other rows are; correct it, or remove it"
    words = (word for line in foreign for word in re.findall(r"[^\s\"':,{}\[\]]+", line))
    sample = " ".join([*dict.fromkeys(word for word in words if not word.isascii())][:5])
    readings = {}
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            reading = sample.encode("utf-8", "surrogateescape").decode(encoding)
            is_text = not {*map(unicodedata.category, reading)} & {"So", "Sk", "Sm", "Cc", "Co"}
            if is_text and all(map(_is_word, re.findall(r"[^\W\d_]+", reading))):
                readings.setdefault(reading, encoding)
    if not readings:
        return "its encoding is unknown; correct it, or remove it"
    shown = ", ".join(f"{encoding} ({reading})" for reading, encoding in readings.items())
    return (
        f"its words may be {shown}: this is a guess; write the encoding that reads right in place "
        "of ENCODING: iconv -f ENCODING -t UTF-8 OLD > NEW"
    )


def _is_word(word: str) -> bool:
    """Return whether the letters are of one script, and capital only at the beginning or all."""
    scripts = {unicodedata.name(letter, "?").split()[0] for letter in word}
    east_asian = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}
    is_one = len(scripts) == 1 or scripts <= east_asian
    return is_one and (word.isupper() or word[1:] == word[1:].lower())


def _layout_fix(row: JsonObject, columns: dict[str, str]) -> str | None:
    for layout in LAYOUTS:
        if (key := layout.key_of(row)) is not None:
            return f"{layout.name.replace('KEY', key)}: {_command(layout.program, key)}"
    keys = {columns.get(key, key) for keys in FORMAT_KEYS.values() for key in keys}
    texts = {key: row[key] for key in sorted({*row} & keys)}
    if numbers := [key for key, value in texts.items() if isinstance(value, int | float)]:
        paths = ", ".join(f".{json.dumps(key)}" for key in numbers)
        choices = _first(k for k in ("choices", "options") if _is_list(row.get(k), str))
        question = _first(k for k in QUESTIONS if isinstance(row.get(k), str))
        if choices and question:
            program = f"{paths} as $i | {paths} = KEY[$i] | "
            program += IN_PROMPT.replace("PROMPT", f".{json.dumps(question)}")
            which = f"{numbers[0]} is the number of one of its {choices}, from 0"
            return f"{which}; to write both as text: {_command(program, choices)}"
        program = f"({paths} | numbers, booleans) |= tostring"
        return f"{numbers[0]} is not a text; to write it as one: " + _command(program, "")
    is_asked = any(isinstance(value, str) for value in texts.values())
    if lists := [key for key, value in texts.items() if is_asked and _is_list(value, str)]:
        return f"{lists[0]} is a list; to keep the first of each: " + _command(
            "(KEY | arrays) |= .[0]", lists[0]
        )
    return None


def _columns_fix(row: JsonObject, error: BadRow) -> str | None:
    """Return the names that columns of the source may give to keys of a row without a format."""
    if error.reason != "no row format" or "chosen" in row:
        return None
    if chats := _chats(row):
        return f"set columns: {{messages: {chats[0][0]}}} of the source"
    texts = [key for key, value in row.items() if isinstance(value, str | int | float)]
    question, answer = (_first(k for k in names if k in texts) for names in (QUESTIONS, ANSWERS))
    if question and answer:
        context = _first(k for k in CONTEXTS if k in texts and k != question)
        ours = ("instruction", "output", "input") if context else ("prompt", "completion")
        names = zip(ours, filter(None, (question, answer, context)), strict=True)
        shown = ", ".join(f"{our}: {key}" for our, key in names if our != key)
        return f"set columns: {{{shown}}} of the source, if {answer} is the answer"
    content = [key for key in row if key.lower() not in METADATA]
    is_half = {*content} & {*QUESTIONS, *ANSWERS}
    if len(content) == 1 and isinstance(row[content[0]], str) and not is_half:
        return f"set columns: {{text: {content[0]}}} of the source, if that is plain text"
    return None


def _command(program: str, key: str) -> str:
    program = program.replace("KEY", f".{json.dumps(key)}").replace("'", "\\u0027")
    return f"jq -c '{program}' OLD.jsonl > NEW.jsonl"


def _row_of(raw: RawRow) -> JsonObject:
    """Return a row as its file has it, or the only object of a text file; {} if it is neither."""
    for text in (raw.text, raw.place == 1 and _whole(raw.file)):
        try:
            row = parse_json(text or "")
            return row if isinstance(row, dict) else {}
        except (ValueError, RecursionError, BadRow):
            continue
    return {}


def decoded(row: JsonObject) -> JsonObject:
    """Return a row whose chats are lists of objects, and not JSON in strings."""
    values = {key: parsed(value) for key, value in row.items()}
    values |= {key: [*map(parsed, v)] for key, v in values.items() if isinstance(v, list)}
    return row | dict(_chats(values))


@lru_cache(maxsize=8)
def _whole(file: str) -> str:
    if not re.search(r"\.(json|jsonl|ndjson)\b", file):
        return ""
    with open_text(file) as stream:
        return stream.read(MAX_ROW_CHARACTERS)


_begins_list = lru_cache(maxsize=8)(begins_list)


def _fitted(problem: str, raw: RawRow, is_decoded: bool) -> str:
    """Return a problem whose commands work on the row's file.

    Args:
        is_decoded: False if its chats are JSON in strings.
    """
    found = FORMAT.search(raw.file)
    if not found:  # a hub data set
        load = LOAD + shlex.join(raw.file.split(":"))
        return ROW_COMMAND.sub(lambda match: f"{load} && {match[0]}", problem)
    extension, compression = found.groups()
    is_text = extension in (".jsonl", ".ndjson", ".json")
    before, each, after = "", "", f" OLD{extension}"
    if not (is_text and is_decoded):
        before, after = f"python -m scripts.to_jsonl OLD{extension} | ", ""
    elif _begins_list(raw.file):
        each = ".[] | "
    fitted = ROW_COMMAND.sub(
        lambda match: f"{before}jq -c '{each}{match[1]}'{after} > NEW.jsonl", problem
    )
    if compression and " > NEW" in fitted:
        return f"first {DECOMPRESS[compression]} -d {raw.file}; {fitted}"
    return fitted
