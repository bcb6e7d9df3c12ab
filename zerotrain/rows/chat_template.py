"""The chat template with which rows are rendered, and which exports have."""

import contextlib
import re

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import CHAT_TEMPLATES, chat_template_file
from zerotrain.rows.sources import BadRow
from zerotrain.rows.turns import locate
from zerotrain.runtime.errors import UserError, similar
from zerotrain.runtime.files import read_text
from zerotrain.runtime.progress import print_line

WRITTEN_LAST = (
    "{% if not add_generation_prompt and messages[-1]['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}"
)
WRITTEN_ALWAYS = (
    "{% set ended = namespace(messages=[]) %}{% for m in messages %}{% set ended.messages = "
    "ended.messages + [dict(m, content=m['content'] ~ eos_token) if m['role'] == 'assistant' and "
    "m['content'] is string and m['content'] and not m['tool_calls'] else m] %}{% endfor %}"
    "{% set messages = ended.messages %}"
)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Give a tokenizer the chat template of a run, which ends each answer with a token.

    Args:
        name: a Jinja file, or a name in data/chat_templates; None: the tokenizer's own template.

    Raises:
        UserError: it cannot be read.
    """
    if name:
        tokenizer.chat_template = _read_template(name, tokenizer)
    end_answers(tokenizer)


def _read_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    file = chat_template_file(name)
    if not file.is_file():
        names = sorted(path.stem for path in CHAT_TEMPLATES.glob("*.jinja"))
        raise UserError(
            f"model.chat_template: {name} is no file, and no template of data/chat_templates: "
            f"{', '.join(names)}{similar(name, names)}"
        )
    template = read_text(str(file), "model.chat_template: ")
    named = file.parent == CHAT_TEMPLATES
    return fit_template(template, tokenizer) if named else template


def end_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    """If the chat template ends answers with nothing (GLM, Alpaca), or only those within a row
    (Qwen1.5, Apertus), extend it to write the eos token there, also in the exported tokenizer.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or tokenizer.eos_token is None:
        return
    chat = [{"role": role, "content": f"({role})"} for role in ("user", "assistant") * 2]
    # as it is; with an end after the last answer; with an end after each answer
    for changed in (template, template.rstrip("\n") + WRITTEN_LAST, WRITTEN_ALWAYS + template):
        tokenizer.chat_template = changed
        with contextlib.suppress(BadRow, UserError):
            locate(chat, None, tokenizer, [1, 3])
            if changed != template:
                print_line("the chat template ends answers with no token: eos is added to it")
            return
    tokenizer.chat_template = template


def fit_template(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Adapt one of data/chat_templates to a tokenizer: if it lacks the template's end mark, the eos
    token takes its place, since only a token can stop generation.
    """
    found = re.match(r"\{%- set end_mark = '([^']+)' -%\}", template)
    if not found or found[1] in tokenizer.get_vocab():
        return template
    return template.replace(f"'{found[1]}'", "eos_token", 1)
