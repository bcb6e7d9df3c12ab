"""train.py for test_router_loss.py: torch.compile without generating
code, which takes 20 s.
"""

import torch

import train

compile_fully = torch.compile


def without_code(*args, **kwargs):
    return compile_fully(*args, **kwargs, backend="aot_eager")


def main(config, dry_run):
    """As train.main."""
    torch.compile = without_code
    train.main(config, dry_run)
