"""One kind of registry for methods, metrics and every other named thing of the package."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvfactory.settings import shown

T = TypeVar("T")


def unknown_name(kind: str, name: str, available: list[str]) -> str:
    """One sentence for an unknown `name` of some `kind`: near matches first, then everything there is."""
    lowered = {a.lower(): a for a in available}
    near = [lowered[m] for m in difflib.get_close_matches(str(name).lower(), list(lowered), n=3, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"unknown {kind} {shown(name)}.{hint} Available: {', '.join(available) or 'none'}."


class Registry(Generic[T]):
    """Maps canonical names to objects; look-up ignores case, duplicates are refused.

    Args:
        kind: what the entries are called in messages, e.g. "method".
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._canonical: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an object under its canonical `name`."""

        def add(entry: T) -> T:
            key = name.lower()
            if key in self._canonical:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._canonical[key] = name
            self._entries[name] = entry
            return entry

        return add

    def canonical(self, name: str) -> str:
        """The canonical spelling of `name`; ValueError with near matches when there is none."""
        try:
            return self._canonical[str(name).lower()]
        except KeyError:
            raise ValueError(unknown_name(self.kind, name, self.names())) from None

    def get(self, name: str) -> T:
        return self._entries[self.canonical(name)]

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._canonical

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
