"""train.py with weights that change between loading and their proof, for
tests/test_weights_proof.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from checkpoint import start
from checkpoint.shards import Fragment, flat_weights, layout
from config.schema import Config
from runtime.errors import UserError

TENSOR = "model.layers.1.input_layernorm.weight"


@contextmanager
def changed(values: torch.Tensor | None) -> Iterator[None]:
    """With one element of `values` changed in its last bits."""
    if values is None or not values.numel():
        yield
        return
    flat = values.detach().view(-1)
    before = flat[0].clone()
    flat[0] = before * 1.01
    try:
        yield
    finally:
        flat[0] = before


def held(engine) -> torch.Tensor:
    """What this rank computes with."""
    parameter = dict(engine.module.named_parameters())[TENSOR]
    return getattr(parameter, "ds_tensor", parameter)


def updated(engine) -> torch.Tensor | None:
    """What this rank's optimizer updates, if it updates a part of the tensor."""
    for at in (Fragment(*values) for values in layout(engine)["fragments"]):
        if at.name == TENSOR and at.numel:
            return flat_weights(engine)[at.flat].view(-1)[at.offset : at.offset + at.numel]
    return None


def main(config: Config, dry_run: bool) -> None:
    """As train.main, with the proof repeated three times."""
    import train

    real = start.prove_weights

    def prove(engine, config, ranks) -> str:
        texts = [real(engine, config, ranks)]
        for kind in (held, updated):
            values = kind(engine)
            # of the weights on one rank; of the optimizer's wherever they are
            mine = values if kind is updated or ranks.rank == ranks.world_size - 1 else None
            try:
                with changed(mine):
                    texts.append(f"NOT NOTICED: {real(engine, config, ranks)}")
            except UserError as error:
                texts.append(f"{kind.__name__}: {error}")
        return "\n".join([*texts, real(engine, config, ranks)])

    start.prove_weights = prove
    train.main(config, dry_run)
