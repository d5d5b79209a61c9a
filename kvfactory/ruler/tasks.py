"""Facts about the 13 RULER tasks.

Source: NVIDIA/RULER @c3f5e3b4, scripts/synthetic.yaml and scripts/data/synthetic/constants.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfactory.data.tasks import Task
from kvfactory.registry import unknown_name

# task -> (kind, new tokens)
_FACTS = {
    "niah_single_1": ("niah", 128),
    "niah_single_2": ("niah", 128),
    "niah_single_3": ("niah", 128),
    "niah_multikey_1": ("niah", 128),
    "niah_multikey_2": ("niah", 128),
    "niah_multikey_3": ("niah", 128),
    "niah_multivalue": ("niah", 128),
    "niah_multiquery": ("niah", 128),
    "vt": ("vt", 30),
    "cwe": ("cwe", 120),
    "fwe": ("fwe", 50),
    "qa_1": ("qa", 32),
    "qa_2": ("qa", 32),
}

# `category` is the kind of the task, `examples` what the official suite makes per task and length.
RULER_TASKS: dict[str, Task] = {
    name: Task(name, "string_match_part" if kind == "qa" else "string_match_all", "en", tokens, kind, examples=500)
    for name, (kind, tokens) in _FACTS.items()
}


def canonical_ruler_task(name: str) -> str:
    """The canonical task name, any case accepted; ValueError with near matches otherwise."""
    lowered = str(name).strip().lower()
    if lowered in RULER_TASKS:
        return lowered
    raise ValueError(unknown_name("RULER task", name, list(RULER_TASKS)))


def canonical_ruler_tasks(names: Iterable[str]) -> tuple[str, ...]:
    """Canonical names in the order given, repetitions dropped; "all" alone is all 13. ValueError as above."""
    names = list(names)
    if [name.strip().lower() for name in names] == ["all"]:
        return tuple(RULER_TASKS)
    return tuple(dict.fromkeys(canonical_ruler_task(name) for name in names))


def get_ruler_task(name: str) -> Task:
    """The task of a name, any case accepted; ValueError with near matches otherwise."""
    return RULER_TASKS[canonical_ruler_task(name)]
