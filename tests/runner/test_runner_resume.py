"""Going on where a run was stopped, what it refuses to go on with, and shards."""

from __future__ import annotations

import pytest
from calls import comparable
from in_process import Runner, Watch
from tiny_checkpoint import save_checkpoint, write_dataset

from kvfactory.reports.stop import STOPPED, StopSignal
from kvfactory.runner import execute, merge


def test_a_finished_run_loads_no_model(run, monkeypatch):
    assert run("--method", "snapkv") == 0
    before = run.paths().results("trec").read_bytes()
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("loaded the model"))
    assert run("--method", "snapkv") == 0
    assert run.paths().results("trec").read_bytes() == before
    with pytest.raises(BaseException, match="loaded the model"):
        run("--method", "snapkv", "--overwrite")


def test_more_examples_extend_a_file(run):
    run("--method", "snapkv", "--max_num_examples", 1)
    first = run.rows()
    run("--method", "snapkv")
    assert run.rows()[:1] == first and len(run.rows()) == 3


def test_a_stop_between_examples_and_going_on(run, monkeypatch):
    assert run("--method", "snapkv,h2o") == 0
    expected = [comparable(run.rows(d, n)) for n in (0, 1) for d in ("hotpotqa", "trec")]
    with StopSignal() as stop:
        watch = Watch(monkeypatch, "hotpotqa/hotpotqa-1", lambda: setattr(stop, "requested", True))
        job = run.job("--method", "snapkv,h2o", "--overwrite")
        assert execute(job, stop) == STOPPED
    assert watch.seen == ["hotpotqa/hotpotqa-0", "hotpotqa/hotpotqa-1"]  # this example is finished, no other begun
    assert [row["_id"] for row in run.rows()] == ["hotpotqa-0", "hotpotqa-1"] and run.rows("trec") == []
    assert run.record()["segments"][-1]["exit"] == STOPPED
    assert run("--method", "snapkv,h2o") == 0
    assert [comparable(run.rows(d, n)) for n in (0, 1) for d in ("hotpotqa", "trec")] == expected


def test_settings_that_change_are_refused_and_overwrite_replaces(run, data):
    run("--method", "snapkv", "--run_name", "mine")
    with pytest.raises(ValueError, match="method_settings.window_size: 8 on record, now 16"):
        run("--method", "snapkv", "--run_name", "mine", "--window_size", 16)
    assert run("--method", "snapkv", "--run_name", "mine", "--window_size", 16, "--overwrite") == 0
    write_dataset(data, "trec", 2, length=41)
    with pytest.raises(ValueError, match="trec.sha256"):
        run("--method", "snapkv", "--run_name", "mine", "--window_size", 16)


def test_another_model_of_the_same_name_is_refused(run, model, data, tmp_path):
    run("--method", "snapkv")
    other = save_checkpoint(tmp_path / "other" / "Tiny", initializer_range=0.2)
    again = Runner(other, data, run.save_dir)
    with pytest.raises(ValueError, match="model.weights_sha256"):
        again("--method", "snapkv")


def test_shards_and_merge_equal_one_run(model, data, tmp_path):
    whole = Runner(model, data, tmp_path / "whole")
    assert whole("--method", "snapkv,random") == 0
    parts = Runner(model, data, tmp_path / "parts")
    argv = ("--method", "snapkv,random", "--num_shards", 2)
    assert parts(*argv, "--shard_id", 1) == 0
    assert [row["_id"] for row in parts.rows()] == ["hotpotqa-1"]
    with pytest.raises(ValueError, match="shard 0 of 2"):
        merge(parts.job(*argv, "--merge_shards"))
    assert parts(*argv, "--shard_id", 0) == 0
    parts.last = parts.job(*argv, "--merge_shards")
    assert merge(parts.last) == 0
    for number in (0, 1):
        for dataset in ("hotpotqa", "trec"):
            assert comparable(parts.rows(dataset, number)) == comparable(whole.rows(dataset, number))
        assert parts.record(number)["settings"] == whole.record(number)["settings"]
        assert parts.record(number)["datasets"] == whole.record(number)["datasets"]
    assert not list((tmp_path / "parts").rglob("*shard*"))
