"""vLLM serves an export: it gives conversations the trained token ids, answers like transformers,
and stops at the trained end. Needs an environment with vLLM (docs/checkpoints.md, Serve it).

VLLM_PYTHON=~/vllm/bin/python pytest tests/template/test_serving.py
"""

import json
import os
import subprocess

import pytest
import torch
from harness.inputs import chat, save_tiny_llama, write_rows
from harness.repository import REPO
from transformers import AutoModelForCausalLM, AutoTokenizer

VLLM = os.environ.get("VLLM_PYTHON")
FACTS = {"The sun": "a star", "The moon": "a rock", "1 and 1": "two", "Hello": "Hello to you."}


@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON does not name the python of an environment")
@pytest.mark.parametrize("adapter", [False, True])
def test_vllm_answers_as_transformers_and_as_trained(
    forks, tiny_config, tmp_path, sample_tokenizer, adapter
):
    out, run = tmp_path / "model", tmp_path / "run"
    # vLLM's attention on CPU needs heads of a multiple of 32
    base = save_tiny_llama(tmp_path / "base", sample_tokenizer, hidden_size=128)
    facts = [chat(f"{fact}?", answer) for fact, answer in FACTS.items()]
    chats = [fact["messages"] for fact in facts]
    rows = write_rows(tmp_path / "facts.jsonl", facts)
    config = tiny_config(
        model=base, data__train_sources=[str(rows)], data__eval_sources=None,
        train__global_batch_size=4, train__steps=60,
        train__learning_rate=1e-2, model__lora={"r": 8, "alpha": 16} if adapter else None,
    )  # fmt: skip
    forks.finish(config)
    forks.script("scripts.export", run, out, "--verify", code=0)
    request = {"model": str(out), "conversations": [turns[:1] for turns in chats]}
    if adapter:
        folder = tmp_path / "adapter"
        forks.script("scripts.export", run, folder, "--adapter", code=0)
        names = dict.fromkeys(("adapter", "tokenizer", "generation_config"), str(folder))
        request |= {"model": str(base), "enable_lora": True, **names}
    (tmp_path / "requests.json").write_text(json.dumps(request))
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run(
        [VLLM, REPO / "tests" / "template" / "vllm_answers.py", "requests.json", "answers.json"],
        cwd=tmp_path, env=variables, timeout=900, check=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    served = json.loads((tmp_path / "answers.json").read_text())
    for turns, (prompt, answer, ended_by) in zip(chats, served, strict=True):
        tokens = [*prompt, *answer]
        trained = tokenizer.apply_chat_template(turns)["input_ids"]
        assert tokens == trained[: len(tokens)] and ended_by == "stop"
        asked = torch.tensor([prompt])
        assert model.generate(asked, do_sample=False, max_new_tokens=64)[0].tolist() == tokens
