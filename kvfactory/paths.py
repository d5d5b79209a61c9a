"""Where kvfactory keeps downloaded files, and how a file gets there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "KVFACTORY_CACHE"


def cache_dir() -> Path:
    """Root of everything kvfactory downloads: $KVFACTORY_CACHE, else ~/.cache/kvfactory (may not exist yet)."""
    value = os.environ.get(CACHE_VARIABLE)
    return Path(value).expanduser() if value else Path.home() / ".cache" / "kvfactory"


@contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """A hidden temporary folder inside `parent` (made when missing), removed at the end whatever happens.

    Being on the file system of `parent`, what is built in it can be moved into place with `os.replace`, which is
    atomic: a reader sees the old file, the new one or none, never a half-written one.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
