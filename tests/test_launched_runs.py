"""--launcher: joined files equal to those of one call, kills and signals, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calls import refused, rows, typed, wait_for_row
from tiny_checkpoint import save_checkpoint, write_dataset

import run_longbench
import run_needle_in_haystack
import run_ruler
from kvfactory import launcher, runner
from kvfactory.launcher import shard_command

ROOT = Path(__file__).resolve().parents[1]


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
    return flags | {"quiet": None}


def shards(flags, count=2):
    return typed(flags | {"launcher": "local", "num_shards": count})


# --- whole runs


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
    assert "holds 3 of 3 results already, 1 of them failed: go on without --launcher" in refused(
        capsys, run_longbench.main, shards(argv)
    )
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
    assert error.startswith("run_longbench.py: shard 1 of 2 on hotpotqa is missing")
    assert "the same command again" in error


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
    assert "from a call with --num_shards 2: give that number" in refused(capsys, run_longbench.main, shards(argv, 3))
    assert run_longbench.main(shards(argv)) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "one")


def test_a_signal_stops_all_shards(argv, tmp_path):
    argv |= {"method": "snapkv", "max_new_tokens": 300}
    write_dataset(tmp_path / "data", "hotpotqa", 8)
    command = [sys.executable, ROOT / "run_longbench.py", *shards(argv)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_row(process, tmp_path / "out")
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


# --- refusals


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
    assert told in refused(capsys, run_longbench.main, [*typed(argv | {"launcher": "local"} | changes), *switches])
    assert not (tmp_path / "out").exists()


def test_results_of_an_undivided_call_are_not_mixed_with_shards(argv, tmp_path, capsys):
    argv |= {"method": "snapkv"}
    assert run_longbench.main(typed(argv)) == 0
    [file] = (tmp_path / "out").glob("*/hotpotqa/*.json")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    error = refused(capsys, run_longbench.main, shards(argv))
    assert f"{file} holds 2 of 3 results already, 0 of them failed: go on without --launcher" in error


def test_a_model_for_several_gpus_is_refused(argv, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "is_spread", lambda places: True)
    assert "this model needs several: leave it out" in refused(capsys, run_longbench.main, shards(argv))


def test_ray_is_refused_where_it_is_not_installed(argv, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    error = refused(capsys, run_longbench.main, typed(argv | {"launcher": "ray"}))
    assert "--launcher ray needs the package ray (pip install ray)" in error
