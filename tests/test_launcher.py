"""--launcher: a process per GPU for the shards, kills and signals, joined files equal to those of one call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import save_checkpoint, write_dataset

import run_longbench
import run_needle_in_haystack
import run_ruler
from kvfactory import launcher, runner
from kvfactory.launcher import LocalShard, ray_places, run_shards, shard_command
from kvfactory.reports.stop import StopSignal

ROOT = Path(__file__).resolve().parents[1]
TIMINGS = ("prefill_s", "decode_s", "rows_in_flight", "peak_mem_bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def argv(model, tmp_path):
    """A call of run_longbench.py that works, as a dict of flag to value."""
    write_dataset(tmp_path / "data", "hotpotqa", 3)
    flags = {"method": "snapkv,random", "model_path": model, "data_dir": tmp_path / "data", "datasets": "hotpotqa"}
    flags |= {"save_dir": tmp_path / "out", "max_capacity_prompts": 32, "device": "cpu", "max_new_tokens": 4}
    return flags


def typed(flags, *switches):
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)] + ["--quiet", *switches]


def rows(folder):
    """{file below folder: rows without timings} of all result files."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        if path.parent.name != "meta":
            lines = [json.loads(line) for line in path.read_text().split("\n") if line]
            found[str(path.relative_to(folder))] = [{k: v for k, v in row.items() if k not in TIMINGS} for row in lines]
    return found


def shards(flags, count=2):
    return typed(flags | {"launcher": "local", "num_shards": count})


def refused(capsys, arguments, main=run_longbench.main):
    """Runs a call that must be refused -> the sentence."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1, error
    return error


# --- whole runs ------------------------------------------------------------------------------------------------------


def inline(commands, places, start, stop):
    """Shards one after the other in this process, which spares it the imports of theirs."""
    return [run_longbench.main(command[2:]) for command in commands]


def test_two_processes_equal_one_call(argv, tmp_path, capsys, monkeypatch):
    assert run_longbench.main(typed(argv | {"save_dir": tmp_path / "one"})) == 0
    table = capsys.readouterr().out
    assert run_longbench.main(shards(argv)) == 0
    out, error = capsys.readouterr()
    assert len(rows(tmp_path / "out")) == 2 and rows(tmp_path / "out") == rows(tmp_path / "one")
    assert not list((tmp_path / "out").rglob("*shard*"))
    merged, _, rest = out.partition("| method")
    assert merged.count("merged: ") == 2
    # The tables differ in seconds alone, which stand in the last column, and in the folder's name.
    cells = [[line.split("|")[1:-2] for line in text.splitlines() if "kv" in line.lower() and "|" in line]
             for text in (table, "| method" + rest)]  # fmt: skip
    assert cells[0] == cells[1] and cells[0]
    assert "[shard 0 of 2] note: " in error and "[shard 1 of 2] note: " in error
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/meta/SnapKV*.json")]
    assert sorted(segment["shard"] for segment in records[0]["segments"]) == [[0, 2], [1, 2]]
    assert [segment["hardware"]["cpu_threads"] for segment in records[0]["segments"]] == [1, 1]

    # Again, with a method more: what is there is left alone, and no shard does it again.
    monkeypatch.setattr(launcher, "run_shards", inline)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}
    assert run_longbench.main(shards(argv)) == 0
    assert run_longbench.main(shards(argv | {"method": "snapkv,l2norm"})) == 0
    assert {path: path.read_bytes() for path in before} == before and len(rows(tmp_path / "out")) == 3
    assert not list((tmp_path / "out").rglob("*shard*"))
    assert "complete already" in capsys.readouterr().err

    # --overwrite starts anew, and the record says what it replaced.
    assert run_longbench.main([*shards(argv | {"method": "snapkv"}), "--overwrite"]) == 0
    [record] = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/meta/SnapKV*.json")]
    assert len(record["replaced"]) == 1 and record["counts"]["hotpotqa"]["done"] == 3
    assert rows(tmp_path / "out") | rows(tmp_path / "one") == rows(tmp_path / "out")


def test_failed_examples_are_joined_and_told(argv, tmp_path, capsys, monkeypatch):
    argv |= {"method": "snapkv"}
    example_row = runner.example_row

    def failing(job, part, example, output, **more):
        if example.record["_id"] == "hotpotqa-1":
            raise ValueError("broken")
        return example_row(job, part, example, output, **more)

    monkeypatch.setattr(launcher, "run_shards", inline)
    monkeypatch.setattr(runner, "example_row", failing)
    assert run_longbench.main(shards(argv)) == 1
    [found] = rows(tmp_path / "out").values()
    assert [row.get("error") for row in found] == [None, "ValueError: broken", None]
    assert "| SnapKV" in capsys.readouterr().out
    monkeypatch.setattr(runner, "example_row", example_row)
    assert "holds 3 of 3 results already, 1 of them failed: go on without --launcher" in refused(capsys, shards(argv))
    assert run_longbench.main(typed(argv)) == 0
    [found] = rows(tmp_path / "out").values()
    assert not any("error" in row for row in found)


def test_shards_that_a_stop_met_before_they_began_are_no_failure(argv, tmp_path, capsys, monkeypatch):
    def stopped(commands, places, start, stop):
        stop.requested = True
        return [-signal.SIGTERM, None]  # the one was still importing, the other waited for its turn

    monkeypatch.setattr(launcher, "run_shards", stopped)
    assert run_longbench.main(shards(argv)) == 75
    out, error = capsys.readouterr()
    assert out == "" and "SIGTERM" not in error


def test_a_shard_that_gave_up_is_named(argv, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "run_shards", lambda commands, *_: inline(commands[:1], *_) + [1])
    assert run_longbench.main(shards(argv | {"method": "snapkv"})) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error.startswith("run_longbench.py: shard 1 of 2 on hotpotqa is missing") and "the same command again" in error
    )


KILLED_AFTER_ONE_ROW = """
import os, signal, sys
import run_longbench
from kvfactory.reports.records import ResultFile
append = ResultFile.append
def append_and_die(self, row):
    append(self, row)
    os.kill(os.getpid(), signal.SIGKILL)
ResultFile.append = append_and_die
sys.exit(run_longbench.main(sys.argv[1:]))
"""


def test_a_killed_shard_loses_nothing(argv, tmp_path, capsys, monkeypatch):
    argv |= {"method": "snapkv"}
    assert run_longbench.main(typed(argv | {"save_dir": tmp_path / "one"})) == 0

    def dying(program, argv, shard, count):
        command = shard_command(program, argv, shard, count)
        return [command[0], "-c", KILLED_AFTER_ONE_ROW, *command[2:]] if shard == 0 else command

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(launcher, "shard_command", dying)
    capsys.readouterr()
    assert run_longbench.main(shards(argv)) == 1
    out, error = capsys.readouterr()
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith(
        "run_longbench.py: shard 0 of 2 was ended by SIGKILL; the others are finished: give the same"
    )
    parts = rows(tmp_path / "out")
    assert sorted(len(lines) for lines in parts.values()) == [1, 1]  # of 2 and of 1
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "from a call with --num_shards 2: give that number" in refused(capsys, shards(argv, 3))
    assert run_longbench.main(shards(argv)) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "one")


def test_a_signal_stops_all_shards(argv, tmp_path):
    argv |= {"method": "snapkv", "max_new_tokens": 300}
    write_dataset(tmp_path / "data", "hotpotqa", 8)
    command = [sys.executable, ROOT / "run_longbench.py", *shards(argv)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in (tmp_path / "out").rglob("*/hotpotqa/*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 75 and out == "" and "SIGTERM: stopping after this example" in error
    done = sum(len(lines) for lines in rows(tmp_path / "out").values())
    assert 1 <= done < 8


@pytest.mark.parametrize(
    "main, flags",
    [
        (run_ruler.main, {"tasks": "niah_single_1", "lengths": "700", "num_samples": 2}),
        (run_needle_in_haystack.main, {"s_len": 700, "e_len": 700, "step": 100, "depths": "0,50"}),
    ],
    ids=["ruler", "needle"],
)
def test_the_other_runners(main, flags, argv, tmp_path, capsys):
    argv = {k: v for k, v in argv.items() if k not in ("data_dir", "datasets")} | {"method": "snapkv"} | flags
    assert main(typed(argv | {"save_dir": tmp_path / "one"})) == 0
    assert main(shards(argv)) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "one") and rows(tmp_path / "out")
    assert capsys.readouterr().out.count("| method") == 2
    pictures = [
        sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*.png")) for name in ("out", "one")
    ]
    assert pictures[0] == pictures[1]


def test_one_shard_runs_here(argv, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "run_shards", lambda *a: pytest.fail("started processes"))
    assert run_longbench.main(typed(argv | {"launcher": "local"})) == 0  # no GPU: one shard unless asked for more
    assert len(rows(tmp_path / "out")) == 2


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, switches, told",
    [
        ({"num_shards": 2, "shard_id": 0}, (), "--launcher local runs and joins all shards: leave --shard_id out"),
        ({"num_shards": 2}, ("--merge_shards",), "leave --merge_shards out"),
        ({"num_shards": 0}, (), "--num_shards 0 must be at least 1"),
        ({"num_shards": 4}, (), "--num_shards 4 is more than the 3 examples of the largest dataset"),
        ({"device_map": "balanced"}, (), "--launcher local gives each shard one GPU, so --device_map balanced has"),
        ({"launcher": "locall"}, (), "unknown launcher 'locall'"),
        ({"launcher": "none", "num_shards": 2}, (), "needs --shard_id, from 0 to 1, or --launcher local"),
        ({"launcher": "none", "device_map": "balanced"}, (), "--device_map balanced spreads the model over CUDA"),
        ({"launcher": "none", "device_map": "/no/such/map"}, (), "--device_map /no/such/map is neither"),
    ],
)
def test_bad_arguments_write_nothing(argv, capsys, tmp_path, monkeypatch, changes, switches, told):
    monkeypatch.setattr(launcher, "run_shards", lambda *a: pytest.fail("started processes"))
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("loaded weights"))
    assert told in refused(capsys, [*typed(argv | {"launcher": "local"} | changes), *switches])
    assert not (tmp_path / "out").exists()


def test_results_of_an_undivided_call_are_not_mixed_with_shards(argv, tmp_path, capsys):
    argv |= {"method": "snapkv"}
    assert run_longbench.main(typed(argv)) == 0
    [file] = (tmp_path / "out").glob("*/hotpotqa/*.json")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    error = refused(capsys, shards(argv))
    assert f"{file} holds 2 of 3 results already, 0 of them failed: go on without --launcher" in error


def test_a_model_for_several_gpus_is_refused(argv, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "is_spread", lambda places: True)
    assert "this model needs several: leave it out" in refused(capsys, shards(argv))


# --- processes and places --------------------------------------------------------------------------------------------


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


def test_ray_is_refused_where_it_cannot_be(argv, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", fake_ray(0, []))
    with pytest.raises(ValueError, match="its cluster has no GPU"):
        ray_places("cuda", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    error = refused(capsys, typed(argv | {"launcher": "ray"}))
    assert "--launcher ray needs the package ray (pip install ray)" in error
