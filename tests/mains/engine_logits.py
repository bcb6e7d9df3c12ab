"""train.py for the tests of exports. At the end it saves logits of the trained engine."""

from pathlib import Path

import torch

import train

TOKENS = torch.arange(3, 99).view(2, 48)


def main(config, dry_run):
    """Train. Rank 0 writes the logits of TOKENS to output_dir/logits.pt."""
    loop = train.train

    def train_and_ask(run, progress):
        ended = loop(run, progress)
        run.engine.eval()
        with torch.no_grad():  # on all ranks: ZeRO 3 gathers weights in the forward pass
            logits = run.engine(input_ids=TOKENS, use_cache=False).logits
        if run.ranks.is_first:
            torch.save(logits, Path(config.output_dir) / "logits.pt")
        return ended

    train.train = train_and_ask
    train.main(config, dry_run)
