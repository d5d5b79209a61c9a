"""A process per GPU for the shards: queues, signals, what is told of failures, and Ray's actors instead."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from kvfactory import launcher
from kvfactory.launcher import LocalShard, early_shards, ray_places, run_shards, shard_command
from kvfactory.reports.stop import StopSignal
from kvfactory.suites.longbench import LongBenchSettings

ROOT = Path(__file__).resolve().parents[1]


def python(code, *arguments):
    return [sys.executable, "-S", "-c", code, *map(str, arguments)]


def test_each_place_works_through_the_queue_one_at_a_time(tmp_path, capsys):
    code = """
import os, sys, time
place = os.environ["PLACE"]
open(place + ".busy", "x").close()  # fails while another shard is there
time.sleep(0.2)
os.remove(place + ".busy")
print(place, file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
    places = [{"PLACE": str(tmp_path / name)} for name in "ab"]
    with StopSignal() as stop:
        codes = run_shards([python(code, k % 2) for k in range(5)], places, LocalShard, stop)
    assert codes == [0, 1, 0, 1, 0]
    lines = sorted(capsys.readouterr().err.splitlines())
    assert [line[:14] for line in lines] == [f"[shard {k} of 5]" for k in range(5)]
    assert {line[15:] for line in lines} == {str(tmp_path / "a"), str(tmp_path / "b")}


STUBBORN = """
import signal, sys, time
count = 0
def handle(*_):
    global count
    count += 1
    print("asked", count, file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, handle)
print("ready", file=sys.stderr, flush=True)
while count < int(sys.argv[1]):
    time.sleep(0.02)
sys.exit(75)
"""


def test_a_terminals_interrupt_reaches_a_shard_through_us_alone(capsys):
    code = "import os, sys; print(os.getsid(0) == os.getpid() == os.getpgid(0), file=sys.stderr)"
    with StopSignal() as stop:
        assert run_shards([python(code)], [{}], LocalShard, stop) == [0]
    assert capsys.readouterr().err == "[shard 0 of 1] True\n"


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_are_passed_on_and_nothing_new_begins(signals, capsys):
    seen = []

    class Watched(LocalShard):
        def __init__(self, command, environ, emit):
            def watch(line):
                emit(line)
                seen.append(line)
                if line in ("ready", "asked 1")[:signals]:
                    os.kill(os.getpid(), signal.SIGINT)

            super().__init__(command, environ, watch)

    commands = [python(STUBBORN, signals), python("raise SystemExit(0)")]
    with StopSignal() as stop:
        codes = run_shards(commands, [{}], Watched, stop)
    assert codes == [75, None] and seen == ["ready", "asked 1", "asked 2"][: 1 + signals]


def test_no_process_is_left_when_one_cannot_be_started(capsys):
    began = []

    class Watched(LocalShard):
        def __init__(self, *how):
            super().__init__(*how)
            began.append(self)

    with StopSignal() as stop, pytest.raises(OSError):
        run_shards([python("import time; time.sleep(60)"), ["/no/such/program"]], [{}, {}], Watched, stop)
    assert [shard.poll() for shard in began] == [-signal.SIGTERM]


@pytest.mark.parametrize(
    "codes, code, told",
    [
        ({1: 2}, 2, "shard 1 of 3 was refused (see above); the others are finished: give the same command"),
        ({0: 2, 1: 1}, 1, "shard 0 of 3 was refused (see above), shard 1 of 3 ended with exit code 1; the others"),
        ({0: 75}, 75, "shard 0 of 3 was stopped"),
        (
            {0: -9, 1: -11, 2: 2},
            1,
            "shard 1 of 3 was ended by SIGSEGV, shard 2 of 3 was refused (see above); what they",
        ),
    ],
)
def test_how_failed_shards_are_told(codes, code, told):
    assert told in launcher._sentence(codes, 3) and launcher._code(list(codes.values())) == code


@pytest.mark.parametrize("visible, want", [(None, "01"), ("3,1", "31"), ("GPU-a, GPU-b,-1", None)])
def test_a_place_per_visible_gpu(monkeypatch, visible, want):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    places, start = launcher.local_places("cuda", 5)
    assert [p["CUDA_VISIBLE_DEVICES"] for p in places] == (list(want) if want else ["GPU-a", "GPU-b"])
    assert start is LocalShard


def test_threads_are_shared_out_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    assert launcher.local_places("cpu", 4)[0] == [{"OMP_NUM_THREADS": "1"}] * 4  # the fixture's wish
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launcher.local_places("cpu", 4)[0] == [{"OMP_NUM_THREADS": "2"}] * 4
    assert len(launcher.local_places("cpu", None)[0]) == 1


def test_the_command_of_a_shard_leaves_out_what_is_the_launchers():
    argv = ["--method", "snapkv", "--launcher", "local", "--num_shards=7", "--quiet", "--launcher=local"]
    command = shard_command("run_ruler.py", argv, 1, 3)
    assert command[1:] == [str(ROOT / "run_ruler.py"), "--method", "snapkv", "--quiet", "--num_shards", "3",
                           "--shard_id", "1"]  # fmt: skip


class Recorded:
    """In place of a shard that waits."""

    made: list[Recorded]

    def __init__(self, command, environ):
        self.started, self.ended = (command[2:], dict(environ)), []
        self.made.append(self)

    def kill(self):
        self.ended.append("kill")

    def close(self):
        self.ended.append("close")


@pytest.fixture
def recorded(monkeypatch):
    """Two pretended GPUs, and what is started early for them; CUDA itself, whose start takes seconds, is not asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launcher, "WaitingShard", Recorded)
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    return Recorded.made


def settings(**changes):
    return LongBenchSettings(**{"method": ("SnapKV",), "model_path": "m", "launcher": "Local"} | changes)


@pytest.mark.parametrize("asked, count", [(None, 2), (2, 2), (5, 5)])
def test_a_shard_per_gpu_starts_early_with_the_command_that_is_run_later(recorded, asked, count):
    argv = ["--method", "SnapKV"]
    with early_shards(settings(num_shards=asked), argv) as early:
        commands = [shard_command("run_longbench.py", argv, k, count) for k in range(count)]
        assert list(early) == [tuple(command) for command in commands[:2]]
        begun = early.pop(tuple(commands[1]))
    assert [shard.started for shard in recorded] == [
        (command[2:], {"CUDA_VISIBLE_DEVICES": str(k)}) for k, command in enumerate(commands[:2])
    ]
    assert recorded[0].ended == ["kill", "close"] and begun is recorded[1] and begun.ended == []


@pytest.mark.parametrize(
    "changes",
    [{"launcher": "none"}, {"launcher": "ray"}, {"device": "cpu"}, {"num_shards": 1}],
)
def test_nothing_starts_early_where_it_is_of_no_use(recorded, changes):
    with early_shards(settings(**changes), []) as early:
        assert early == {}
    assert recorded == []


def test_nothing_starts_early_without_several_gpus(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with early_shards(settings(), []) as early:
        assert early == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with early_shards(settings(num_shards=2), []) as early:
        assert early == {}
    assert recorded == []


def test_wrong_arguments_start_nothing(recorded):
    with pytest.raises(ValueError, match="leave --shard_id out"), early_shards(settings(shard_id=0), []):
        pytest.fail("went on")
    assert recorded == []


# --- Ray, by a stand-in for its package ------------------------------------------------------------------------------


class ActorLost(Exception):
    pass


def fake_ray(gpus, made):
    """What we call of Ray, without processes of its own; `made` collects (options, host) of the actors."""

    class Method:
        def __init__(self, call):
            self.remote = call

    class Actor:
        def __init__(self, host):
            self.host = host
            self.poll, self.stop = Method(host.poll), Method(host.stop)

    def remote(**options):
        def wrap(kind):
            def make(*arguments):
                actor = Actor(kind(*arguments))
                made.append((options, actor))
                return actor

            return types.SimpleNamespace(remote=make)

        return wrap

    ray = types.ModuleType("ray")
    ray.__spec__ = types.SimpleNamespace()
    ray.is_initialized, ray.init = (lambda: False), (lambda **_: None)
    ray.cluster_resources = lambda: {"CPU": 4.0, **({"GPU": float(gpus)} if gpus else {})}
    ray.remote, ray.get, ray.kill = remote, (lambda result: result), (lambda actor: None)
    ray.exceptions = types.SimpleNamespace(RayActorError=ActorLost)
    return ray


def test_ray_runs_shards_as_actors(monkeypatch, capsys):
    made = []
    monkeypatch.setitem(sys.modules, "ray", fake_ray(2, made))
    places, start = ray_places("cuda", None)
    assert len(places) == 2
    commands = [python("import sys; print('here', file=sys.stderr); sys.exit(1)"), python(""), python("")]
    with StopSignal() as stop:
        assert run_shards(commands, places, start, stop) == [1, 0, 0]
    assert [options for options, _ in made] == [{"num_gpus": 1, "num_cpus": 1}] * 3
    assert "[shard 0 of 3] here" in capsys.readouterr().err
    assert len(ray_places("cpu", 3)[0]) == 3


def test_a_lost_actor_is_a_failed_shard_and_signals_reach_the_others(monkeypatch, capsys):
    made = []
    monkeypatch.setitem(sys.modules, "ray", fake_ray(2, made))
    places, start = ray_places("cuda", None)
    with StopSignal() as stop:

        def lose():
            while len(made) < 2:
                time.sleep(0.01)

            def lost():
                raise ActorLost("node went away")

            made[0][1].poll.remote = lost
            while "ready" not in capsys.readouterr().err:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=lose)
        thread.start()
        codes = run_shards([python("import time; time.sleep(1)"), python(STUBBORN, 1)], places, start, stop)
        thread.join()
    assert codes == [-9, 75]


def test_ray_is_refused_where_its_cluster_has_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", fake_ray(0, []))
    with pytest.raises(ValueError, match="its cluster has no GPU"):
        ray_places("cuda", None)
