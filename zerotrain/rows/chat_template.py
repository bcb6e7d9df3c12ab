"""Choose the chat template that renders rows. Exports have the same template."""

import contextlib
import json
import re

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import CHAT_TEMPLATES, ModelConfig, chat_template_file
from zerotrain.rows.sources import BadRow
from zerotrain.rows.turns import locate
from zerotrain.runtime.errors import UserError, describe, similar
from zerotrain.runtime.files import read_text
from zerotrain.runtime.progress import print_line

# Appended to a template: writes eos after the last answer.
WRITTEN_LAST = (
    "{% if not add_generation_prompt and messages[-1]['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}"
)
# Put before a template: adds eos to the content of each answer.
WRITTEN_ALWAYS = (
    "{% set ended = namespace(messages=[]) %}{% for m in messages %}{% set ended.messages = "
    "ended.messages + [dict(m, content=m['content'] ~ eos_token) if m['role'] == 'assistant' and "
    "m['content'] is string and m['content'] and not m['tool_calls'] else m] %}{% endfor %}"
    "{% set messages = ended.messages %}"
)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Give a tokenizer the chat template of a run, which ends each answer with a token.

    Raises:
        UserError: model.chat_template cannot be read, or a value of model.chat_template_kwargs is
            for a tokenizer without one template.
    """
    if config.chat_template:
        tokenizer.chat_template = _read_template(config.chat_template, tokenizer)
    if config.chat_template_kwargs:
        if not isinstance(tokenizer.chat_template, str):
            raise UserError(
                f"model.chat_template_kwargs: tokenizer {tokenizer.name_or_path} has no chat "
                "template, or several; set model.chat_template"
            )
        values = config.chat_template_kwargs.items()
        written = "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in values)
        tokenizer.chat_template = written + tokenizer.chat_template
    end_answers(tokenizer)


def _read_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    file = chat_template_file(name)
    if not file.is_file():
        names = sorted(path.stem for path in CHAT_TEMPLATES.glob("*.jinja"))
        raise UserError(
            f"model.chat_template: {name} is not a file; the templates in data/chat_templates are "
            f"{', '.join(names)}{similar(name, names)}"
        )
    template = read_text(str(file), "model.chat_template: ")
    named = file.parent == CHAT_TEMPLATES
    return fit_template(template, tokenizer) if named else _from_json(template, name)


def _from_json(text: str, name: str) -> str:
    """Return the template in a JSON file, such as a processor's chat_template.json; any other text
    unchanged.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        if name.endswith(".json"):
            raise UserError(
                f"model.chat_template: {name} is not JSON: {describe(error)}"
            ) from error
        return text
    template = given.get("chat_template") if isinstance(given, dict) else None
    if not isinstance(template, str):
        raise UserError(
            f"model.chat_template: {name} is JSON, but not an object whose chat_template is a "
            "string; write the template itself into a file"
        )
    return template


def end_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    """Extend a chat template that writes no end-of-turn text after answers (GLM, Alpaca), or none
    after the last answer (Qwen1.5, Apertus): it then writes the eos token there.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or tokenizer.eos_token is None:
        return
    chat = [{"role": role, "content": f"({role})"} for role in ("user", "assistant") * 2]
    # Unchanged; with eos after the last answer; with eos after each answer.
    for changed in (template, template.rstrip("\n") + WRITTEN_LAST, WRITTEN_ALWAYS + template):
        tokenizer.chat_template = changed
        with contextlib.suppress(BadRow, UserError):
            locate(chat, None, tokenizer, [1, 3])
            if changed != template:
                print_line("the chat template ends answers without a token; it gets the eos token")
            return
    tokenizer.chat_template = template


def fit_template(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Adapt a template in data/chat_templates to a tokenizer. If the tokenizer lacks the template's
    end-of-turn token, use eos instead, because only a token can stop generation. If the tokenizer
    puts bos before every text, so does the template, because the model knows no text without it.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if found and found[1] not in tokenizer.get_vocab():
        template = template.replace(f"'{found[1]}'", "eos_token", 1)
    begins_with_bos = tokenizer.backend_tokenizer.encode("a").ids[:1] == [tokenizer.bos_token_id]
    if begins_with_bos and "bos_token" not in template:
        return "{{- bos_token -}}\n" + template
    return template
