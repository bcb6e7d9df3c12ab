"""Pretrained weights reach the ranks as they are in the files, or training does not start.

pytest tests/test_weights_proof.py
"""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import REPO, environment, strategy
from flipped_weights import TENSOR
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from checkpoint.weights_proof import checksum
from model.architecture import meta_model
from model.stored import StoredWeights
from runtime.host_memory import available_memory

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 40, "initializer_range": 0.2}  # fmt: skip


def test_a_checksum_is_that_of_its_parts_and_notices_changes():
    values = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = checksum(values)
    assert whole == checksum(values.float())
    flat, wrap = values.flatten(), 1 << 64
    assert (checksum(flat[:123]) + checksum(flat[123:], 123) - whole) % wrap == 0
    assert checksum(flat[:0]) == 0
    for other in (values.T, values.flip(0), values[:, [1, 0, *range(2, 7)]], values * (1 + 2**-7)):
        assert checksum(other.contiguous()) != whole
    one = values.clone()
    one[49, 6] *= 1.01
    assert checksum(one) != whole


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sample_tokenizer):
    made = {}
    for name, config in {
        "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
        "experts": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    }.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.05)
        model.to(torch.bfloat16).save_pretrained(made[name], max_shard_size="20KB")
        sample_tokenizer.save_pretrained(made[name])
    return made


@pytest.mark.launch
@pytest.mark.parametrize(
    "model, stage, precision",
    [
        ("tied", 0, "fp32"),
        ("experts", 0, "bf16"),
        ("tied", 1, "bf16"),
        ("experts", 2, "bf16"),
        ("tied", 3, "fp32"),
        ("experts", 3, "bf16"),
    ],
)
def test_what_ranks_hold_equals_the_files(
    forks, folders, tiny_config, tmp_path, model, stage, precision
):
    """A value that differs on one rank, or in the optimizer's copy, is noticed."""
    config = tiny_config(
        model=folders[model], ds_config=str(strategy(tmp_path, f"zero{stage}")),
        train__precision=precision, train__epochs=None, train__steps=1,
    )  # fmt: skip
    finished = forks.train(config, ranks=2, module="flipped_weights")
    assert finished.code == 0, finished.output
    proofs = [x for x in finished.output.splitlines() if "tensors on" in x or "differ from" in x]
    equal = [line for line in proofs if "tensors on 2 ranks equal the" in line]
    assert len(proofs) == 4 and len(equal) == 2, finished.output
    tensors = len(meta_model_of(folders[model]))
    assert equal[0].startswith(f"  weights        {tensors:,} tensors on 2 ranks"), equal
    for line, kind in zip(proofs[1:3], ("held", "updated"), strict=True):
        assert line.startswith(f"{kind}: ") and f"files: {TENSOR}; start again" in line


def meta_model_of(folder):
    return dict(meta_model(AutoConfig.from_pretrained(folder), False).named_parameters())


@pytest.mark.parametrize("model", ["tied", "experts"])
@pytest.mark.parametrize("kind", ["several", "one", "torch"])
def test_files_of_every_kind_are_read(folders, tmp_path, model, kind):
    loaded = AutoModelForCausalLM.from_pretrained(folders[model])
    folder = tmp_path / "model"
    if kind == "torch":
        loaded.config.save_pretrained(folder)
        torch.save(loaded.state_dict(), folder / "pytorch_model.bin")
    else:
        size = "20KB" if kind == "several" else "5GB"
        loaded.save_pretrained(folder, max_shard_size=size)
    again = AutoModelForCausalLM.from_pretrained(folder)
    stored = StoredWeights(str(folder), None)
    shares = [dict(stored.expected(again, slice(rank, None, 3))) for rank in range(3)]
    assert sum(map(len, shares)) == len({name for share in shares for name in share})
    expected = {name: value for share in shares for name, value in share.items()}
    assert not set(dict(again.named_parameters())) - set(expected)
    for name, value in expected.items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@pytest.mark.launch
def test_a_model_too_large_for_the_memory_is_refused_before_it_is_read(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """A sparse file with the header of a real one."""
    folder = tmp_path / "large"
    width = 4096
    config = LlamaConfig(
        vocab_size=320, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
        # half too much: other processes may end meanwhile
        num_hidden_layers=int(1.5 * available_memory()[0] / (width * width * 14 * 4)) + 1,
    )  # fmt: skip
    config.save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    header, end = {}, 0
    for name, p in meta_model(config, False).named_parameters():
        offsets = [end, end := end + 2 * p.numel()]
        header[name] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    finished = forks.train(tiny_config(model=folder), ranks=1)
    assert finished.code == 2, finished.output
    [line] = finished.errors
    assert re.search(
        r" needs [\d,.]+ GiB of CPU memory on this machine, [\d,.]+ GiB of it to", line
    )
    assert re.search(r"GiB are available \(\w.*\); ZeRO stage 3 reads them once per run", line)


class Hub(BaseHTTPRequestHandler):
    """Refuses as the hub does."""

    REFUSALS = {  # noqa: RUF012
        "gated": (403, "GatedRepo"), "absent": (401, "RepoNotFound"),
        "branch": (404, "RevisionNotFound"),
    }  # fmt: skip

    def do_HEAD(self):
        found = re.search(r"/org/(\w+)", self.path)
        status, code = self.REFUSALS[found[1]] if found else (404, "")
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


def test_what_the_hub_refuses_is_one_line_with_the_cure(tmp_path, tiny_config):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    code = (
        "import sys\n"
        "from huggingface_hub import constants\n"
        "from config.parse import parse_command_line\n"
        "from model.load import load_model_config\n"
        "for name in sys.argv[2:]:\n"
        "    constants.HF_HUB_OFFLINE = name == 'org/offline'\n"
        "    argv = ['--config', sys.argv[1], '--model.name_or_path', name]\n"
        "    try: load_model_config(parse_command_line(argv).config)\n"
        "    except Exception as error: print(f'{type(error).__name__}: {error}')\n"
    )
    cures = {
        "org/gated": f"it is gated: accept its terms at {endpoint}/org/gated, then log in",
        "org/absent": f"no such model at {endpoint}; if it is private, log in with `hf auth login`",
        "org/branch": "has no such branch, tag or commit: see model.revision",
        "org/offline": "cannot be reached; on a machine with a network: `hf download org/offline`",
    }
    variables = {**environment(), "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": endpoint}
    del variables["HF_HUB_OFFLINE"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_config()), *cures],
        cwd=REPO, env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    lines = done.stdout.splitlines()
    assert len(lines) == len(cures), lines
    for line, (name, cure) in zip(lines, cures.items(), strict=True):
        assert line.startswith(f"UserError: model.name_or_path: cannot load {name}: "), line
        assert cure in line, line
