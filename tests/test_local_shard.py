"""Shards that wait for the word: silent and idle until it comes, gone when it does not."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvfactory.local_shard import WAITS, WaitingShard, called

ROOT = Path(__file__).resolve().parents[1]
WAITER = """
import os, sys
print("loaded", file=sys.stderr, flush=True)
open(sys.argv[1] + ".loaded", "w").close()
word = sys.stdin.readline()
open(sys.argv[1], "w").write(repr((word, sys.stdin.readline(), os.environ["PLACE"])))
sys.exit(3)
"""


def python(code, *arguments):
    return [sys.executable, "-S", "-c", code, *map(str, arguments)]


def wait_for(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.01)


def waiter(file):
    """A shard that has come to where it waits; it writes what it then reads to `file`."""
    shard = WaitingShard(python(WAITER, file), {"PLACE": "here"})
    wait_for(Path(f"{file}.loaded").exists)
    return shard


def test_it_begins_at_the_word_and_is_silent_until_then(tmp_path):
    shard, lines = waiter(tmp_path / "read"), []
    assert not (tmp_path / "read").exists()
    assert shard.go(lines.append)
    wait_for(lambda: shard.poll() is not None)
    assert shard.poll() == 3 and lines == ["loaded"]
    assert (tmp_path / "read").read_text() == repr(("go\n", "", "here"))


def test_without_the_word_it_is_ended(tmp_path):
    shard = waiter(tmp_path / "read")
    shard.kill()
    shard.close()
    assert shard._process.returncode == -signal.SIGKILL and not (tmp_path / "read").exists()


@pytest.mark.parametrize("code", ["sys.exit(1)", "time.sleep(600)"], ids=["dead", "deaf"])
def test_one_that_cannot_hear_the_word_says_so_and_is_closed(code, tmp_path):
    gone = "import os, sys, time; print('why', file=sys.stderr); os.close(0); open(sys.argv[1], 'w').close(); "
    shard = WaitingShard(python(gone + code, tmp_path / "gone"), {})
    wait_for((tmp_path / "gone").exists)
    if "exit" in code:
        shard._process.wait()
    assert not shard.go(lambda line: pytest.fail(f"told {line}"))
    assert shard._process.returncode is not None and shard._process.stderr.closed


PARENT = """
import sys, time
from kvfactory.local_shard import WaitingShard
shards = [WaitingShard([sys.executable, "-S", "-c", sys.argv[1], name], {"PLACE": "here"}) for name in sys.argv[2:]]
time.sleep(600)
"""


def test_a_killed_parent_leaves_none_behind(tmp_path):
    files = [tmp_path / "first", tmp_path / "second"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, WAITER, *files], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    wait_for(lambda: all(Path(f"{file}.loaded").exists() for file in files))
    assert not any(file.exists() for file in files)
    parent.kill()
    parent.wait()
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    assert {file.read_text() for file in files} == {repr(("", "", "here"))}


@pytest.mark.parametrize("line, want", [("go\n", True), ("", False)])
def test_a_call_that_waits_opens_its_gpu_then_reads_the_word(monkeypatch, line, want):
    opened = []

    def full(*size, device):
        opened.append(device)
        raise torch.OutOfMemoryError("the run itself says that")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", full)
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert called() and not opened  # a usual call
    monkeypatch.setenv(WAITS, "1")
    assert called() is want and opened == ["cuda"]
    assert WAITS not in os.environ  # nothing that it starts waits
