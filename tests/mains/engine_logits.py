"""train.py, and at the end the logits of the engine that has been trained, for
the tests of what is exported and loaded.
"""

from pathlib import Path

import torch

import train

TOKENS = torch.arange(3, 99).view(2, 48)


def main(config, dry_run):
    """As train.main; rank 0 leaves output_dir/logits.pt."""
    loop = train.train

    def train_and_ask(run, progress):
        ended = loop(run, progress)
        run.engine.eval()
        with torch.no_grad():  # all ranks: ZeRO-3 gathers weights in the forward pass
            logits = run.engine(input_ids=TOKENS, use_cache=False).logits
        if run.ranks.is_first:
            torch.save(logits, Path(config.output_dir) / "logits.pt")
        return ended

    train.train = train_and_ask
    train.main(config, dry_run)
