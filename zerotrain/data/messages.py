"""Converts a parsed row of any format into the form that is rendered.

That is {"text"}, {"prompt", "completion"}, or {"messages"} with optional "tools". A message has

    role               str
    content            str, "" if there are only tool calls
    tool_calls         list of objects, with arguments as objects
    reasoning_content  str; or thinking, whichever key the row has
    weight             0 or 1, for assistant turns: whether the turn is supervised
    name, tool_call_id as in the row

where all keys but the first two are present only if the row has a value for them. Every key of a
row, message, tool call or content part is either used or meta-data; any other makes it a bad row.
"""

import json
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from zerotrain.data.sources import (
    CHAT_FORMATS,
    FORMAT_KEYS,
    MESSAGE_COLUMNS,
    OPTIONAL_KEYS,
    BadRow,
    json_type,
    strings_in,
)

if TYPE_CHECKING:
    from zerotrain.data.options import RenderOptions

# Keys, in lower case, that describe a row, message or tool call but are not part of its content.
# Keys that ask for another loss (label, chosen, rejected, weight) or have content are not listed.
METADATA_KEYS = """
    id _id idx index uid uuid guid row_id sample_id example_id prompt_id question_id message_id
    conversation_id conversation_hash dialogue_id session_id user_id hash sha sha256 md5
    source sources src source_id source_dataset data_source dataset dataset_name dataset_id origin
    subset split config url urls file_path file_name filename path repo_name dump
    category categories subcategory domain subdomain topic topics subject task task_type task_name
    task_id tag tags type subtype difficulty level language lang language_code locale license
    title author annotator created created_at created_date updated_at timestamp datetime date time
    generator generated_by model model_name model_id version revision synthetic
    score scores quality quality_score int_score language_score rating ratings perplexity
    turn num_turns num_tokens n_tokens token_count num_chars word_count length parallel_tool_calls
    meta metadata __index_level_0__
"""
METADATA = {*METADATA_KEYS.split(), "", "unnamed: 0"}  # the last two: the pandas index in CSV

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function": "function",
    "ipython": "ipython",
}
REASONING_KEYS = ("reasoning_content", "thinking")
WEIGHT_KEYS = ("weight", "train", "training", "loss")  # used by OpenAI, axolotl (two), ms-swift
CARRIED_KEYS = ("name", "tool_call_id", *REASONING_KEYS)
MESSAGE_KEYS = frozenset(
    ("role", "content", "tool_calls", "function_call", *CARRIED_KEYS, *WEIGHT_KEYS)
)
SHAREGPT_KEYS = {"from": "role", "value": "content"}
CONTENT_KEYS = frozenset(("content", "tool_calls", "function_call"))
CALL_KEYS = frozenset(("id", "type", "function", "name", "arguments"))
FUNCTION_KEYS = frozenset(("name", "arguments"))
PART_KEYS = frozenset(("type", "text"))
TEXT_PARTS = ("text", "input_text", "output_text")
EMPTY = (None, "", [], {})


def canonical_row(row: dict[str, Any], options: "RenderOptions") -> dict[str, Any]:
    """The row in the form described above; options.format is not "auto".

    Raises:
        BadRow: a key is missing, unknown or of the wrong type, an answer is empty, or the row has
            content that needs a chat template, but none is used.
    """
    kind = options.format
    known = {*FORMAT_KEYS[kind], *OPTIONAL_KEYS[kind]}
    for key in FORMAT_KEYS[kind]:
        if key not in row:
            raise BadRow("missing key", f"key {key!r} is missing, which {kind} rows need")
        if row[key] is None:
            raise BadRow("null", f"key {key!r} is null")
    extra = [key for key in _unknown(row, known) if not _repeats(key, row, known)]
    if extra:
        if isinstance(row.get("label"), bool):
            raise BadRow(
                "needs another loss",
                "`label` says whether the answer is a good one (KTO), and training would be on the "
                "bad ones too: jq -c 'select(.label) | del(.label)' OLD > NEW keeps the good ones",
            )
        raise _refused(extra, f"a row of the format {kind}")
    if kind == "text":
        return {"text": _string(row, "text")}
    if kind in CHAT_FORMATS:
        return _with_tools(row, _messages(row, options))
    question, answer = FORMAT_KEYS[kind]
    prompt, completion = _string(row, question), _string(row, answer)
    if kind == "instruction" and row.get("input") not in EMPTY:
        prompt += f"\n\n{_string(row, 'input')}"
    if not completion.strip():
        raise BadRow("empty answer", "the answer is empty")
    if options.as_chat:
        turns = [{"role": "user", "content": prompt}]
        turns += [{"role": "assistant", "content": completion}]
        return _with_tools(row, _with_system(row, turns))
    for key in ("system", "tools"):
        if row.get(key) not in EMPTY:
            raise BadRow(
                "needs a chat template",
                f"key {key!r} needs a chat template: set data.as_chat: true, or leave it out with "
                f"data.ignore_keys: [{key}]",
            )
    return {"prompt": prompt if kind == "prompt_completion" else f"{prompt}\n\n",
            "completion": completion}  # fmt: skip


def _messages(row: dict[str, Any], options: "RenderOptions") -> list[dict[str, Any]]:
    """The turns of a chat row in the form described above, starting with `system`, if any."""
    turns = []
    for key in FORMAT_KEYS[options.format]:
        found = parsed(row[key])
        if not isinstance(found, list) or not found:
            raise BadRow("wrong type", f"key {key!r} is not a list of messages, written as JSON")
        for number, message in enumerate(found, start=1):
            where = f"message {number} of {len(found)}"
            if not isinstance(message, dict):
                raise BadRow("wrong type", f"{where} of {key!r} is {json_type(message)}")
            turn = _message(message, where, options)
            if key == "prompt" and turn["role"] == "assistant":
                turn["weight"] = 0  # as in TRL: only the completion carries loss
            turns.append(turn)
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if all(turn.get("weight") == 0 for turn in answers):
        raise BadRow("empty answer", "no message is of an assistant with a weight other than 0")
    return _with_system(row, turns)


def _message(message: dict[str, Any], where: str, options: "RenderOptions") -> dict[str, Any]:
    renames = {options.columns[key]: key for key in MESSAGE_COLUMNS if key in options.columns}
    renames = {**SHAREGPT_KEYS, **renames}
    given, message = message, {renames.get(key, key): value for key, value in message.items()}
    if len(message) < len(given):
        raise BadRow("doubled key", f"{where} has two keys for one of role and content")
    if "role" not in message or not message.keys() & CONTENT_KEYS:
        raise BadRow(
            "missing key",
            f"{where} has the keys {', '.join(message)} but needs role and content; "
            "data.columns: {role: KEY, content: KEY} names the file's",
        )
    message = _known(message, MESSAGE_KEYS, where, options)
    role = _role(message.get("role"), where, options)
    where = f"{where} ({role})"
    content, calls = message.get("content"), message.get("tool_calls")
    if "function_call" in message:
        if calls is not None:
            raise BadRow("wrong type", f"{where} has both tool_calls and function_call")
        calls = [message["function_call"]]
    if role == "function_call":
        calls = parsed(content)
        calls = [calls] if isinstance(calls, dict) else calls
        content, role = None, "assistant"
    if content is None and calls is None:
        raise BadRow("null", f"{where} has no content")
    turn = {"role": role, "content": _content(content, where, options)}
    if calls is not None:
        turn["tool_calls"] = _tool_calls(calls, where, options)
    elif role == "assistant" and not turn["content"].strip():
        raise BadRow("empty answer", f"{where} is empty")
    for key in CARRIED_KEYS:
        if key in message:
            turn[key] = _string(message, key, f"{where}: ")
    weights = [message[key] for key in WEIGHT_KEYS if key in message]
    if any(w not in (0, 1) or w != weights[0] or (w and role != "assistant") for w in weights):
        raise BadRow(
            "wrong type", f"{where}: the weight must be 0 or 1, and only assistant turns carry loss"
        )
    if weights and role == "assistant":
        turn["weight"] = int(weights[0])
    return turn


def _role(role: Any, where: str, options: "RenderOptions") -> str:
    if not isinstance(role, str):
        raise BadRow("wrong type", f"the role of {where} is {json_type(role)}, not a string")
    if role in options.roles:
        return options.roles[role]
    if role.lower() not in ROLES:
        raise BadRow(
            "unknown role",
            f"{where} has the unknown role {role!r} (known: {', '.join(ROLES)}); "
            f"map it to one of these with data.roles: {{{role!r}: ...}}",
        )
    return ROLES[role.lower()]


def _content(content: Any, where: str, options: "RenderOptions") -> str:
    """The content of a message as text; the texts of a list of parts are concatenated."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRow("wrong type", f"the content of {where} is {json_type(content)}, not a string")
    texts = []
    for number, part in enumerate(content, start=1):
        of = f"part {number} of the content of {where}"
        part = {"text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise BadRow("wrong type", f"{of} is {json_type(part)}, not an object or string")
        if part.get("type", "text") not in TEXT_PARTS:
            problem = f"{of} is of type {part['type']!r}; only text can be trained on"
            raise BadRow("not text", problem)
        texts.append(_string(_known(part, PART_KEYS, of, options), "text", f"{of}: "))
    return "".join(texts)


def _tool_calls(calls: Any, where: str, options: "RenderOptions") -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates write arguments as JSON, and would
    quote OpenAI's form, JSON in a string, once more.
    """
    calls = parsed(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow("wrong type", f"the tool calls of {where} are not a list of objects")
    checked = []
    for number, call in enumerate(calls, start=1):
        of = f"tool call {number} of {where}"
        call = _known(call, CALL_KEYS, of, options)
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("wrong type", f"{of} has no function with a name")
        if function is not call:
            function = _known(function, FUNCTION_KEYS, f"the function of {of}", options)
        if "arguments" in function:
            function = {**function, "arguments": parsed(function["arguments"])}
        checked.append({**call, "function": function} if "function" in call else function)
    return checked


def parsed(value: Any) -> Any:
    """The value of a string that contains a JSON object or list; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


# --------------------------------------------------------------------------------------------------
# Keys


def _unknown(found: dict[str, Any], known: Set[str]) -> list[str]:
    """The keys that are neither known nor meta-data and have a value."""
    return [
        key
        for key, value in found.items()
        if key not in known and key.lower() not in METADATA and value not in EMPTY
    ]


def _known(
    found: dict[str, Any], known: Set[str], where: str, options: "RenderOptions"
) -> dict[str, Any]:
    """The known keys that have a value; an empty content counts as one.

    Raises:
        BadRow: there are other keys that are not meta-data.
    """
    found = {k: v for k, v in found.items() if k not in options.ignore_keys}
    if extra := _unknown(found, known):
        raise _refused(extra, where)
    kept = ("content", "text", "arguments")
    return {k: v for k, v in found.items() if k in known and (k in kept or v not in EMPTY)}


def _refused(keys: list[str], where: str) -> BadRow:
    names = ", ".join(key if key.isidentifier() else repr(key) for key in keys)
    return BadRow(
        "unknown key",
        f"{where}: {names} would not be trained on; data.ignore_keys: [{names}] leaves out what "
        "is not to be learned, data.columns renames what is",
    )


def _repeats(key: str, row: dict[str, Any], known: Set[str]) -> bool:
    """Whether a key repeats the row's known keys: one of their strings (`prompt` next to
    `messages`) or all of them (Alpaca's `text`).
    """
    value = row[key]
    if not isinstance(value, str):
        return False
    used = [
        text.strip()
        for name in known
        for text in strings_in(parsed(row.get(name)))
        if text.strip() and text not in ROLES
    ]
    return value.strip() in used or (key == "text" and all(text in value for text in used))


def _string(found: dict[str, Any], key: str, where: str = "") -> str:
    value = found.get(key)
    if isinstance(value, str):
        return value
    raise BadRow("wrong type", f"{where}key {key!r} is {json_type(value)}, not a string")


def _with_system(row: dict[str, Any], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, preceded by the row's `system` unless they start with it."""
    if row.get("system") in EMPTY:
        return turns
    system = {"role": "system", "content": _string(row, "system")}
    if turns[0]["role"] != "system":
        return [system, *turns]
    if turns[0] != system:
        raise BadRow(
            "doubled key",
            "it has a system turn and a different text in key 'system'; data.ignore_keys: [system] "
            "leaves out the latter",
        )
    return turns


def _with_tools(row: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    tools = parsed(row.get("tools"))
    if tools in EMPTY:
        return {"messages": turns}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("wrong type", "key 'tools' is not a list of objects")
    return {"messages": turns, "tools": tools}
