"""Exports are checked against their run by a process that has only the folder.
pytest tests/commands/test_verify.py
"""

import json
import sys
from pathlib import Path

import pytest
from harness.inputs import chat, mix_of_formats, read_config, rewrite, strategy, write_rows
from harness.processes import run
from harness.repository import SAMPLE
from transformers import AutoModelForCausalLM

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.runtime.errors import EXIT_FAILURE
from zerotrain.tools import ask_export
from zerotrain.tools.ask_export import prompt_ids
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import mean_loss, read_rows
from zerotrain.tools.verify import VerificationFailed, check_prompts, sample_requests


def change(checkpoint, name, old, new):
    """Replace text in a file of a checkpoint, and its entry in the manifest."""
    text = (checkpoint / name).read_text()
    assert old in text
    rewrite(checkpoint, name, text.replace(old, new).encode())


def test_an_export_is_written_only_if_it_agrees_with_its_run(
    forks, tiny_config, tmp_path, chat_rows
):
    """ZeRO 3 in bf16 with tied heads. Some examples are truncated, some have several answers. The
    chat template has no end-of-turn text. Then files that a server reads are changed.
    """
    template = (SAMPLE / "model" / "chat_template.jinja").read_text()
    no_end = tmp_path / "no_end.jinja"
    no_end.write_text(template.replace(" + '<|end|>' -}}{%- endgen", " -}}{%- endgen"))
    assert no_end.read_text() != template
    rows = [*chat_rows[:30]]
    rows[5] = chat("What is it?", "a mark")
    for i in (8, 9, 10):
        rows[i] = {"messages": [*rows[i]["messages"], *rows[i + 1]["messages"][-2:]]}
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[:20])
    mine = tmp_path / "mine"
    config = tiny_config(
        ds_config=strategy(tmp_path, "zero3"), train__precision="bf16", train__steps=2,
        data__max_length=120, data__eval_sources=[held_out], data__cache_dir=mine,
        model__chat_template=no_end, train__learning_rate=4e-4, train__global_batch_size=8,
    )  # fmt: skip
    forks.finish(config, ranks=2)
    [checkpoint], out = list_complete(tmp_path / "run" / "checkpoints"), tmp_path / "deep" / "hf"

    def export(code):
        return forks.script("scripts.export", tmp_path / "run", out, "--verify", code=code)

    mine.rename(tmp_path / "gone")  # The export may not create it again.
    finished = export(0)
    assert not mine.exists()
    assert "over 20 examples" in finished.output and "trained token ids" in finished.output
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card, "paths name people and machines"
    rate = float(card.partition("| learning rate | ")[2].partition(",")[0])
    assert 3e-4 < rate <= 4e-4, "scaled with the mean batch"
    out.rename(tmp_path / "first")

    changes = {
        "evaluation loss": ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0'),
        "end tokens": ("generation_config.json", '"eos_token_id": 1', '"eos_token_id": 5'),
    }
    for named, (name, old, new) in changes.items():
        change(checkpoint, f"model/{name}", old, new)
        assert named in export(EXIT_FAILURE).error and not out.exists()
        change(checkpoint, f"model/{name}", new, old)
    changed = Path(read_config(config).data.train_sources[0].path)
    changed.unlink()  # a link to rows that other tests share
    write_rows(changed, rows)
    assert "restore them, or export without --verify" in export(2).error
    forks.script("scripts.export", tmp_path / "run", out, code=0)


def test_an_export_is_evaluated_without_dropout(tiny_config, tiny_model_with_dropout):
    plan = open_plans(read_config(tiny_config(model=tiny_model_with_dropout)), 1)[2]
    rows = read_rows(plan.data)[:3]
    examples = [(ids[0].tolist(), weights[0].nonzero()[:, 0].tolist()) for ids, weights in rows]
    found = ask_export.answer(tiny_model_with_dropout, {"prompts": [], "examples": examples})
    model = AutoModelForCausalLM.from_pretrained(tiny_model_with_dropout).eval()
    assert found["loss"] == pytest.approx(mean_loss(model, rows), rel=1e-6)


def check_requests(config_file):
    """The result for the requests of a config's training rows, answered in this process."""
    config, tokenizer, plan, _ = open_plans(read_config(config_file), 1)
    prompts = list(sample_requests(plan.data, config, held_out=False))
    served = [prompt_ids(tokenizer, **json.loads(json.dumps(p.arguments))) for p in prompts]
    return check_prompts(served, prompts, tokenizer)


@pytest.mark.parametrize("settings", [{}, {"max_length": 20, "on_too_long": "split"}])
def test_requests_are_the_trained_tokens_in_every_format(
    tiny_config, tmp_path, chat_rows, settings
):
    settings = {f"data__{key}": value for key, value in settings.items()}
    sources = mix_of_formats(tmp_path, chat_rows)
    assert "requests" in check_requests(tiny_config(data__train_sources=sources, **settings))


TEMPLATE = """{%- for m in messages -%}<|{{ m.role }}|>
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}<|end|>{%- endgeneration -%}
{%- else -%}{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>PROMPT{%- endif -%}"""


def test_a_prompt_that_training_has_never_seen(tiny_config, tmp_path):
    """Templates of reasoning models open a thinking block in the prompt. Rows without reasoning
    lack it, so the trained model has never seen such a prompt.
    """
    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + TEMPLATE.replace("PROMPT", ""))
    config = tiny_config(model__chat_template=template, data__eval_sources=None)
    assert "requests give" in check_requests(config), "of another day"
    no_end = TEMPLATE.replace("PROMPT", "").replace("{{ m.content }}<|end|>", "{{ m.content }}", 1)
    template.write_text(no_end)
    assert "requests give" in check_requests(config), "the run adds an end token"
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    row = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    rows = write_rows(tmp_path / "calls.jsonl", [{"messages": row}] * 20)
    called = "{{ m.content or m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}"
    template.write_text(TEMPLATE.replace("PROMPT", "").replace("{{ m.content }}", called, 1))
    calls = tiny_config(
        name="calls.yaml",
        model__chat_template=template, data__eval_sources=None,
        data__train_sources=[rows],
    )  # fmt: skip
    assert "requests give" in check_requests(calls), "arguments as JSON"
    thoughts = [row[0], {"role": "assistant", "content": "2", "thinking": "easy"}] * 2
    write_rows(rows, [{"messages": thoughts}] * 20)
    for key in ("reasoning", "reasoning_content", "thinking"):
        thought = f"{{{{ m.{key} }}}}{{{{ m.content }}}}"
        template.write_text(TEMPLATE.replace("PROMPT", "").replace("{{ m.content }}", thought, 1))
        assert "requests give" in check_requests(calls), key
    template.write_text(TEMPLATE.replace("PROMPT", "<think>"))
    with pytest.raises(VerificationFailed, match=r"jsonl:1: the prompt of message \d: token"):
        check_requests(config)


def test_the_process_that_verifies_imports_nothing_of_this_repository():
    code = f"import runpy, sys; runpy.run_path({ask_export.__file__!r}); print(*sys.modules)"
    imported = run([sys.executable, "-I", "-c", code]).output.split()
    assert "transformers" in imported and "zerotrain" not in imported
