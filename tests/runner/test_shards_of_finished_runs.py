"""A shard of a run whose undivided files are complete, under other settings than theirs."""

from __future__ import annotations

import pytest

from kvfactory.summary import summary

ONE = ("--method", "snapkv", "--run_name", "mine")
SHARD = (*ONE, "--window_size", 16, "--num_shards", 2, "--shard_id", 0)


def test_auto_refuses_and_force_tells_that_nothing_is_left_to_do(run, capsys, monkeypatch):
    assert run(*ONE) == 0
    files = {path: path.read_bytes() for path in run.save_dir.rglob("*.json")}
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="mine.json was made with other settings .*window_size: 8 on record, now 16"):
        run(*SHARD)
    capsys.readouterr()
    assert run(*SHARD, "--resume", "force") == 0
    told = capsys.readouterr().err
    assert "all results are there with other settings (method_settings.window_size: 8 on record, now 16" in told
    assert "the undivided run's files are complete already" in told
    assert summary(run.last).splitlines()[-1].startswith("score again: python eval.py")  # there is nothing to join
    assert {path: path.read_bytes() for path in run.save_dir.rglob("*.json")} == files
