"""A shard as a process of this machine: one that begins at once, and one that first waits for the word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

WAITS = "KVFACTORY_SHARD_WAITS"
"""Set for a shard that waits for a line on its standard input, see `called`."""


class LocalShard:
    """A shard under way. Lines of its standard error go to `emit`, its own table nowhere.

    It leads a session of its own: a terminal's Ctrl-C reaches it once, through us.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], emit: Callable[[str], None]):
        self._start(command, environ, subprocess.DEVNULL)
        self._show(emit)

    def _start(self, command: Sequence[str], environ: Mapping[str, str], stdin: int) -> None:
        self._process = subprocess.Popen(
            command,
            env=os.environ | environ,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _show(self, emit: Callable[[str], None]) -> None:
        self._reader = threading.Thread(target=self._read, args=(emit,), daemon=True)
        self._reader.start()

    def _read(self, emit: Callable[[str], None]) -> None:
        with self._process.stderr as lines:
            for line in lines:
                emit(line.rstrip("\n"))

    def poll(self) -> int | None:
        """Its exit code, a negative signal number when it was killed; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=5)  # a grandchild may hold the pipe open for longer
        return code

    def stop(self) -> None:
        """Asks it to stop after its example; a second time, at once."""
        self._process.send_signal(signal.SIGTERM)


class WaitingShard(LocalShard):
    """A shard that has touched nothing yet and begins at `go`; without it, it ends with us. It is silent until then."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._start(command, {**environ, WAITS: "1"}, subprocess.PIPE)

    def go(self, emit: Callable[[str], None]) -> bool:
        """Lets it begin; False when it has died while it waited, and it is closed then."""
        try:
            with self._process.stdin as line:
                line.write("go\n")
        except BrokenPipeError:
            self.kill()
            self.close()
            return False
        self._show(emit)
        return True

    def kill(self) -> None:
        """Ends it where it has not begun: it has nothing to lose."""
        self._process.kill()

    def close(self) -> None:
        """Waits for its end after `kill`."""
        self._process.wait()
        self._process.stderr.close()
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def called() -> bool:
    """Whether this call is to run: always, but for a shard that was started early and whose parent did not need it.

    Such a shard opens the GPU that it sees, then waits for its parent's word or end. Obstacles are left to the run
    itself, which meets them again and says what they are.
    """
    if os.environ.pop(WAITS, None) is None:
        return True
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return sys.stdin.readline() != ""
