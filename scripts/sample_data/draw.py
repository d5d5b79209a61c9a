"""Seeded choices and the little template language that every generator uses.

Only `random.Random.random()` is called: Python promises the same sequence for the same seed in every version for
that method alone, so the suite does not change with the interpreter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(^|\n|[.?] )([a-z])")


class Draw:
    """A stream of choices that depends on nothing but its key."""

    def __init__(self, *key: object) -> None:
        self._random = random.Random("/".join(str(part) for part in key)).random

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(len(rest))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        if count > len(items):
            raise ValueError(f"cannot draw {count} different items from {len(items)}")
        return self.shuffled(items)[:count]

    def say(self, template: str, **slots: object) -> str:
        """Expand `[a|b]` to one of its parts (inner brackets first), then `{slot}`; sentences get their capital."""
        while match := _CHOICE.search(template):
            template = template[: match.start()] + self.pick(match[1].split("|")) + template[match.end() :]
        return _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), template.format(**slots))


class Bag:
    """Items in a drawn order, each taken once; with `again` the bag is refilled when it is empty."""

    def __init__(self, draw: Draw, items: Sequence[T], again: bool = False) -> None:
        self._draw, self._items, self._again = draw, items, again
        self._left = draw.shuffled(items)

    def take(self) -> T:
        if not self._left:
            if not self._again:
                raise ValueError(f"a bag of {len(self._items)} items is empty; it began with {self._items[0]!r}")
            self._left = self._draw.shuffled(self._items)
        return self._left.pop()

    def __len__(self) -> int:
        return len(self._left)


def words(text: str) -> int:
    """Number of blank-separated words."""
    return len(text.split())


def listing(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
