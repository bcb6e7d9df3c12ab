"""Files of ds_configs/ that test_training.py leaves out: they train like plain torch, resume,
or are refused in one line.    pytest tests/variants/test_strategies.py
"""

import json
import os

import pytest
import torch
from harness.inputs import save_tiny_llama, strategy
from harness.repository import REPO
from harness.runs import assert_same, checkpoints, plainly, stop_after_one_step
from transformers import AutoModelForCausalLM

from zerotrain.tools.saved import shards_of_rank, whole_weight


def test_nvme_without_a_compiler_is_refused(forks, tiny_config):
    flags = ("--ds_config", "ds_configs/zero3_nvme.json", "--dry_run")
    line = forks.refusal(tiny_config(), *flags, PATH="/nowhere")
    assert "device nvme needs libaio and a C++ compiler" in line


def test_secondary_partitions_train_and_resume_the_same(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """hpZ trains with two groups of two ranks, and resumes with one group of two."""
    # A group has two of a node's four ranks. No parameter stays whole.
    changes = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    changes = {f"zero_optimization.{key}": value for key, value in changes.items()}
    file = strategy(tmp_path, "zeropp", changes)
    config = tiny_config(data__micro_batch_tokens=300, ds_config=file, train__epochs=1)
    plain = plainly(config, sample_tokenizer)
    assert "3 ranks" in forks.refusal(config, "--dry_run", ranks=3)
    stop_after_one_step(tmp_path / "run")
    for ranks in (4, 2):
        forks.finish(config, ranks=ranks)
    assert_same(tmp_path / "run", plain)
    forks.finish(config, "--output_dir", tmp_path / "whole", ranks=2)
    assert_same(tmp_path / "whole", plain)


@pytest.mark.skipif(
    "WITH_NVME" not in os.environ,
    reason="compiles for minutes: install g++ and libaio-dev, and set WITH_NVME=1",
)
def test_nvme_trains_the_same_and_its_checkpoints_resume_without_it(
    forks, tiny_config, tmp_path, sample_tokenizer
):
    """Each of two ranks has 1 MB of each large matrix. Smaller matrices stay in memory. The masters
    of bf16 begin on the disk at the random points at which they begin in memory.
    """
    model = save_tiny_llama(
        tmp_path / "model", sample_tokenizer, intermediate_size=16_640, num_hidden_layers=1
    )
    content = json.loads((REPO / "ds_configs" / "zero3_nvme.json").read_text())
    zero = content["zero_optimization"]
    zero["sub_group_size"] = 600_000
    zero["offload_param"] |= {"buffer_size": 1_200_000, "max_in_cpu": 0}
    file = tmp_path / "zero3_nvme.json"
    file.write_text(json.dumps(content))
    config = tiny_config(model=model, data__micro_batch_tokens=300, train__epochs=1)
    plain = plainly(config, sample_tokenizer)
    nvme = ("--ds_config", file)
    forks.finish(config, *nvme, "--output_dir", tmp_path / "whole", ranks=2)
    assert_same(tmp_path / "whole", plain)
    on_disk = [path.stat().st_size for path in (tmp_path / "whole" / "nvme").rglob("*.swp")]
    assert sum(on_disk) > 2 * 3 * 4 * 500_000, on_disk

    stop_after_one_step(tmp_path / "run")
    forks.finish(config, *nvme, ranks=2)
    assert "zero3.json" in forks.refusal(config, *nvme, ranks=2)
    zero3 = ("--ds_config", strategy(tmp_path, "zero3"))
    forks.finish(config, *zero3, ranks=3)
    assert_same(tmp_path / "run", plain)

    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    sample_tokenizer.save_pretrained(tmp_path / "half")
    stays = "--train.precision", "bf16", "--train.learning_rate", "1e-60"
    shards = []
    for name, ds_config in (("masters_nvme", nvme), ("masters", zero3)):
        folder = tmp_path / name
        flags = "--model.name_or_path", tmp_path / "half", "--output_dir", folder, *stays
        one_step = "--train.epochs", "null", "--train.steps", "1"
        forks.finish(config, *ds_config, *flags, *one_step, ranks=2)
        shards.append(shards_of_rank(checkpoints(folder)[-1], 0))
    for name, weight in half.named_parameters():
        on_disk, in_memory = (whole_weight(of_run, name) for of_run in shards)
        assert torch.equal(on_disk, in_memory)
        assert torch.equal(on_disk.bfloat16(), weight)
        assert (on_disk != weight).float().mean() > 0.99
