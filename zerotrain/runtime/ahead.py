"""Work that runs a little ahead of the thread that takes its results."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(
    pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Yield `work(item)` of each item, in order. At most `ahead` further items are worked on before
    a result is taken; Executor.map would read all items first.
    """
    pending = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    yield from (future.result() for future in pending)
