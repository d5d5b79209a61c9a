"""A runner in a process of its own that is killed when half of a row is written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

_SCRIPT = """
import importlib, os, signal, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
runner = importlib.import_module(sys.argv[2])
from kvfactory.reports import records
start, after = sys.argv[3].encode(), int(sys.argv[4])
real, count = os.write, [0]
def write(fd, data):
    count[0] += bytes(data[: len(start)]) == start
    if count[0] == after:
        real(fd, bytes(data[: len(data) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, data)
records.os.write = write
runner.main(sys.argv[5:])
"""


def kill_inside_row(runner: str, first_field: str, after: int, argv: list[str]) -> None:
    """Runs `{runner}.py` with `argv`, killed inside row number `after`; its rows begin with `first_field`."""
    start = '{"' + first_field + '"'
    command = [sys.executable, "-c", _SCRIPT, ROOT, runner, start, str(after), *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, (after, done.stderr)
