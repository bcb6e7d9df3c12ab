"""transformers' Trainer with files of ds_configs/, for test_commands.py."""

import deepspeed
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(config, _dry_run):
    """Train with Trainer at ZeRO 2 and 3, and check that the loss falls."""
    deepspeed.ops.__compatible_ops__ = {}  # no compiler needed
    deepspeed.init_distributed("gloo")  # Trainer does so itself, but not on CPU
    rows = [dict(input_ids=torch.arange(2, 18), labels=torch.arange(2, 18)) for _ in range(16)]
    for stage in (2, 3):
        AcceleratorState._reset_state()
        args = TrainingArguments(
            config.output_dir, deepspeed=f"ds_configs/zero{stage}.json", max_steps=3,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0], losses
        print("TRAINED", trainer.model_wrapped.zero_optimization_stage())
    torch.distributed.destroy_process_group()
