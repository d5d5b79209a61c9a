"""JSON Lines as data sets are published: read whole, and refused by file and line.

Result files, which a killed run may leave with a torn last line, are read by `kvfactory.reports.records`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_objects(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, each with the number of its line, from 1.

    Lines end at "\\n" alone, so U+2028, U+000B and the like inside strings stay data (escaped or not); a byte-order
    mark, CRLF and blank lines are accepted.

    Args:
        what: whose data it is, for messages.

    Raises:
        ValueError: the file cannot be read or has no object, or the first bad line: not UTF-8, broken JSON, or
            something else than an object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: the {what} data cannot be read ({error.strerror or error}).") from error
    empty = True
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            yield number, _object(raw, f"{path}, line {number}")
            empty = False
    if empty:
        raise ValueError(f"{path}: no records; {what} needs at least one JSON object, one a line.")


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode("utf-8"), strict=False)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start + 1} of the line: {error.reason}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON ({error.msg}, column {error.colno}).") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested without end
        raise ValueError(f"{where}: JSON that cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: a JSON object is expected, this is {kind(found)}.")
    return found


def kind(value: Any) -> str:
    """What a value is, in words: "a string", "null", "a list of int and str"; the type's name for one JSON has not."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return "a list of " + (" and ".join(sorted({type(item).__name__ for item in value})) or "nothing")
    words = {dict: "an object", str: "a string", int: "an integer", float: "a number with a fraction"}
    return words.get(type(value), type(value).__name__)
