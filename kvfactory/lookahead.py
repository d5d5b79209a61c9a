"""Work on the next items while the caller is busy with this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Prompts encoded before they are asked for: one would do, two even out short and long ones."""


def ahead(function: Callable[[T], R], items: Iterable[T], count: int = AHEAD) -> Iterator[R | Exception]:
    """`function(item)` for each item, in order; an exception stands for an item that raised it.

    One background thread works on up to `count` further items, so `function` must not touch what the caller changes
    meanwhile. Leaving early drops what was not begun.
    """
    rest = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="lookahead") as pool:
        pending: deque[Future[R]] = deque(pool.submit(function, item) for item in islice(rest, count + 1))
        try:
            while pending:
                future = pending.popleft()
                error = future.exception()
                for item in islice(rest, 1):
                    pending.append(pool.submit(function, item))
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield future.result() if error is None else error
        finally:
            for future in pending:
                future.cancel()
