"""Ranks that all warn, and then rank 1 fails, for test_console.py."""

import logging
import warnings

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.process_group import process_group
from zerotrain.tracking.console import quieten_libraries


def main(config, dry_run):
    """Warn, log, agree on one error, and raise a second."""
    with process_group() as ranks:
        quieten_libraries(ranks.is_first)
        for _ in range(3):
            warnings.warn("warned by every rank", UserWarning, stacklevel=1)
            with warnings.catch_warnings():  # makes Python forget its earlier warnings
                warnings.simplefilter("ignore")
        logging.getLogger("DeepSpeed").warning("logged by every rank")
        logging.getLogger("DeepSpeed").info("chatter")

        def work():
            if ranks.rank == 1:
                raise UserError("data: a file is missing")

        try:
            ranks.run_on_all(work)
        except UserError as error:
            if ranks.is_first:
                print(error, flush=True)
        if ranks.rank == 1:
            logging.getLogger("DeepSpeed").error("logged error")
            raise ValueError("two\nlines")
