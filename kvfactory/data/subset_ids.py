"""The file of --ids: which examples to run, one `_id` a line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvfactory.settings import shown


@dataclass(frozen=True)
class IdList:
    """The `_id`s of a file.

    Attributes:
        lines: {`_id`: its line, from 1}, in file order; none is empty.
    """

    path: Path
    lines: dict[str, int]

    @property
    def sha256(self) -> str:
        """Of the set of `_id`s, whatever their order, so that blank lines and the file's place cannot matter."""
        return hashlib.sha256("\n".join(sorted(self.lines)).encode()).hexdigest()

    def check_found(self, found: Container[str], datasets: Iterable[str]) -> None:
        """ValueError naming file and line of the first `_id` that is not among `found`, those of all `datasets`."""
        missing = [name for name in self.lines if name not in found]
        if missing:
            more = f" (nor are {len(missing) - 1} further ones of the file)" if missing[1:] else ""
            raise ValueError(
                f"--ids {self.path}, line {self.lines[missing[0]]}: _id {shown(missing[0])} is in none of the selected "
                f"datasets ({', '.join(datasets)}){more}: correct the file, or select its dataset"
            )


def read_ids(path: str | Path) -> IdList:
    """The file at `path`: UTF-8, a byte-order mark, CRLF, blank lines and blanks around an `_id` are ignored.

    Raises:
        ValueError: the file cannot be read, holds no `_id`, or holds one twice; file and line are named.
    """
    path = Path(os.path.expanduser(path))
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"--ids {path} cannot be read ({error.strerror}): give a text file, one _id a line") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"--ids {path}, line {line}: not UTF-8 text; give a text file, one _id a line") from error
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split("\n"), start=1):
        name = line.strip()
        if name and lines.setdefault(name, number) != number:
            raise ValueError(f"--ids {path}, line {number}: _id {shown(name)} stands on line {lines[name]} already")
    if not lines:
        raise ValueError(f"--ids {path} is empty: give at least one _id, one a line")
    return IdList(path, lines)
