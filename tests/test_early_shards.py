"""--launcher local on GPUs: shards that are started while the call is prepared, and calls that do not need them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from calls import rows, typed
from tiny_checkpoint import save_checkpoint, write_dataset

import run_longbench
from kvfactory import launcher, main
from kvfactory.launcher import LocalShard, shard_command

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture
def argv(model, tmp_path, monkeypatch):
    """A call with --launcher that works, as a dict of flag to value."""
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_dataset(tmp_path / "data", "hotpotqa", 3)
    flags = {"method": "snapkv", "model_path": model, "data_dir": tmp_path / "data", "datasets": "hotpotqa"}
    flags |= {"save_dir": tmp_path / "out", "max_capacity_prompts": 32, "max_new_tokens": 4}
    return flags | {"launcher": "local", "quiet": None}


WAITER = """
import os, sys
open(os.path.join(os.environ["WAITING"], str(os.getpid())), "w").close()
sys.exit(0 if sys.stdin.readline() else 7)
"""
WATCHED = """
import os, sys
import run_longbench
class Stdin:
    def readline(self):
        open(os.path.join(os.environ["WAITING"], str(os.getpid())), "w").close()
        return sys.__stdin__.readline()
sys.stdin = Stdin()
sys.exit(run_longbench.main(sys.argv[1:]))
"""


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """Two GPUs that are counted but cannot be used: the run is on the CPU -> the processes that have begun to wait."""
    (tmp_path / "waiting").mkdir()
    monkeypatch.setenv("WAITING", str(tmp_path / "waiting"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return lambda: [int(path.name) for path in (tmp_path / "waiting").iterdir()]


def replaced(monkeypatch, script):
    """Shards are this script's processes instead."""

    def command(program, argv, shard, count):
        return [sys.executable, "-c", script, *shard_command(program, argv, shard, count)[2:]]

    monkeypatch.setattr(launcher, "shard_command", command)


def before_preparing(monkeypatch, happens):
    prepare = main.prepare

    def later(*arguments):
        happens()
        return prepare(*arguments)

    monkeypatch.setattr(main, "prepare", later)


def wait_for(happened, seconds=120):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.02)


def test_shards_wait_while_the_call_is_prepared_and_then_do_the_same(argv, tmp_path, capsys, monkeypatch, two_gpus):
    assert run_longbench.main(typed(argv | {"launcher": "none", "save_dir": tmp_path / "one", "device": "cpu"})) == 0
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    replaced(monkeypatch, WATCHED)
    monkeypatch.setattr(launcher, "LocalShard", lambda *_: pytest.fail("started anew"))
    there = sorted(tmp_path.rglob("*"))

    def wait():
        wait_for(lambda: len(two_gpus()) == 2)
        time.sleep(0.5)  # nothing more may come
        assert [p for p in sorted(tmp_path.rglob("*")) if p.parent != tmp_path / "waiting"] == there

    before_preparing(monkeypatch, wait)
    capsys.readouterr()
    assert run_longbench.main(typed(argv | {"num_shards": 2})) == 0
    error = capsys.readouterr().err
    assert "[shard 0 of 2] note: " in error and "[shard 1 of 2] note: " in error
    assert rows(tmp_path / "out") == rows(tmp_path / "one") and len(rows(tmp_path / "out")) == 1


def test_a_waiting_shard_that_dies_is_started_anew(argv, tmp_path, monkeypatch, two_gpus):
    replaced(monkeypatch, WAITER)
    anew = []

    class Anew(LocalShard):
        def __init__(self, command, environ, emit):
            anew.append(command[-1])
            super().__init__([sys.executable, "-c", ""], environ, emit)

    monkeypatch.setattr(launcher, "LocalShard", Anew)
    monkeypatch.setattr(launcher, "merge", lambda *_: 0)
    monkeypatch.setattr(main, "summary", lambda job: "")

    def die():
        wait_for(lambda: len(two_gpus()) == 2)
        os.kill(two_gpus()[0], signal.SIGKILL)
        time.sleep(0.2)

    before_preparing(monkeypatch, die)
    assert run_longbench.main(typed(argv | {"num_shards": 2})) == 0
    assert len(anew) == 1


@pytest.mark.parametrize("count, asked", [(None, set()), (2, set()), (1, {0})])
def test_the_call_makes_no_context_on_the_gpus_of_its_shards(argv, monkeypatch, count, asked):
    seen = set()

    def free(index):
        seen.add(index)
        return 2**40, 2**40

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "pretended")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=2**40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(launcher, "WaitingShard", lambda *_: Mock())
    monkeypatch.setattr(main, "launch", lambda job, *_: 75)
    assert run_longbench.main(typed(argv | {"num_shards": count} if count else argv)) == 75
    assert seen == asked


def refuse():
    raise ValueError("refused while preparing")


@pytest.mark.parametrize(
    "happens, changes, code",
    [
        (refuse, {}, 2),
        (lambda: None, {"num_shards": 4}, 2),  # refused by launch
        (lambda: os.kill(os.getpid(), signal.SIGTERM), {}, 75),
        (lambda: os.kill(os.getpid(), signal.SIGINT), {}, 75),
    ],
    ids=["refused", "too many", "SIGTERM", "SIGINT"],
)
def test_no_waiting_shard_outlives_a_call_that_does_not_run(
    argv, tmp_path, capsys, monkeypatch, two_gpus, happens, changes, code
):
    replaced(monkeypatch, WAITER)

    def wait():
        wait_for(lambda: len(two_gpus()) == 2)
        happens()

    before_preparing(monkeypatch, wait)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert run_longbench.main(typed(argv | {"num_shards": 2} | changes)) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.count("\n") == (code == 2)
    for process in two_gpus():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not (tmp_path / "out").exists()
