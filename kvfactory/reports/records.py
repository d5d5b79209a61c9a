"""Result files: JSON Lines that survive a kill at any byte and end up as an uninterrupted run writes them.

One row is one line. A row with a non-null `error` is a failed example: it counts as missing, so a resumed run tries
it again and its new row takes the old one's place. Everything that decides what a file holds is read from the file
itself, at opening and again at closing; nothing depends on what a killed process had in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfactory.reports.files import FileLock, json_bytes, write_atomically

SYNC_EVERY = 16  # rows between two fsyncs: a kill loses nothing, a power cut at most this many rows


@dataclass(frozen=True)
class Line:
    """One whole line of a result file: its number from 1, its bytes without the newline, and its row."""

    number: int
    raw: bytes
    row: dict[str, Any]

    @property
    def failed(self) -> bool:
        return self.row.get("error") is not None


def encode_row(row: dict[str, Any]) -> bytes:
    """`row` as one line of JSON with its newline.

    Raises:
        ValueError: a field holds a float that is not finite; such a row is a bug upstream and not a result.
    """
    try:
        return json_bytes(row) + b"\n"
    except ValueError as error:
        for name, value in row.items():
            try:
                json_bytes(value)
            except ValueError:
                raise ValueError(
                    f"row {row.get('_id')!r}: field {name!r} holds a float that is not finite, "
                    "which JSON cannot hold (write None for a value that was not measured)"
                ) from error
        raise


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Whole lines of a result file, and how many bytes they take with the blank lines between them.

    Bytes beyond that count are a torn last line, the mark of a killed writer. A last line without newline that
    parses is whole. A missing file has no lines. Lines end at b"\\n" alone, so U+2028 inside a text is data.

    Raises:
        ValueError: the file cannot be read, or a line before the last is broken, or a row has no text `_id`; the
            sentence names file and line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ValueError(f"cannot read the results in {path}: {error.strerror}") from error
    lines: list[Line] = []
    pieces = data.split(b"\n")
    last = max((i for i, piece in enumerate(pieces) if piece.strip()), default=-1)
    whole = 0
    for i, piece in enumerate(pieces[: last + 1]):
        raw = piece.strip()
        if raw:
            try:
                row = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
            except ValueError as error:
                if i == last:
                    return lines, whole
                raise ValueError(
                    f"{path} line {i + 1} is broken ({error}), and only a last line can be one that a killed run "
                    "left: repair or delete that line, or start again with --overwrite"
                ) from error
            if not isinstance(row, dict) or not isinstance(row.get("_id"), str):
                raise ValueError(
                    f"{path} line {i + 1} is no result row: an object with a text field '_id' is needed; "
                    "delete that line, or start again with --overwrite"
                )
            lines.append(Line(i + 1, raw, row))
        whole = min(whole + len(piece) + 1, len(data))
    return lines, len(data)  # blank space after the last whole line does no harm


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


def effective_lines(lines: Iterable[Line]) -> dict[str, Line]:
    """The line that counts for each `_id`: its first result, else its last failure.

    Results of one `_id` are equal but for timings (generation is deterministic per example), so of repeated ones,
    which only joining files by hand can make, the first is as good as any and keeping it is stable.
    """
    chosen: dict[str, Line] = {}
    for line in lines:
        old = chosen.get(line.row["_id"])
        if old is None or old.failed:
            chosen[line.row["_id"]] = line
    return chosen


def in_order(lines: Iterable[Line], order: Sequence[str]) -> bytes:
    """Content of a finished file: for each `_id` of `order` that has a line, the one that counts."""
    chosen = effective_lines(lines)
    return b"".join(chosen[i].raw + b"\n" for i in order if i in chosen)


class ResultFile:
    """Context manager that owns one result file from construction to `close`.

    Construction locks and reads, and writes nothing but the lock's sidecar: a run can open all its files before it
    loads weights. The file appears with the first row.

    Args:
        path: the file; a symbolic link is followed.
        order: `_id`s of this run's examples in data order (for a shard: of its share).
        overwrite: do not read the old file; `discard` or the first `append` removes it. A run that goes through
            several files discards all of them before it starts, else a kill leaves old rows that look done.

    Attributes:
        done: `_id`s that have a result.
        failed: `_id`s whose only rows are failures; they are to be tried again.
        notices: what was found and put right at opening, one sentence each, for the user.

    Raises:
        FileInUse: another process, or this one, has the file open.
        ValueError: a line that is broken and not the last, a row whose `_id` is not in `order`, a repeated `_id` in
            `order`, or a folder that cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], order: Sequence[str], overwrite: bool = False):
        self.path = Path(path)
        self.order = list(order)
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.notices: list[str] = []
        self._known = set(self.order)
        self._fd: int | None = None
        self._stale = overwrite
        self._unsynced = 0
        self._closed = False
        if len(self._known) < len(self.order):
            twice = next(i for n, i in enumerate(self.order) if i in self.order[:n])
            raise ValueError(f"_id {twice!r} occurs twice in the data of {self.path}: results are kept by _id")
        self._lock = FileLock(self.path)
        try:
            if not overwrite:
                self._read()
        except BaseException:
            self._lock.release()
            raise

    def _read(self) -> None:
        lines, whole = read_lines(self.path)
        for line in lines:
            if line.row["_id"] not in self._known:
                raise ValueError(
                    f"{self.path} line {line.number} has _id {line.row['_id']!r}, which is not among this run's "
                    f"{len(self.order)} examples: run with the data, the --ids and the --max_num_examples of these "
                    "results, or with more examples, or start again with --overwrite"
                )
        chosen = effective_lines(lines)
        self.done = {i for i, line in chosen.items() if not line.failed}
        self.failed = set(chosen) - self.done
        torn = (self.path.stat().st_size if self.path.exists() else 0) - whole
        if torn:
            self.notices.append(f"{self.path}: dropped a torn last line of {torn} bytes")
        repeated = sum(not line.failed for line in lines) - len(self.done)
        if repeated:
            self.notices.append(f"{self.path}: dropped {repeated} repeated results, the first of each _id is kept")

    @property
    def complete(self) -> bool:
        """Whether every example has a result."""
        return self.done == self._known

    def rows(self) -> list[dict[str, Any]]:
        """The rows that count now, failures included, in data order; read from the file."""
        if self._stale:
            return []
        chosen = effective_lines(read_lines(self.path)[0])
        return [chosen[i].row for i in self.order if i in chosen]

    def discard(self) -> None:
        """With `overwrite`, remove the old file now; otherwise nothing."""
        if self._stale:
            self.path.unlink(missing_ok=True)
            self._stale = False

    def append(self, row: dict[str, Any]) -> None:
        """Add one row as a whole line, handed to the kernel before this returns.

        A write that fails half-way (full disk, interrupt) is taken back, so that no later line follows half a one.

        Raises:
            ValueError: a float in the row is not finite.
            OSError: the disk is full or gone; the message says that a new run goes on from here.
        """
        name = row["_id"]
        assert not self._closed and name in self._known and name not in self.done, f"unexpected row {name!r}"
        data = encode_row(row)
        fd = self._open()
        start = os.fstat(fd).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            self._unsynced += 1
            if self._unsynced >= SYNC_EVERY:
                self._sync()
        except BaseException as error:
            os.ftruncate(fd, start)
            if isinstance(error, OSError):
                text = f"cannot append to {self.path}: {error.strerror}; run the same command again to go on"
                raise OSError(error.errno, text) from error
            raise
        if row.get("error") is None:
            self.done.add(name)
            self.failed.discard(name)
        else:
            self.failed.add(name)

    def _open(self) -> int:
        if self._fd is None:
            self.discard()
            _, whole = read_lines(self.path)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.ftruncate(fd, whole)
            if whole and os.pread(fd, 1, whole - 1) != b"\n":
                os.write(fd, b"\n")
            self._fd = fd
        return self._fd

    def _sync(self) -> None:
        if self._fd is not None:
            os.fsync(self._fd)
        self._unsynced = 0

    def close(self) -> None:
        """Put the file into data order, without superseded failures and torn ends, and give it up.

        The file is rewritten only when that changes it. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._sync()
            if not self._stale and self.path.exists():
                wanted = in_order(read_lines(self.path)[0], self.order)
                if wanted != self.path.read_bytes():
                    write_atomically(self.path, wanted)
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            self._lock.release()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
