"""What a step waits for.    pytest tests/training/test_waits.py"""

import json

import pytest
from harness.runs import read_metrics

# The gradient's norm, whether it is finite, and the losses: once each, after the last micro-step.
OF_A_STEP = {"is_invalid_grad_norm": 1, "apply_update": 1, "train_step": 1}
PARAMETERS = 20
WAITS = {  # by ZeRO stage
    0: {"has_overflow_serial": PARAMETERS, "has_overflow": 1, "get_weight_norm": 4,
        "train_step": 1},
    1: {**OF_A_STEP, "clip_tensors_by_global_norm": 1},
    2: {**OF_A_STEP, "is_invalid_grad_norm": 3, "has_overflow": 1},
    3: OF_A_STEP,
}  # fmt: skip


@pytest.mark.parametrize(
    "stage, batching", [*((stage, "packed") for stage in WAITS), (2, "bucketed")]
)
def test_a_step_waits_for_named_values_alone(forks, tiny_config, tmp_path, stage, batching):
    """In bf16. Of packed examples no function waits in each micro-step; of padded ones transformers
    looks twice whether the mask hides anything.
    """
    config = tiny_config(
        ds_config=f"ds_configs/zero{stage}.json", train__precision="bf16", train__steps=6,
        data__micro_batch_tokens=300, data__batching=batching,
    )  # fmt: skip
    forks.finish(config, module="counted_waits")
    micro_steps = read_metrics(tmp_path / "run")[5]["micro_steps"]
    of_masks = {} if batching == "packed" else {"_ignore_causal_mask_sdpa": 2 * micro_steps}
    waits = json.loads((tmp_path / "run" / "waits.json").read_text())
    assert waits == WAITS[stage] | of_masks and micro_steps > 1
