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
from typing import TYPE_CHECKING, Any

from zerotrain.data.sources import (
    CHAT_FORMATS,
    FORMAT_KEYS,
    MESSAGE_COLUMNS,
    OPTIONAL_KEYS,
    BadRow,
    json_type,
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

# Keys that repeat the others: UltraChat has the first message as prompt, Alpaca the rendered text.
REPEATED_KEYS = {"messages": {"prompt"}, "instruction": {"text"}}

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
    **dict.fromkeys(("observation", "tool_response", "function_response"), "tool"),
    "ipython": "ipython",
}
RENAMED_KEYS = {"from": "role", "value": "content"}  # of ShareGPT
TEXT_KEYS = {"name", "tool_call_id", "reasoning_content", "thinking"}
MESSAGE_KEYS = {"role", "content", "tool_calls", "weight", *TEXT_KEYS}
CALL_KEYS = {"id", "type", "function", "name", "arguments"}
EMPTY = (None, "", [], {})


def canonical_row(row: dict[str, Any], options: "RenderOptions") -> dict[str, Any]:
    """The row in the form described above; options.format is not "auto".

    Raises:
        BadRow: a key is missing, unknown or of the wrong type, an answer is empty, or the row has
            content that needs a chat template, but none is used.
    """
    kind = options.format
    required, optional = FORMAT_KEYS[kind], OPTIONAL_KEYS[kind]
    missing = [key for key in required if row.get(key) is None]
    if missing:
        raise BadRow("missing key", f"key {missing[0]!r} is missing, which {kind} rows need")
    if isinstance(row.get("label"), bool):
        raise BadRow(
            "needs another loss",
            "`label` says whether the answer is a good one (KTO), and training would be on the "
            "bad ones too: jq -c 'select(.label) | del(.label)' OLD > NEW keeps the good ones",
        )
    known = {*required, *optional, *REPEATED_KEYS.get(kind, ())}
    row = _known(row, known, f"a row of the format {kind}", options)
    if kind == "text":
        return {"text": _string(row, "text", "the row")}
    if kind in CHAT_FORMATS:
        turns = [turn for key in required for turn in _turns(row, key, options)]
        if all(turn["role"] != "assistant" or turn.get("weight") == 0 for turn in turns):
            raise BadRow("empty answer", "no message is of an assistant with a weight other than 0")
    else:
        prompt, completion = (_string(row, key, "the row") for key in required)
        if "input" in row:
            prompt += f"\n\n{_string(row, 'input', 'the row')}"
        if not completion.strip():
            raise BadRow("empty answer", "the answer is empty")
        if not options.as_chat:
            if not row.keys().isdisjoint(("system", "tools")):
                raise BadRow(
                    "needs a chat template", "system and tools of a row need data.as_chat: true"
                )
            gap = "\n\n" if kind == "instruction" else ""
            return {"prompt": prompt + gap, "completion": completion}
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if "system" in row:
        if turns[0]["role"] == "system":
            problem = "it has a system turn and `system`; data.ignore_keys: [system] helps"
            raise BadRow("doubled key", problem)
        turns = [{"role": "system", "content": _string(row, "system", "the row")}, *turns]
    return {
        "messages": turns,
        **({"tools": _objects(row, "tools", "the row")} if "tools" in row else {}),
    }


def _turns(row: dict[str, Any], key: str, options: "RenderOptions") -> list[dict[str, Any]]:
    messages = _objects(row, key, "the row")
    turns = []
    for number, message in enumerate(messages, start=1):
        turn = _message(message, f"message {number} of {len(messages)}", options)
        if key == "prompt" and turn["role"] == "assistant":
            turn["weight"] = 0  # as in TRL: only the completion carries loss
        turns.append(turn)
    return turns


def _message(message: dict[str, Any], where: str, options: "RenderOptions") -> dict[str, Any]:
    renames = {options.columns[key]: key for key in MESSAGE_COLUMNS if key in options.columns}
    renames = {**RENAMED_KEYS, **renames}
    renamed = {renames.get(key, key): value for key, value in message.items()}
    if len(renamed) < len(message) or "role" not in renamed:
        raise BadRow(
            "missing key",
            f"{where} has the keys {', '.join(message)} but needs one for role and one for "
            "content; data.columns: {role: KEY, content: KEY} names the file's",
        )
    turn = _known(renamed, MESSAGE_KEYS, where, options)
    given = str(turn.get("role"))
    role = options.roles.get(given) or ROLES.get(given.lower())
    if role is None:
        raise BadRow(
            "unknown role",
            f"{where} has the unknown role {given!r} (known: {', '.join(ROLES)}); "
            f"map it to one of these with data.roles: {{{given!r}: ...}}",
        )
    where = f"{where} ({role})"
    if role == "function_call":
        role = "assistant"
        turn["tool_calls"] = turn.pop("content", None)
    turn = {**turn, "role": role, "content": _content(turn.get("content", ""), where, options)}
    if "tool_calls" in turn:
        calls = _objects(turn, "tool_calls", where)
        turn["tool_calls"] = [_tool_call(call, where, options) for call in calls]
    elif "content" not in renamed or (role == "assistant" and not turn["content"].strip()):
        raise BadRow("empty answer", f"{where} is empty")
    for key in TEXT_KEYS & turn.keys():
        _string(turn, key, where)
    if turn.get("weight", 1) not in (0, 1):
        raise BadRow("wrong type", f"{where}: the weight must be 0 or 1")
    if role != "assistant":
        turn.pop("weight", None)
    return turn


def _content(content: Any, where: str, options: "RenderOptions") -> str:
    """The content of a message as text; the texts of a list of parts are concatenated."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        part = {"text": part} if isinstance(part, str) else part
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            raise BadRow("not text", f"the content of {where} is not text, or not only text")
        part = _known(part, {"type", "text"}, f"the content of {where}", options)
        texts.append(_string({"text": "", **part}, "text", f"the content of {where}"))
    return "".join(texts)


def _tool_call(call: dict[str, Any], where: str, options: "RenderOptions") -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write arguments as JSON, and would
    quote OpenAI's form, JSON in a string, once more.
    """
    call = _known(call, CALL_KEYS, f"a tool call of {where}", options)
    if "function" in call:
        return {**call, "function": _tool_call(parsed(call["function"]), where, options)}
    _string(call, "name", f"a tool call of {where}")
    return {**call, "arguments": parsed(call.get("arguments", {}))}


def parsed(value: Any) -> Any:
    """The value of a string that contains a JSON object or list; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _known(
    found: dict[str, Any], known: set[str], where: str, options: "RenderOptions"
) -> dict[str, Any]:
    """The known keys that have a value.

    Raises:
        BadRow: there are other keys that are not meta-data.
    """
    found = {k: v for k, v in found.items() if k not in options.ignore_keys and v not in EMPTY}
    if extra := [key for key in found if key not in known and key.lower() not in METADATA]:
        names = ", ".join(extra)
        raise BadRow(
            "unknown key",
            f"{where}: {names} would not be trained on; data.ignore_keys: [{names}] leaves out "
            "what is not to be learned, data.columns renames what is",
        )
    return {key: value for key, value in found.items() if key in known}


def _string(found: dict[str, Any], key: str, where: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{where}: {key!r} is {json_type(value)}, not a string")
    return value


def _objects(found: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A list of objects, or one object, which may be JSON in a string."""
    value = parsed(found.get(key))
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise BadRow("wrong type", f"{where}: {key!r} is not a list of objects, nor that as JSON")
    return value
