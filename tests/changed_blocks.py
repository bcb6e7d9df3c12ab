"""train.py for tests/test_blocks.py and tests/test_router_loss.py: torch.compile without generating
code, which takes 20 s, and with EXCEPT_MLPS everything frozen but the MLPs.
"""

import os

import torch

import train
from config.schema import Config
from model import engine

compile_fully = torch.compile


def without_code(*args, **kwargs):
    return compile_fully(*args, **kwargs, backend="aot_eager")


def freezing(load):
    def load_it(*args):
        model = load(*args)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return model

    return load_it


def main(config: Config, dry_run: bool) -> None:
    """As train.main."""
    torch.compile = without_code
    if "EXCEPT_MLPS" in os.environ:
        engine.load_model = freezing(engine.load_model)
    train.main(config, dry_run)
