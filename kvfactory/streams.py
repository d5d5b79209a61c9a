"""Standard output and error of a command whose reader may go early, as `head` does."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class _Outliving(io.FileIO):
    """A file descriptor whose reader may go: what is written after that is dropped."""

    def write(self, data: bytes | memoryview) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Lets a command go on when nobody reads its output any more, so that it writes its files and ends with its own
    exit code instead of a traceback. For `if __name__ == "__main__"`: it replaces sys.stdout and sys.stderr.
    """
    sys.stdout, sys.stderr = map(_outliving, (sys.stdout, sys.stderr))


def _outliving(stream: TextIO | None) -> TextIO | None:
    if stream is None:  # closed by whoever started the command
        return None
    stream.flush()
    raw = _Outliving(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
