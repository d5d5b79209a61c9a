"""Stopping a run between two examples on SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 75  # exit code of a run that was stopped after flushing (EX_TEMPFAIL of sysexits.h: run it again)


class StopSignal:
    """Context manager under which the first SIGTERM or SIGINT only sets `requested`; the second interrupts at once.

    The caller looks at `requested` between examples, closes its files and exits with `STOPPED`. The second signal
    raises KeyboardInterrupt, under which files are closed as well. The former handlers come back at the end. A SIGINT
    that the shell had set to be ignored (a script's background job) is taken too: a stopped run loses nothing.
    Works in the main thread only, as Python's signal handlers do.
    """

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}")
        self.requested = True
        text = f"\n{signal.Signals(number).name}: stopping after this example; once more stops at once\n"
        os.write(2, text.encode("ascii"))  # sys.stderr may be in the middle of a write of its own


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets SIGTERM interrupt as SIGINT does, by KeyboardInterrupt: where nothing is written that a stop could cut off.

    Outside the main thread, which alone may set handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
