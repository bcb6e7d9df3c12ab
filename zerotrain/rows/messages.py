"""Convert the parsed rows of all formats into one form, which is then rendered.

The form is {"messages"} with optional "tools", or {"prompt", "completion"}. Plain text is the
completion of an empty prompt. Rows of tokens keep their keys. A tool is {"type": "function",
"function": {"name", "parameters", ...}}, as servers give it to chat templates. A message has

    role               str
    content            str, "" if there are only tool calls
    tool_calls         list of objects, with arguments as objects
    reasoning_content  str; REASONING_KEYS has other spellings, and some rows have it as parts of
                       the content or as a turn of its own
    weight             0 to 1 in assistant turns, 0 is not supervised; WEIGHT_KEYS has other
                       spellings
    name, tool_call_id as in the row

All keys but the first two are present only if the row has a value for them. Every key of a row,
message, tool call or content part is used or is metadata. Any other key makes it a bad row.
"""

import json
import math
import re
from itertools import chain
from typing import Any

import yaml

from zerotrain.config.schema import DataConfig, Source
from zerotrain.rows.readers import parse_json
from zerotrain.rows.sources import MESSAGE_COLUMNS, BadRow, JsonObject

# Row format -> its required keys. With format auto, the first that fits is used. Rows with prompt
# and completion are conversational if the prompt is a list.
FORMAT_KEYS = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "conversational": ("prompt", "completion"),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
TOKEN_KEYS = {
    "input_ids", "labels", "loss_mask", "completion_mask", "assistant_masks", "attention_mask",
    "position_ids", "seq_lengths", "seq_start_id",
}  # fmt: skip
CHAT_FORMATS = ("messages", "sharegpt", "conversational")
# Keys, in lower case, that describe a row, message or tool call. A rule such as "all that end with
# _id" would also drop image_id, whose image the row needs, and label_ids.
METADATA_KEYS = """
    id _id idx index uid uuid guid row_id sample_id example_id prompt_id question_id message_id
    conversation_id conversation_hash dialogue_id session_id user_id hash sha sha256 md5
    source sources src source_id source_dataset data_source dataset dataset_name dataset_id origin
    subset split data_split dataset_split partition set fold phase
    config url urls file_path file_name filename path repo_name dump
    category categories subcategory domain subdomain topic topics subject task task_type task_name
    task_id tag tags type subtype difficulty level language lang language_code locale license
    title author annotator created created_at created_date updated_at timestamp datetime date time
    generator generated_by model model_name model_id version revision synthetic
    score scores quality quality_score int_score language_score rating ratings perplexity
    turn num_turns num_tokens n_tokens token_count num_chars word_count length parallel_tool_calls
    meta metadata __index_level_0__
"""
METADATA = {*METADATA_KEYS.split(), "", "unnamed: 0"}  # pandas writes its index to CSV as these two

# Role -> its spellings, in lower case
SPELLINGS = {
    "system": "system",
    "developer": "developer",
    "user": "user human",
    "assistant": "assistant gpt bot model",
    "function_call": "function_call tool_call",
    "tool": """tool observation function ipython environment
        tool_response tool_result function_response""",
}
ROLES = {spelling: role for role, names in SPELLINGS.items() for spelling in names.split()}
# Keys that rows of a format may have besides the required ones. Some are not read: UltraChat has
# the first message also as `prompt`, Alpaca the rendered row as `text`. Rows of tokens may have the
# text that they were made of.
OPTIONAL_KEYS = {
    "messages": {"prompt"},
    "instruction": {"input", "text"},
    "tokens": {*TOKEN_KEYS, *chain(*FORMAT_KEYS.values()), "token_type_ids"},
}
# OpenAI's first form of tools had `functions`.
TOOL_KEYS = ("tools", "functions")
SCHEMA_KEYS = ("input_schema", "inputSchema")  # a tool's parameters, in Anthropic's API and in MCP
# Texts of these keys that stand for no value, as JSON or Python writes it.
NO_VALUE = dict.fromkeys(
    (*TOOL_KEYS, "tool_calls", "reasoning_details"), ("null", "[]", "{}", "None")
)
# ShareGPT has `from` and `value`; OpenAI had `function_call` before parallel calls.
RENAMED_KEYS = {"from": "role", "value": "content", "function_call": "tool_calls"}
TEXT_KEYS = {"name", "tool_call_id", "refusal"}
# Spellings of a turn's reasoning, the best first. The last is OpenRouter's list of parts.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
# Types of parts that are reasoning, and the keys of their text or inner parts, as Anthropic,
# Mistral, LangChain, OpenAI and OpenRouter name them.
THOUGHTS = {"thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.summary"}
THOUGHT_KEYS = {"text", "content", "summary", *REASONING_KEYS}
THINKS = re.compile(r"\s*<think(ing)?>")
# OpenAI's chat API has text, its responses API the others.
TEXTS = {"text", "input_text", "output_text", "summary_text"}
MEDIA = re.compile(
    "(image|img|picture|photo|video|audio)s?(_?(id|url|path|file|file_?name|base64|b64|bytes)s?)?",
    re.IGNORECASE,
)
# Spellings of a turn's weight: 0 or false if it must not be trained on, up to 1 or true if it must.
WEIGHT_KEYS = (
    "weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "supervised",
)  # fmt: skip
FRACTIONS = {"weight", "loss_weight", "loss_scale"}  # The others are switches; a loss is recorded.
MESSAGE_KEYS = {
    "role", "content", "tool_calls", *WEIGHT_KEYS, *TEXT_KEYS, *REASONING_KEYS
}  # fmt: skip

# A jq program that keeps the chosen answer of a pair. TRL has both answers under keys of their own;
# ms-swift has the chosen one in the messages.
CHOSEN = (
    "select(.chosen != false and .rejected != true) | .chosen as $it | ($it | type) as $type | "
    'if $type == "object" then (.messages, .conversations | arrays) += [$it] '
    'elif $type == "array" and (.prompt | type) != "array" then .messages = $it '
    'elif $it | IN(null, true) then . elif has("instruction") then .output = $it '
    'else .completion = $it end | with_entries(select(.key | test("chosen|reject") | not))'
)
# A jq program that keeps the rows with some value of a key.
KEEP = 'select(KEY | tostring | IN("VALUE TO TRAIN ON")) | del(KEY)'
# Patterns of other keys that may exclude a row from training, each with a jq program that keeps the
# rows to train on.
MARKS = {
    "chosen|rejected_response|rejected_messages": CHOSEN,
    "|".join([*WEIGHT_KEYS, "label", "kto_tag"]): (
        'select(KEY | tostring | ascii_downcase | IN("1", "1.0", "true")) | del(KEY)'
    ),
    "(.*_|.*(?=[A-Z])|)(?i:loss|train|mask|weight|supervi|ignore|label|kto|chosen|reject).*": KEEP,
}
# A jq program that turns such a key of turns into their weight.
AS_WEIGHT = (
    "(.[] | arrays[] | objects | select(KEY != null)) |= "
    '((KEY | tostring | IN("VALUE TO TRAIN ON")) as $trained | del(KEY) | .weight = $trained)'
)
ONE_ROW_EACH = "if it lists the values of all rows, write a row for each of them"
PYTHON_CELL = (
    "if it is Python's text of a list: python -m scripts.to_jsonl --python OLD > NEW.jsonl (there "
    "must be commas between the objects)"
)
# Keys that the rest of a row may refer to.
REFERRED = re.compile(
    "(.*_)?(history|previous|contexts?|background|passages?|documents?|articles?|knowledge|evidence"
    "|facts|persona|schema|tables?|choices|options|tools|functions)(_.*)?",
    re.IGNORECASE,
)
# A jq program that writes such a key before the prompt.
IN_PROMPT = (
    'PROMPT = ([(KEY | if type == "array" then map(tostring) | join("\\n") else tostring end), '
    'PROMPT] | join("\\n\\n")) | del(KEY)'
)


def detect_format(row: JsonObject) -> str:
    """Return the first format whose required keys the row has.

    Raises:
        BadRow: the row fits none.
    """
    for name, keys in FORMAT_KEYS.items():
        is_other = name == "conversational" and not isinstance(row.get("prompt"), list)
        if not is_other and {*keys} <= row.keys():
            return name
    fix = (
        "columns: {our key: key in the file} of a source renames keys; in CSV the first line has "
        "the keys, separated by commas (.tsv: by tabs)"
    )
    if not row:
        raise BadRow("no row format", "all its values are null; remove the row")
    raise BadRow(
        "no row format",
        f"unknown row format: it has the keys {', '.join(sorted(row))}, but needs input_ids, "
        "messages, conversations, prompt and completion, instruction and output, or text; "
        + (_fix({"chosen": row["chosen"]}, set(), is_row=True) if "chosen" in row else fix),
    )


def canonical_row(row: JsonObject, source: Source, config: DataConfig) -> JsonObject:
    """Return a parsed row in the form that is described above.

    Args:
        source: the row's source. Its format must not be "auto".

    Raises:
        BadRow: a key is missing, unknown or of the wrong type, an answer is empty, or a key needs a
            chat template but as_chat is off.
    """
    kind = source.format
    required = FORMAT_KEYS[kind]
    if missing := [key for key in required if key not in row]:
        raise BadRow(
            "missing key",
            f"key {missing[0]!r} is missing, which {kind} rows need; put rows of other formats "
            "into a file and source of their own",
        )
    known = {*required, *OPTIONAL_KEYS.get(kind, ())}
    if kind in CHAT_FORMATS or (config.as_chat and kind != "text"):
        known |= {"system", *TOOL_KEYS}
    weight = row.get("weight", 1)  # tokenize_row uses it
    if not (isinstance(weight, int | float) and 0 < weight <= 1):
        key = f".{_jq(source.columns.get('weight', 'weight'))}"
        raise BadRow(
            "wrong weight",
            f"weight is {json.dumps(weight)}, but must be a number above 0, up to 1; "
            + (
                _number_fix(weight, key)
                or "to remove the rows that must not be trained on: jq -c "
                f"'select({key} | IN(0, false) | not)' OLD.jsonl > NEW.jsonl"
            ),
        )
    # Check all keys first: a format does not read every key.
    row = _known({k: v for k, v in row.items() if k != "weight"}, known, config, is_row=True)
    if kind == "tokens":
        return {key: parsed(row[key]) for key in TOKEN_KEYS & row.keys()}
    if kind in CHAT_FORMATS:
        turns = []
        for key in required:
            for number, message in enumerate(_objects(row, key), start=1):
                try:
                    turn = _message(message, source.columns, config)
                    if key == "prompt" and turn["role"] == "assistant":
                        turn["weight"] = 0  # as in TRL, only the completion is supervised
                    _add(turn, turns)
                except BadRow as error:
                    problem = f"message {number} of {key!r}: {error}"
                    raise BadRow(error.reason, problem) from error
        if any(map(_is_thought, turns)):
            raise BadRow("empty answer", "no answer follows the reasoning in a turn of its own")
        # The name of a spelling in the content, or of a turn, that the template does not write.
        if "reasoning_content" in config.ignore_keys:
            turns = [{k: v for k, v in t.items() if k != "reasoning_content"} for t in turns]
    else:
        *prompts, answer = (_string(row, key) for key in required)
        if not answer.strip():
            raise BadRow("empty answer", f"{required[-1]} is empty")
        prompt = "".join(prompts)  # plain text has none
        if "input" in row:
            prompt += "\n\n" + _string(row, "input")
        if prompts and not prompt.strip():
            raise BadRow("missing key", f"{required[0]} is empty; write it, or remove the row")
        if kind == "text" or not config.as_chat:
            prompt += "\n\n" if kind == "instruction" else ""
            return {"prompt": prompt, "completion": answer}
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if "system" in row:
        system = {"role": "system", "content": _string(row, "system")}
        given = [turn for turn in turns if turn["role"] == "system"]
        if any(turn["content"] != system["content"] for turn in given):
            raise BadRow(
                "doubled key",
                "its key system and its system turn differ; write all in one of them",
            )
        turns = turns if given else [system, *turns]
    # The messages of a template that drops the tools name the key `tools`, whatever the row has.
    keys = [key for key in TOOL_KEYS if key in row and "tools" not in config.ignore_keys]
    tools = [[*map(_tool, _objects(row, key))] for key in keys]
    if tools[1:] and tools[0] != tools[1]:
        raise BadRow("doubled key", "its tools and its functions differ; write all as tools")
    return {"messages": turns, "tools": tools[0]} if tools else {"messages": turns}


def _is_thought(turn: JsonObject) -> bool:
    """Return whether a turn has only reasoning. The next turn has its answer."""
    is_answer = turn["content"].strip() or "tool_calls" in turn
    return turn["role"] == "assistant" and not is_answer


def _add(turn: JsonObject, turns: list[JsonObject]) -> None:
    """Append a turn to a chat. Calls that follow an assistant turn are added to that turn, and an
    answer or calls to the reasoning before them.

    As a turn of their own, they would train the model to stop before them.

    Raises:
        BadRow: the two turns cannot be joined.
    """
    last = turns[-1] if turns else turn
    if not turn["role"] == last["role"] == "assistant" or last is turn:
        turns.append(turn)
        return
    is_same = last.get("weight", 1) == turn.get("weight", 1)
    if _is_thought(last) and is_same and "reasoning_content" not in turn:
        turns[-1] = {**last, **turn}
    elif (
        turn["content"]
        or not {"tool_calls"} < turn.keys() <= {"role", "content", "tool_calls"}
        or last.get("weight") == 0
    ):
        raise BadRow(
            "answers in a row",
            f"it {'calls tools' if 'tool_calls' in turn else 'answers'} directly after another "
            "turn of the assistant; write both as one turn (of weight 0 if either has it), or the "
            "user's turn or the tool's result between them",
        )
    else:
        last.setdefault("tool_calls", []).extend(turn["tool_calls"])


def _message(message: JsonObject, columns: dict[str, str], config: DataConfig) -> JsonObject:
    renames = {**RENAMED_KEYS, **{columns.get(key, key): key for key in MESSAGE_COLUMNS}}
    turn = {renames.get(key, key): value for key, value in message.items()}
    # If two keys now have the same name, one is lost.
    if len(turn) < len(message) or "role" not in turn:
        raise BadRow(
            "missing key",
            f"it has the keys {', '.join(message)}, but needs one for the role and one for the "
            "content; columns: {role: KEY, content: KEY} of the source names them",
        )
    content, given = turn.get("content"), str(turn["role"])
    channel = str(turn.get("channel")).lower()
    # In jq: the keys that may contain the role.
    roles = f".role, .from, .{_jq(columns.get('role', 'role'))}"
    role = _role(given, roles)
    # Harmony's channels, before ignore_keys: analysis is reasoning. Commentary may be a text of its
    # own, which templates have no channel for.
    is_call = "tool_calls" in turn or role != "assistant"
    if channel in ("analysis", "final") or (channel == "commentary" and is_call):
        del turn["channel"]
    turn = _known(turn, MESSAGE_KEYS, config)
    if role == "function_call":
        role = "assistant"
        # ShareGPT writes a call as JSON in place of the content.
        turn["tool_calls"] = turn.pop("content", None)
    turn["role"] = role
    _split_content(turn, channel == "analysis" and role == "assistant", config)
    # A tool may return an empty text; with null, the result is missing.
    if not (turn["content"].strip() or role == "assistant" or (role != "user" and content == "")):
        raise BadRow("missing key", f"the {role} has no content; write it, or remove the row")
    if "tool_calls" in turn:
        turn["tool_calls"] = [_tool_call(call, config) for call in _objects(turn, "tool_calls")]
    elif not turn["content"].strip() and role == "assistant" and "reasoning_content" not in turn:
        raise BadRow("empty answer", "the answer is empty")
    # A template would write other types in Python's notation.
    for key in TEXT_KEYS & turn.keys():
        _string(turn, key)
    # If several spellings disagree, the smallest weight counts.
    keys = [key for key in WEIGHT_KEYS if key in turn]
    weights = [_weight(key, turn.pop(key), role, roles, given) for key in keys]
    if weights and role == "assistant":
        turn["weight"] = min(weights)
    return turn


def _number_fix(weight: Any, path: str) -> str:
    """Return how to write a weight that is above 1 or in quotes; "" for other wrong weights.

    Args:
        path: a jq path to all such weights.
    """
    if isinstance(weight, str) and re.fullmatch(r"[0-9]*\.?[0-9]+|true|false", weight.lower()):
        return (
            f"to write it without quotes: jq -c '({path} | strings) |= (ascii_downcase | "
            "fromjson)' OLD.jsonl > NEW.jsonl"
        )
    if isinstance(weight, int | float) and weight > 1:
        return (
            "only their ratios count, so divide all of them by the largest, in place of LARGEST: "
            f"jq -c '({path} | numbers) /= LARGEST' OLD.jsonl > NEW.jsonl"
        )
    return ""


def _role(given: str, roles: str) -> str:
    """Return the role that a row spells as `given`.

    Args:
        roles: a jq program that yields the role of a turn, as the row has it.
    """
    role = ROLES.get(given.lower())
    if role is None:
        raise BadRow(
            "unknown role",
            f"its role {given!r} is unknown (known: {', '.join(ROLES)}); find out who speaks, the "
            "user, a tool or the assistant (only the assistant is trained on), and write that in "
            f"place of ROLE: jq -c '(.[] | arrays[] | objects | {roles} | select(. == "
            f'{_jq(given)})) = "ROLE"\' OLD.jsonl > NEW.jsonl',
        )
    return role


def _weight(key: str, weight: Any, role: str, roles: str, given: str) -> float:
    """Return the weight of a turn.

    Args:
        roles, given: as in _role.
    """
    is_number = isinstance(weight, int | float) and 0 <= weight <= (role == "assistant")
    if is_number and (key in FRACTIONS or weight in (0, 1)):
        return weight
    if is_number:
        raise BadRow(
            "wrong type",
            f"{key} is {json.dumps(weight)}, but must be 0 (false) or 1 (true); rename it, with "
            "NAME score if it was recorded, or weight if it is a weight: jq -c '(.[] | arrays[] | "
            f"objects | select(has({_jq(key)}))) |= (.NAME = .{key} | del(.{key}))' OLD.jsonl > "
            "NEW.jsonl",
        )
    fix = _number_fix(weight, f".[] | arrays[] | objects | .{key}")
    if fix and role == "assistant" and (key in FRACTIONS or isinstance(weight, str)):
        raise BadRow("wrong type", f"{key} is {json.dumps(weight)}, but must be 0 to 1; {fix}")
    raise BadRow(
        "wrong type",
        f"{key} is {json.dumps(weight)}, but must be 0 (false) to 1 (true) for the "
        "assistant and 0 for others; to write 0: jq -c '(.[] | arrays[] "
        f"| objects | select([{roles}] | index({_jq(given)})) | .{key} | select(. == "
        f"{_jq(weight)})) = 0' OLD.jsonl > NEW.jsonl",
    )


def _split_content(turn: JsonObject, is_thought: bool, config: DataConfig) -> None:
    """Give a message its content as text, and its reasoning.

    The texts of a list of parts are concatenated. A refusal is the content of an answer.

    Args:
        is_thought: True if the content is reasoning.
    """
    texts, thoughts = [], []
    content = turn.get("content", "")
    for part in [{"text": content}] if isinstance(content, str) else _objects(turn, "content"):
        kind = part.get("type", "text")
        if kind in THOUGHTS and not any(texts):
            thoughts.append(_thought(part, config))
        elif kind in THOUGHTS:
            raise BadRow(
                "answers in a row", "it has text before its reasoning; write the reasoning first"
            )
        elif kind in TEXTS or kind == "refusal":
            key = "refusal" if kind == "refusal" else "text"
            texts.append(_string(_known(part, {"type", key}, config), key))
        else:
            raise BadRow("not text", "its content has a part that is not text")
    turn["content"] = "".join(texts)
    if turn["role"] == "assistant" and "refusal" in turn:
        answers = {"content": turn["content"], "refusal": _string(turn, "refusal")}
        turn["content"] = _only(answers) or turn["content"]
        del turn["refusal"]
    found = {key: _thought({key: turn.pop(key)}, config) for key in REASONING_KEYS if key in turn}
    found["parts"] = "".join(thoughts)
    if is_thought:
        found["analysis"] = turn["content"]
        turn["content"] = ""
    if reasoning := _only(found):
        if THINKS.match(turn["content"]):
            raise BadRow(
                "doubled key",
                "it has its reasoning under a key, but also a thinking block in its content; write "
                "it once",
            )
        turn["reasoning_content"] = reasoning


def _thought(part: JsonObject, config: DataConfig) -> str:
    """Return the text of a part that is reasoning. It may have parts of its own."""
    if part.get("type", "text") not in THOUGHTS | TEXTS:
        raise BadRow("not text", "its reasoning has a part that is not text")
    part = _known(part, {"type", "signature", "format", "status", *THOUGHT_KEYS}, config)
    texts = {}
    for key in THOUGHT_KEYS & part.keys():
        value = parsed(part[key]) if key == "reasoning_details" else part[key]
        if not isinstance(value, str):
            value = "".join(_thought(inner, config) for inner in _objects(part, key))
        texts[key] = value
    return _only(texts)


def _only(texts: dict[str, str]) -> str:
    """Return the text of several keys; "" if none has any.

    Raises:
        BadRow: their texts differ, apart from white space.
    """
    given = {key: text for key, text in texts.items() if text.strip()}
    if len({"".join(text.split()) for text in given.values()}) > 1:
        raise BadRow("doubled key", f"its {' and '.join(sorted(given))} differ; write one of them")
    return next(iter(given.values()), "")


def _tool(tool: JsonObject) -> JsonObject:
    """Return a tool in the form that is described above. In a row it may be the function alone, and
    function and parameters may be JSON in strings.
    """
    rest = {key: value for key, value in tool.items() if key != "type"}
    given = parsed(rest.pop("function")) if "function" in tool else rest
    given = given if isinstance(given, dict) else {}
    function = {"parameters" if key in SCHEMA_KEYS else key: given[key] for key in given}
    if "parameters" in function:
        function["parameters"] = parsed(function["parameters"])
    name, parameters = function.get("name"), function.get("parameters", {})
    if (
        tool.get("type", "function") != "function"
        or not (isinstance(name, str) and name)
        or not isinstance(parameters, dict)
        or not isinstance(parameters.get("properties", {}), dict)
        or len(function) < len(given)
    ):
        raise BadRow(
            "wrong type",
            "a tool is not a function with a name, whose parameters are an object or its JSON; "
            'write it as {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}',
        )
    return {"type": "function", "function": function, **(rest if "function" in tool else {})}


def _tool_call(call: JsonObject, config: DataConfig) -> JsonObject:
    """Return a tool call with its arguments as an object.

    OpenAI has JSON in a string, which templates would quote again.
    """
    call = _known(call, {"id", "type", "function", "name", "arguments"}, config)
    if "function" in call:
        function = parsed(call["function"])
        if not isinstance(function, dict):
            raise BadRow("wrong type", "'function' of a call is not an object")
        return {**call, "function": _tool_call(function, config)}
    _string({"name": None, **call}, "name")  # None: a call without a name is rejected
    arguments = parsed(call.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise BadRow(
            "wrong type",
            f"the arguments of {call['name']} are not an object or its JSON, so no tool could read "
            "them; correct them, or write a single value as {NAME: VALUE}",
        )
    return {**call, "arguments": arguments}


def parsed(value: Any) -> Any:
    """Return the value of a string with a JSON object or list; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value)
        except (ValueError, RecursionError):
            return value
    return value


def _known(
    mapping: JsonObject, known: set[str], config: DataConfig, is_row: bool = False
) -> JsonObject:
    """Return the known keys that have a value.

    Raises:
        BadRow: there are other keys, and they are not metadata.
    """
    mapping = {
        key: value
        for key, value in mapping.items()
        # Rows of a table have all of its keys.
        if value not in (None, "", [], {}, *NO_VALUE.get(key, ()))
        and key not in config.ignore_keys
        and (key in known or key.lower() not in METADATA)
    }
    extra = sorted(mapping.keys() - known)
    if media := next(filter(MEDIA.fullmatch, extra), None):
        raise BadRow("not text", f"its key {media} is not text")
    if extra:
        raise BadRow("unknown key", _fix({key: mapping[key] for key in extra}, known, is_row))
    return mapping


def _fix(extra: JsonObject, known: set[str], is_row: bool) -> str:
    """Return what to do about unknown keys."""

    def select(key: str, program: str) -> str:
        """Return the jq command that leaves out rows, or turns, by a key."""
        program = (program if is_row else AS_WEIGHT).replace("KEY", f".{_jq(key)}")
        return f"jq -c '{program}' OLD.jsonl > NEW.jsonl"

    for key in extra:
        for mark, command in MARKS.items():
            # The label of a text is its class, not a judgment.
            if re.fullmatch(mark, key) and (key[:5], known) != ("label", {"text"}):
                if "input_ids" in known:
                    return (
                        f"{key} may exclude tokens from training; if it has 0 or 1 for each token, "
                        f"columns: {{loss_mask: {key}}} of the source reads it"
                    )
                return (
                    f"{key} may exclude rows or turns from training; keep the rows to train on, or "
                    f"give turns a weight, 0 or 1: {select(key, command)}"
                )
    if referred := next(filter(REFERRED.fullmatch, extra), None):
        fix = f"{referred} is unknown, and the answers may refer to it; write it into the prompt"
        prompt = "instruction" if "instruction" in known else "prompt"
        # The prompt of a chat may be a list, or a key that is not read.
        is_text = prompt == "instruction" or ("completion" in known and "system" not in known)
        if is_row and is_text and "input_ids" not in known:
            program = IN_PROMPT.replace("PROMPT", f".{prompt}")
            fix += f": jq -c '{program.replace('KEY', f'.{_jq(referred)}')}' OLD.jsonl > NEW.jsonl"
        if is_row and known != {"text"} and "system" not in known and referred in TOOL_KEYS:
            fix = f"{referred} need a chat template: data.as_chat: true"
        return fix
    names = yaml.safe_dump([*extra], default_flow_style=True, allow_unicode=True, width=math.inf)
    fix = f"unknown: {', '.join(extra)}; find out what it means; "
    # A number or a word may be a judgment, such as is_correct or status.
    if mark := next((k for k, v in extra.items() if re.fullmatch(r"[\w.-]+", str(v))), None):
        fix += f"if {mark} excludes some from training, keep others: {select(mark, KEEP)}; else "
    fix += f"data.ignore_keys: {names.strip()} trains on the rest"
    if is_row:
        fix += ", columns: {our key: key in the file} of the source renames keys"
    if is_row and known != {"text"} and "system" in extra:
        fix += "; system needs a chat template: data.as_chat: true"
    return fix


def _jq(value: Any) -> str:
    """Return a value as jq writes it, for use within a shell's single quotes."""
    return json.dumps(value).replace("'", "\\u0027")


def _string(mapping: JsonObject, key: str) -> str:
    value = mapping.get(key, "")
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{key!r} is not a string; {ONE_ROW_EACH}")
    return value


def _objects(mapping: JsonObject, key: str) -> list[JsonObject]:
    """Return a list of objects. In the row it may be one object, and JSON in strings."""
    value = parsed(mapping.get(key))
    value = [*map(parsed, value)] if isinstance(value, list) else [value]
    if mapping.get(key) in (None, "", []):
        raise BadRow("wrong type", f"{key!r} is empty; write it, or remove the row")
    if not all(isinstance(v, dict) for v in value):
        fix = PYTHON_CELL if isinstance(mapping.get(key), str) else ONE_ROW_EACH
        raise BadRow("wrong type", f"{key!r} is not a list of objects or its JSON; {fix}")
    return value
