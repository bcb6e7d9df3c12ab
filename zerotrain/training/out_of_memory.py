"""The error line of a run that is out of memory: which rows, and what to set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zerotrain.data.data_plan import DataPlan
from zerotrain.runtime.errors import UserError, first_of

OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator")
"""Text of the errors of CUDA, and of the CPU."""


@contextmanager
def explain_out_of_memory(describe: Callable[..., str], *arguments: Any) -> Iterator[None]:
    """Raise UserError if the work inside `with` runs out of GPU or CPU memory.

    Args:
        describe: called with the arguments; says what did not fit and what to do.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        raise UserError(f"out of memory in {describe(*arguments)}") from error


def describe_micro_batch(plan: DataPlan, examples: np.ndarray) -> str:
    """Name the rows of a micro-batch that does not fit, and what to do.

    Args:
        examples: the micro-batch's examples, int64 [examples], the longest first.
    """
    tokens = plan.budget.micro_batch_tokens
    rows = [
        f"{plan.data.place_of(example)} ({plan.data.lengths[example]:,} tokens)"
        for example in dict.fromkeys(examples.tolist())
    ]
    smaller = plan.with_budget(tokens // 2).budget.micro_batch_tokens
    fix = "set model.activation_checkpointing to true, or lower data.max_length"
    if smaller < tokens:
        fix = (
            f"data.micro_batch_tokens is {tokens:,}: set it to {smaller:,}, which changes neither "
            f"steps nor losses; if that is not enough, {fix}"
        )
    return f"a micro-batch of {first_of(rows)}; {fix}"
