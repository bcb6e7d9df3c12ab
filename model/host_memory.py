"""Check, before any weights are read, that the machine's memory has room for them."""

from config.ds_config import zero_stage
from model.setup import Setup
from runtime.errors import UserError
from runtime.host_memory import available_memory
from runtime.process_group import Ranks


def check_host_memory(setup: Setup, ranks: Ranks) -> None:
    """Refuse a model that this machine cannot load, where Linux would kill a rank without a word.

    transformers 5.23 reads the weights on every rank under ZeRO 0 to 2, and under ZeRO-3 on rank 0
    alone. What offload and asynchronous saves keep in CPU memory is added.

    Raises:
        UserError: names what is needed and what is available, in GiB.
    """
    estimate, (available, limit) = setup.memory(ranks.world_size), available_memory()
    name = setup.config.model.name_or_path
    reads = ranks.is_first or zero_stage(setup.ds_config) < 3
    needed = estimate.host + (estimate.loading if reads else 0)
    if needed > available:
        raise UserError(
            f"model.name_or_path: {name} needs {needed / 2**30:,.1f} GiB of CPU memory on this "
            f"machine, {estimate.loading / 2**30:,.1f} GiB of it to read the weights, and "
            f"{available / 2**30:,.1f} GiB are available ({limit}); ZeRO stage 3 reads "
            "them once per run instead of once per rank; scripts/memory.py has the arithmetic"
        )
