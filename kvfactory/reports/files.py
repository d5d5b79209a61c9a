"""Owning a file, writing it whole, and probing a folder before a run starts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

from kvfactory.settings import shown


class FileInUse(ValueError):
    """Another process owns the file; the message names the file and that process."""


class FileLock:
    """Ownership of `target` through an advisory lock on the sidecar `{target}.lock`, held until `release`.

    The lock belongs to the open file and not to the file's existence: after a kill -9 the kernel has dropped it and
    the sidecar that stays behind is harmless. A second owner inside the same process is refused as well.

    Raises:
        FileInUse: somebody else owns the file and `wait` is False.
        ValueError: the sidecar cannot be made, or the file system knows no locks.
    """

    def __init__(self, target: Path, wait: bool = False):
        self.target = target = Path(os.path.realpath(target))
        self.path = target.with_name(target.name + ".lock")
        self._made: list[Path] = []
        while True:
            self._fd = self._open_sidecar()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                owner = os.read(self._fd, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(self._fd)
                raise FileInUse(
                    f"{target} is being written by {owner}: wait for it, stop it, or use another --save_dir"
                ) from None
            except OSError as error:
                os.close(self._fd)
                raise ValueError(
                    f"the file system of {target} cannot lock files ({error.strerror}), "
                    "so two runs could not be kept apart: choose another --save_dir"
                ) from error
            if self._is_current():
                break
            os.close(self._fd)  # the former owner removed this sidecar between our open and our lock
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _open_sidecar(self) -> int:
        folder = self.path.parent
        for attempt in (1, 2, 3):
            try:
                missing = [p for p in (folder, *folder.parents) if not p.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                self._made = missing or self._made
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                # another owner's release may have removed the empty folder between the two calls
                if attempt == 3 or not isinstance(error, FileNotFoundError):
                    raise ValueError(f"cannot write to {folder} (--save_dir): {error.strerror}") from error
        raise AssertionError("unreachable")

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the file up; the sidecar goes, and so do the folders made for it that stayed empty.

        A second call does nothing.
        """
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)  # while still owner, so that nobody else's sidecar goes
        os.close(self._fd)
        self._fd = -1
        for folder in self._made:  # innermost first
            try:
                folder.rmdir()
            except OSError:
                break  # not empty: results are in it, or somebody else's files

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def json_bytes(value: Any, indent: int | None = None) -> bytes:
    """`value` as UTF-8 JSON; a text that UTF-8 cannot hold (lone surrogates) is written with escapes instead.

    Raises:
        ValueError: a float is not finite (JSON has no literal for it), or the value refers to itself.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent).encode("ascii")


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` through a temp file beside it: a reader or a crash sees the old file or the new one.

    The caller owns `path` (see `FileLock`), so the temp name can be fixed and a killed writer's is used again.
    """
    path = Path(os.path.realpath(path))  # a symbolic link stays one
    temp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} (--save_dir): {os.strerror(error.errno or 0)}") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name survive a power cut
    finally:
        os.close(folder)


def check_writable(save_dir: str | os.PathLike[str]) -> None:
    """Refuse a folder that results cannot be written to, before anything else is done; leaves nothing behind.

    Probes by making a folder with a file in it inside `save_dir`, or inside its nearest parent that exists.

    Raises:
        ValueError: one sentence naming --save_dir and the reason.
    """
    folder = Path(os.path.abspath(save_dir))
    while not os.path.lexists(folder):
        if folder.parent == folder:
            break
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".kvfactory-", dir=folder) as probe:
            Path(probe, "probe").write_bytes(b"x")
    except OSError as error:
        where = "" if folder == Path(os.path.abspath(save_dir)) else f" ({folder})"
        raise ValueError(f"--save_dir {save_dir}: results cannot be written there{where}: {error.strerror}") from error


def check_file_name(name: str, what: str) -> str:
    """`name` back when it can be one part of a path with room for our suffixes; ValueError calling it `what`."""
    reason = None
    if not name or name.startswith("."):
        reason = "it is empty or begins with a dot"
    elif re.search(r"[/\\\x00-\x1f\x7f]", name):
        reason = "it holds a slash, a backslash or a control character"
    elif any("\ud800" <= c <= "\udfff" for c in name):
        reason = "it is not valid Unicode"
    elif len(name.encode("utf-8")) > 200:
        reason = "it is longer than 200 bytes"
    if reason:
        raise ValueError(f"{what} {shown(name)} cannot be a file name: {reason}")
    return name
