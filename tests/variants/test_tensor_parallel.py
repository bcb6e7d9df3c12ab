"""Tensor parallelism (AutoTP) equals a plain loop.
pytest tests/variants/test_tensor_parallel.py"""

import re

import pytest
import torch
from harness.cures import try_cures
from harness.forks import SMALL_CHUNKS
from harness.inputs import read_config
from harness.runs import (
    assert_same,
    assert_same_weights,
    checkpoints,
    determined,
    dropout_seeds,
    export,
    plainly,
    read_metrics,
    stop_after_one_step,
)
from split_models import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from zerotrain.checkpoint.run_folder import shard_name
from zerotrain.checkpoint.shards import read_shard
from zerotrain.model.architecture import SUPPORTED_TYPES, check_tensor_parallel, count_parameters
from zerotrain.model.trained import skeleton_to_train


def save_model(folder, tokenizer, kind, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers_of(folder, tokenizer, prompts):
    """Return greedy answers of an exported model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
        found.append(tokenizer.decode(out[0, ids.shape[1] :]).split(tokenizer.eos_token)[0])
    return found


CASES = {
    # Norms of single heads, biases, an untied output head; 2 does not divide two of the sizes.
    "qwen3": (
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": False, "vocab_size": 321,
         "intermediate_size": 61},
        "bucketed", [("zero1_autotp", 2), ("zero3_autotp", 4)],
    ),
    "llama": (
        {"intermediate_size": 64, "tie_word_embeddings": True},
        "packed", [("zero3_autotp", 4), ("zero1_autotp", 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_equals_a_plain_loop_and_resumes_on_other_ranks(
    forks, tiny_config, tmp_path, sample_tokenizer, kind
):
    """The first step runs with one strategy and number of ranks, the others with the next."""
    options, batching, strategies = CASES[kind]
    config = tiny_config(
        model=save_model(tmp_path / "model", sample_tokenizer, kind, **options),
        data__micro_batch_tokens=300, data__batching=batching,
        model__activation_checkpointing=batching == "packed", train__epochs=1,
        eval={"every_steps": 100, "generate": 2, "max_new_tokens": 6},
    )  # fmt: skip
    plain = plainly(config, sample_tokenizer)
    run_folder = tmp_path / "run"
    stop_after_one_step(run_folder)
    for name, ranks in strategies:
        flags = ("--ds_config", f"ds_configs/{name}.json")
        forks.finish(config, *flags, ranks=ranks, patches=SMALL_CHUNKS)

    assert_same(run_folder, plain)
    assert len(read_metrics(run_folder, "eval")) == 2
    out = export(run_folder, tmp_path / "hf")
    assert_same_weights(out, plain)
    rows = read_metrics(run_folder, "generations")[-1]["rows"]
    prompts = [row["prompt"] for row in rows]
    assert answers_of(out, sample_tokenizer, prompts) == [row["answer"] for row in rows]

    if kind == "llama":
        flags = "--ds_config", "ds_configs/zero1.json"
        line = forks.refusal(config, *flags)
        assert "autotp_size differs, keep it, or export the checkpoint" in line
        moved = "--model.name_or_path", out, "--output_dir", tmp_path / "new"
        forks.finish(config, *flags, *moved, "--train.epochs", "null", "--train.steps", "1")


def test_a_group_has_the_same_dropout_and_resumes_with_it(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """In bf16: with different masks, the ranks of a group would train different norms and
    embeddings.
    """
    config = tiny_config(
        model=save_model(
            tmp_path / "model", sample_tokenizer, "starcoder2", intermediate_size=64,
            residual_dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2,
        ),
        ds_config="ds_configs/zero1_autotp.json", train__precision="bf16", train__steps=3,
    )  # fmt: skip
    cut = tmp_path / "cut"
    stop_after_one_step(cut)
    for folder in (tmp_path / "run", cut, cut):
        forks.finish(config, "--output_dir", folder, ranks=4)
    assert determined(cut) == determined(tmp_path / "run"), "bit for bit"
    last = checkpoints(cut)[-1]
    one, other = (read_shard(last, shard_name(rank)) for rank in (0, 1))
    whole = set(one.parts) - set(one.split)
    assert whole and set(one.split) & set(one.parts)
    for name in whole:
        assert torch.equal(one.parts[name][1]["fp32"], other.parts[name][1]["fp32"]), name
    seeds = dropout_seeds(last)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_every_listed_architecture_is_split_right(forks, tiny_config):
    finished = forks.finish(tiny_config(), ranks=2, module="split_models")
    found = re.findall(r"^split (\S+) (\S+) (\S+)$", finished.output, re.MULTILINE)
    assert [kind for kind, *_ in found] == SUPPORTED_TYPES.split()
    for kind, of_logits, of_norm in found:
        assert float(of_logits) < 1e-5 and float(of_norm) < 2e-6, kind


REFUSED = """
stage: 0 -> stage: 1
zero_hpz_partition_size: 2 -> zero_hpz_partition_size: 1 -> autotp_size: 1
offload_optimizer: {device: nvme} -> offload_optimizer: null -> autotp_size: 1
model.compile: true -> model.compile: false -> autotp_size: 1
model.lora: {r: 2} -> model.lora: null -> autotp_size: 1
model.trainable: [norm] -> model.trainable: null -> autotp_size: 1
autotp_size: 3 -> autotp_size: 2
kind: gpt2 -> autotp_size: 1
kind: mixtral -> autotp_size: 1
kind: gpt_oss -> autotp_size: 1
"""


@pytest.mark.parametrize("case", REFUSED.split("\n")[1:-1])
def test_what_cannot_be_split_is_one_line_and_its_cure_works(tiny_config, case):
    def check(values):
        zero = {"stage": 3, "autotp_size": 2, "kind": "llama", **values}
        settings = {name: zero.pop(name) for name in values if name.startswith("model.")}
        config = read_config(tiny_config(**settings))
        architecture = AutoConfig.for_model(zero["kind"], **SIZES)
        skeleton = skeleton_to_train(architecture, config.model)
        counts, size = count_parameters(skeleton), zero["autotp_size"]
        check_tensor_parallel(config, {"zero_optimization": zero}, skeleton, counts, size)

    try_cures(case, check)
