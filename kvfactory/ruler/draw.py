"""Random draws whose beginning does not depend on how many are taken, so that a longer text extends a shorter one."""

from __future__ import annotations

import random
from collections.abc import Iterator


def permutation(rng: random.Random, size: int) -> Iterator[int]:
    """The numbers 0 to size - 1 in random order, one at a time (Fisher-Yates, time and memory of what is taken).

    `random.sample` does not serve here: its first elements change with the number asked for.
    """
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
