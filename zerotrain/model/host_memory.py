"""Check, before any weights are read, that the machine's memory has room for them."""

import os

from zerotrain.config.ds_config import zero_stage
from zerotrain.model.setup import Setup
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.host_memory import available_memory
from zerotrain.runtime.process_group import Ranks


def check_host_memory(setup: Setup, ranks: Ranks) -> None:
    """Refuse a model that this machine cannot load, where Linux would kill a rank without a word.

    transformers 5.23 reads the weights on every rank under ZeRO 0 to 2, and under ZeRO-3 on rank 0
    alone.

    Raises:
        UserError: names what is needed and what is available, in GiB.
    """
    available, limit = available_memory()
    name = setup.config.model.name_or_path
    is_partitioned = zero_stage(setup.ds_config) == 3
    readers = 1 if is_partitioned else int(os.environ["LOCAL_WORLD_SIZE"])
    needed = readers * setup.counts.total * (4 if setup.precision == "fp32" else 2)
    if needed > available and (ranks.is_first or not is_partitioned):
        raise UserError(
            f"model.name_or_path: {name} needs {needed / 2**30:,.1f} GiB of CPU memory on this "
            "machine to read the weights, and "
            f"{available / 2**30:,.1f} GiB are available ({limit}); ZeRO stage 3 reads "
            "them once per run instead of once per rank; scripts/memory.py has the arithmetic"
        )
