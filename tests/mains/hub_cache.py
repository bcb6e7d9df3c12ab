"""train.py with the hub's cache in another folder than the process started with, for
test_hub.py.
"""

import os
from pathlib import Path

import datasets
from huggingface_hub import constants


def main(config, dry_run):
    """As train.main."""
    import train

    constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
    datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_DATASETS_CACHE"])
    train.main(config, dry_run)
