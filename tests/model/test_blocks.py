"""torch.compile changes no loss.    pytest tests/model/test_blocks.py"""

import numpy as np
import pytest
from harness.inputs import strategy
from harness.runs import read_metrics


@pytest.mark.launch
def test_a_run_stays_the_same_under_zero(forks, tiny_config, tmp_path):
    """Where the first block is frozen: ZeRO-3 reduces a compiled block's gradients when that of its
    input is there. test_router_loss.py has a compiled model without frozen blocks, and with
    activation checkpointing, with which a gradient of zeros would not show.
    """
    changed = {"model__compile": True}
    found = {}
    for stage, options in ((1, {}), (3, changed)):
        run = tmp_path / f"stage {stage}"
        config = tiny_config(
            ds_config=str(strategy(tmp_path, f"zero{stage}")), output_dir=str(run),
            model__trainable=[r"layers\.1\.mlp"], data__micro_batch_tokens=300,
            data__batching="bucketed", train__epochs=None, train__steps=2, **options,
        )  # fmt: skip
        forks.finish(config, module="changed_blocks")
        found[stage] = [(s["loss"], s["grad_norm"]) for s in read_metrics(run)]
    np.testing.assert_allclose(found[1], found[3], rtol=1e-6)
