"""What scripts/export.py writes, served by vLLM: the trained token ids from a conversation,
transformers' answer, an end where training ended it. Optional: needs an
environment with vLLM (docs/checkpoints.md, Serve it).

VLLM_PYTHON=~/vllm/bin/python pytest tests/template/test_serving.py
"""

import json
import os
import subprocess

import pytest
import torch
from harness.inputs import write_rows
from harness.repository import REPO
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

VLLM = os.environ.get("VLLM_PYTHON")
FACTS = {"The sun": "a star", "The moon": "a rock", "1 and 1": "two", "Hello": "Hello to you."}


@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON does not name the python of an environment")
@pytest.mark.parametrize("adapter", [False, True])
def test_vllm_answers_as_transformers_and_as_trained(
    forks, tiny_config, tmp_path, sample_tokenizer, adapter
):
    torch.manual_seed(0)
    config = Qwen3Config(  # vLLM's attention on CPU wants heads of a multiple of 32
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=sample_tokenizer.eos_token_id,
    )  # fmt: skip
    base, out, run = tmp_path / "base", tmp_path / "model", tmp_path / "run"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    sample_tokenizer.save_pretrained(base)
    chats = [
        [{"role": "user", "content": f"{fact}?"}, {"role": "assistant", "content": answer}]
        for fact, answer in FACTS.items()
    ]
    rows = write_rows(tmp_path / "facts.jsonl", [{"messages": turns} for turns in chats])
    config = tiny_config(
        model=base, data__train_sources=[str(rows)], data__eval_sources=None,
        train__global_batch_size=4, train__steps=60,
        train__learning_rate=1e-2, model__lora={"r": 8, "alpha": 16} if adapter else None,
    )  # fmt: skip
    assert forks.train(config).code == 0
    exported = forks.script("scripts/export.py", run, out, "--verify")
    assert exported.code == 0, exported.output
    request = {"model": str(out), "conversations": [turns[:1] for turns in chats]}
    if adapter:
        folder = tmp_path / "adapter"
        assert forks.script("scripts/export.py", run, folder, "--adapter").code == 0
        names = dict.fromkeys(("adapter", "tokenizer", "generation_config"), str(folder))
        request |= {"model": str(base), "enable_lora": True, **names}
    (tmp_path / "requests.json").write_text(json.dumps({"one": request}))
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run(
        [VLLM, REPO / "tests" / "template" / "vllm_answers.py", "requests.json", "answers.json"],
        cwd=tmp_path, env=variables, timeout=900, check=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    served = json.loads((tmp_path / "answers.json").read_text())["one"]
    for turns, answer in zip(chats, served, strict=True):
        tokens = [*answer["prompt"], *answer["answer"]]
        trained = tokenizer.apply_chat_template(turns)["input_ids"]
        assert tokens == trained[: len(tokens)] and answer["ended_by"] == "stop"
        asked = torch.tensor([answer["prompt"]])
        assert model.generate(asked, do_sample=False, max_new_tokens=64)[0].tolist() == tokens
