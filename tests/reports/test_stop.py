"""Signals between examples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kvfactory.main import run
from kvfactory.reports.stop import STOPPED, StopSignal, interruptible
from kvfactory.suites.longbench import LongBenchSettings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_asks_second_interrupts_then_handlers_come_back(number, capfd):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert f"{number.name}: stopping after this example" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_stopped_run_flushes_and_exits_75_even_where_the_shell_ignores_sigint(tmp_path):
    code = """
import os, signal, sys
from kvfactory.reports.records import ResultFile
from kvfactory.reports.stop import STOPPED, StopSignal
with StopSignal() as stop, ResultFile(sys.argv[1], ["a", "b", "c"]) as results:
    for name in "cba":
        if stop.requested:
            sys.exit(STOPPED)
        if name == "b":
            os.kill(os.getpid(), signal.SIGINT)
        results.append({"_id": name})
"""
    path = tmp_path / "a.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
    )
    assert (done.returncode, STOPPED) == (75, 75)
    assert path.read_text() == '{"_id": "b"}\n{"_id": "c"}\n'


def test_sigterm_interrupts_where_nothing_is_written_yet():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_runner_that_is_stopped_while_it_prepares_says_75(monkeypatch):
    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("kvfactory.main.prepare", stopped)
    assert run(LongBenchSettings, ["--method", "fullkv", "--model_path", "m"]) == STOPPED
