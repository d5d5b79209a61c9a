"""Settings of methods: declared once as dataclass fields, read by the command line, the docs and the presets.

A field made by `setting` carries its help, its choices and the value each source gives it. The default of the
dataclass is the factory preset (what the original project's runner sets); `--preset paper` swaps in the paper column.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from dataclasses import dataclass, field, fields
from typing import Any

MARKS = ("read", "run", "recalled")
PRESETS = ("factory", "paper")
_NOT_KNOWN = object()


@dataclass(frozen=True)
class Cell:
    """A value that a source gives a setting, and how we know: its code or text was read, run, or is recalled."""

    value: Any
    mark: str

    def __post_init__(self) -> None:
        assert self.mark in MARKS, self.mark

    def __str__(self) -> str:
        return f"{format_value(self.value)} ({self.mark})"


def format_value(value: Any) -> str:
    """A setting's value as it is typed on the command line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return ",".join(str(v) for v in value) or "none"
    return str(value)


def shown(value: Any) -> str:
    """A typed value for a message: its repr, of a long one the beginning and the length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no int of more than 4,300 digits
        return f"(a {type(value).__name__} of too many digits)"
    return shortened(text)


def shortened(text: str) -> str:
    """Typed text for a message: of a long one the beginning and the length."""
    return text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"


def setting(
    factory: Any,
    help: str,
    *,
    paper: Any = _NOT_KNOWN,
    authors: Cell | None = None,
    choices: tuple[str, ...] | None = None,
    factory_mark: str = "read",
    paper_mark: str = "recalled",
) -> Any:
    """A method setting.

    Args:
        factory: the default, the value of the original project's runner.
        paper: the value of the paper's experiments, given even where it equals the factory's; without it both presets
            use the factory value, and the presets table says that the paper's is not known.
        authors: what the authors' own code uses, for the presets table.
        choices: accepted words, if the setting is one of a few.
        factory_mark, paper_mark: how we know the value: "read", "run" or "recalled".
    """
    metadata = {
        "help": help,
        "choices": choices,
        "factory": Cell(factory, factory_mark),
        "paper": Cell(factory, factory_mark) if paper is _NOT_KNOWN else Cell(paper, paper_mark),
        "in_paper": paper is not _NOT_KNOWN,
        "authors": authors,
    }
    return field(default=factory, metadata=metadata)


@dataclass(frozen=True)
class MethodSettings:
    """Base of every method's `Settings`; a method without settings uses it as it is."""

    def own_budget(self) -> int | None:
        """The budget in tokens that the settings imply when none is given; None for the usual default."""
        return None

    def validate(self, budget: int | None) -> None:
        """Raises ValueError when values cannot work together or with a budget of so many tokens (None: not known)."""


def field_type(cls: type, name: str) -> Any:
    """The plain type of a settings field: int, float, bool, str or tuple (of int); None is stripped from unions."""
    hint = typing.get_type_hints(cls)[name]
    options = [t for t in typing.get_args(hint) if t is not type(None)] if typing.get_origin(hint) is not tuple else []
    plain = options[0] if options else hint
    return typing.get_origin(plain) or plain


def parse_switch(text: str) -> bool:
    """on/off (also true/false, yes/no, 1/0) -> bool; ValueError for anything else."""
    lowered = text.lower()
    if lowered in ("on", "true", "yes", "1"):
        return True
    if lowered in ("off", "false", "no", "0"):
        return False
    raise ValueError(f"{shown(text)} is not on or off")


def whole_number(text: str) -> int:
    """ "-12" -> -12; ValueError for anything but ASCII digits behind an optional sign, which Python's int is not."""
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise ValueError(f"{shown(text)} is not a whole number")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{shown(text)} has more digits than Python reads") from None


def number(text: str) -> float:
    """ "0.5", "2e-3" or "inf" -> float; ValueError for anything else, "nan" and "1_0.5" among it."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf", text.strip().lower()):
        raise ValueError(f"{shown(text)} is not a number")
    return float(text)


def parse_ints(text: str) -> tuple[int, ...]:
    """ "0,1" -> (0, 1); "none" or "" -> ()."""
    if text.strip().lower() in ("", "none"):
        return ()
    return tuple(whole_number(part) for part in text.split(","))


def coerce(cls: type, name: str, value: Any) -> Any:
    """`value` as the type of field `name`; ValueError naming the flag otherwise.

    A field whose metadata holds "convert" is converted by that function alone; one with "cli": False has no flag.
    """
    metadata = cls.__dataclass_fields__[name].metadata
    if value is not None and "convert" in metadata:
        return metadata["convert"](value)
    kind, choices = field_type(cls, name), metadata.get("choices")
    try:
        if value is None:
            if type(None) not in typing.get_args(typing.get_type_hints(cls)[name]):
                raise ValueError
            return None
        if kind is bool:
            value = parse_switch(value) if isinstance(value, str) else bool(value)
        elif kind is tuple:
            value = parse_ints(value) if isinstance(value, str) else tuple(_whole(v) for v in value)
        elif kind is int:
            value = _whole(value)
        elif kind is float:
            value = number(value) if isinstance(value, str) else float(value)
            if math.isnan(value):
                raise ValueError
        else:
            value = str(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"--{name} {shown(value)} is not {_describe(kind)}") from None
    if choices and value not in choices:
        raise ValueError(f"--{name} {shown(value)} is not one of {', '.join(choices)}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str):
        return whole_number(value)
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError
    return int(value)


def _describe(kind: type) -> str:
    return {bool: "on or off", tuple: "a comma-separated list of whole numbers", int: "a whole number"}.get(
        kind, "a number"
    )


def resolve_settings(method: str, cls: type, preset: str, given: dict[str, Any]) -> MethodSettings:
    """The settings in force: what the user gave, else the preset's value.

    Raises:
        ValueError: a setting the method does not read, a wrong type or choice, an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset {shown(preset)} is not one of {', '.join(PRESETS)}")
    known = {f.name: f for f in fields(cls)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
            hint = f" Did you mean {' or '.join('--' + n for n in near)}?" if near else ""
            reads = ", ".join("--" + n for n in known) or "no settings of its own"
            raise ValueError(f"--{name} is not read by {method}, which reads {reads}.{hint}")
    values = {name: f.metadata[preset].value for name, f in known.items()}
    values |= {name: coerce(cls, name, value) for name, value in given.items()}
    return cls(**values)


def recalled_values(settings: MethodSettings, preset: str, given: dict[str, Any]) -> list[str]:
    """Names of settings in force whose value comes from a preset cell that is marked recalled."""
    return [f.name for f in fields(settings) if f.name not in given and f.metadata[preset].mark == "recalled"]


def as_dict(settings: MethodSettings) -> dict[str, Any]:
    """Plain JSON values of settings."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(settings).items()}


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that is not a whole number from 0 to 2**32 - 1, the range that NumPy takes too."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"--seed {shown(seed)} is not a whole number from 0 to {2**32 - 1}")
