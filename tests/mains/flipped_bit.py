"""train.py for test_training.py: on rank 1, a bit of a gradient flips in the replay of step 22."""

from itertools import count

import torch

import train


def main(config, dry_run):
    """Train. The replayed micro-batch computes the gradient twice, and the second has the flip."""
    train_step = train.train_step

    def step(run, batch, *rest):
        if run.ranks.rank == 1 and batch.global_step == 21:
            weight = run.engine.module.get_parameter("model.layers.1.mlp.up_proj.weight")
            passes = count()

            def flip(gradient):
                if next(passes) == 1:
                    gradient = gradient.clone()
                    gradient.view(torch.int32)[5, 7] ^= 1
                return gradient

            weight.register_hook(flip)
        return train_step(run, batch, *rest)

    train.train_step = step
    train.main(config, dry_run)
