"""--resume force with the runner: kills, shards, the launcher, and what is told about results that were mixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import comparable, refused, refused_early, rows, typed
from in_process import Runner
from killing import kill_inside_row
from tiny_checkpoint import save_checkpoint, write_dataset

import run_longbench
from kvfactory.reports.eval_files import find_runs
from kvfactory.reports.eval_tables import score_run
from kvfactory.runner import merge
from kvfactory.summary import summary

ONE, TWO = ("--method", "snapkv", "--run_name", "mine"), ("--window_size", "16")


@pytest.fixture
def argv(model, data, tmp_path):
    flags = {"method": "snapkv", "run_name": "mine", "model_path": model, "data_dir": data, "device": "cpu"}
    flags |= {"datasets": "hotpotqa,trec", "max_capacity_prompts": 32, "max_new_tokens": 5, "quiet": None}
    return flags | {"save_dir": tmp_path / "out"}


def apart(record):
    return [entry["rows"] for entry in record.get("made_otherwise", [])]


def test_it_goes_on_where_auto_refuses_and_keeps_what_was_there(run, capsys):
    assert run(*ONE, "--max_num_examples", 1) == 0
    first = run.rows()
    with pytest.raises(ValueError, match="window_size: 8 on record, now 16.*mix them with --resume force"):
        run(*ONE, *TWO)
    assert run(*ONE, *TWO, "--resume", "force") == 0
    changed = "(method_settings.window_size: 8 on record, now 16; hotpotqa.window_t"
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "--resume force" in line]
    assert note.startswith("note: --resume force goes on with ") and changed in note
    mixed, record = run.rows(), run.record()
    assert mixed[:1] == first and apart(record) == [{"hotpotqa": ["hotpotqa-0"], "trec": ["trec-0"]}]
    assert record["settings"]["method_settings"]["window_size"] == 16
    assert record["made_otherwise"][0]["settings"]["method_settings"]["window_size"] == 8
    assert record["made_otherwise"][0]["segments"] == [record["segments"][0]["id"]]
    assert run(*ONE, *TWO) == 0  # auto again: the settings are those on record
    told = "results mixed by --resume force: 1 of hotpotqa, 1 of trec were made with other settings or data ("
    assert f"mine at budget 512: {told}" in summary(run.last) and changed in summary(run.last)
    (table,) = map(score_run, find_runs(run.save_dir))
    assert any(n.startswith("mine: results mixed by --resume force: 1 of hotpotqa") for n in table.notes)
    run("--method", "snapkv", *TWO, "--run_name", "other")
    assert comparable(mixed[1:]) == comparable(run.rows()[1:])


def test_finished_results_stay_theirs(run, capsys, monkeypatch):
    assert run(*ONE) == 0
    files = {path: path.read_bytes() for path in run.save_dir.rglob("*.json")}
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("loaded the model"))
    assert run(*ONE, *TWO, "--resume", "force") == 0
    assert {path: path.read_bytes() for path in run.save_dir.rglob("*.json")} == files
    assert "nothing is left to do, all results are there with other settings" in capsys.readouterr().err


def test_another_model_and_other_data_are_let_through_too(run, data, tmp_path):
    run("--method", "snapkv", "--max_num_examples", 1)
    other = save_checkpoint(tmp_path / "other" / "Tiny", initializer_range=0.2)
    write_dataset(data, "trec", 2, length=41)
    again = Runner(other, data, run.save_dir)
    assert again("--method", "snapkv", "--resume", "force") == 0
    (entry,) = again.record()["made_otherwise"]
    assert entry["settings"]["model"]["weights_sha256"] != again.record()["settings"]["model"]["weights_sha256"]
    assert entry["datasets"]["trec"]["sha256"] != again.record()["datasets"]["trec"]["sha256"]
    assert len(again.rows()) == 3 and len(again.rows("trec")) == 2


def test_without_differences_force_is_auto(run):
    run(*ONE, "--max_num_examples", 1)
    assert run(*ONE, "--resume", "force") == 0 and "made_otherwise" not in run.record()
    assert run(*ONE, "--overwrite", "--resume", "auto") == 0


def test_it_does_not_go_with_overwrite_nor_accept_other_words(argv, capsys, monkeypatch, tmp_path):
    error = refused_early(
        capsys, run_longbench.main, typed(argv, "--resume", "force", "--overwrite"), monkeypatch, tmp_path / "out"
    )
    assert "--resume force goes on with what is there and --overwrite discards it" in error
    assert "--resume" in refused(capsys, run_longbench.main, typed(argv, "--resume", "always"))


def test_a_forced_run_that_is_killed_goes_on_and_ends_as_one_that_was_not(argv, tmp_path):
    """Killed under the first settings inside row 2, and under the second inside its own row 2."""
    for folder, kills in (("whole", False), ("out", True)):
        flags = argv | {"save_dir": tmp_path / folder}
        if kills:
            kill_inside_row("run_longbench", "input", 2, typed(flags))
            kill_inside_row("run_longbench", "input", 2, typed(flags, *TWO, "--resume", "force"))
        else:
            assert run_longbench.main(typed(flags | {"max_num_examples": 1, "datasets": "hotpotqa"})) == 0
            assert run_longbench.main(typed(flags, *TWO, "--resume", "force")) == 0
    assert run_longbench.main(typed(argv, *TWO)) == 0  # what force has put on record needs no force any more
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    for folder in ("whole", "out"):
        (meta,) = (tmp_path / folder).rglob("meta/mine.json")
        assert apart(json.loads(meta.read_text())) == [{"hotpotqa": ["hotpotqa-0"]}]


def test_shards_made_otherwise_are_joined_by_force(run, capsys):
    flags = (*ONE, "--num_shards", 2)
    assert run(*flags, "--shard_id", 0) == 0
    assert run(*flags, *TWO, "--shard_id", 1) == 0
    with pytest.raises(ValueError, match="not made alike .*only with --resume force"):
        merge(run.job(*flags, *TWO, "--merge_shards"))
    run.last = run.job(*flags, *TWO, "--merge_shards", "--resume", "force")
    assert merge(run.last) == 0
    listed = apart(run.record())
    assert listed in (
        [{"hotpotqa": ["hotpotqa-1"], "trec": ["trec-1"]}],
        [{"hotpotqa": ["hotpotqa-0", "hotpotqa-2"], "trec": ["trec-0"]}],
    )
    # the settings are those of the shard begun last; within one second both are
    assert "results mixed by --resume force" in summary(run.last) and len(run.rows()) == 3


def test_the_launcher_forces_its_shards_and_joins_them(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shard = argv | {"num_shards": 2, "shard_id": 0}
    assert run_longbench.main(typed(shard)) == 0
    launched = typed(argv | {"launcher": "local", "num_shards": 2}, *TWO)
    assert run_longbench.main([*launched, "--resume", "force"]) == 0
    (meta,) = Path(tmp_path / "out").rglob("meta/mine.json")
    record = json.loads(meta.read_text())
    assert record["settings"]["method_settings"]["window_size"] == 16
    assert apart(record) == [{"hotpotqa": ["hotpotqa-0", "hotpotqa-2"], "trec": ["trec-0"]}]
    assert "results mixed by --resume force: 2 of hotpotqa, 1 of trec" in capsys.readouterr().out
