"""The safe sequence of a run's files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvfactory.reports.files import FileInUse
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import load_record

ORDERS = {"qasper": ["a", "b"], "trec": ["c"]}
DATA = {name: {"examples": len(order), "sha256": name} for name, order in ORDERS.items()}


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results", "org/M", "512", "SnapKV")


def whole_run(paths, value=1, overwrite=False, settings=None):
    with Run(paths, ORDERS, overwrite) as run:
        run.start(settings or {"window": 8}, {}, DATA)
        for name, results in run.results.items():
            for i in ORDERS[name]:
                if i not in results.done:
                    results.append({"_id": i, "n": value})
            results.close()
        run.exit_code = 0
    return run


def test_a_run_and_its_repetition(paths):
    run = whole_run(paths)
    assert run.complete and run.failed == 0
    assert paths.results("qasper").read_text() == '{"_id": "a", "n": 1}\n{"_id": "b", "n": 1}\n'
    whole_run(paths, value=2)
    assert paths.results("qasper").read_text() == '{"_id": "a", "n": 1}\n{"_id": "b", "n": 1}\n'
    assert [s["exit"] for s in load_record(paths.meta)["segments"]] == [0, 0]
    assert not list(paths.save_dir.rglob("*.lock"))


def test_refusals_write_nothing(paths):
    with pytest.raises(ValueError), Run(paths, ORDERS) as run:
        run.check({"x": float("nan")}, DATA)
    assert not paths.save_dir.exists()
    whole_run(paths)
    before = {p: p.read_bytes() for p in paths.save_dir.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="window: 8 on record, now 32"), Run(paths, ORDERS) as run:
        run.start({"window": 32}, {}, DATA)
    with Run(paths, {"trec": ORDERS["trec"]}) as other:
        with pytest.raises(FileInUse, match="trec"):
            Run(paths, ORDERS, overwrite=True)
        Run(paths, {"qasper": ORDERS["qasper"]}).close()  # given up by the refused run
    assert other.exit_code is None
    assert {p: p.read_bytes() for p in paths.save_dir.rglob("*") if p.is_file()} == before


def test_overwrite_removes_all_old_results_before_the_first_row(paths):
    """Else a run killed in its first dataset leaves the last one's old rows, which a resume takes for its own."""
    whole_run(paths)
    code = """
import os, sys
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
run = Run(RunPaths(sys.argv[1], "org/M", "512", "SnapKV"), {"qasper": ["a", "b"], "trec": ["c"]}, overwrite=True)
run.start({"window": 32}, {}, {name: {"examples": 9, "sha256": name} for name in run.results})
run.results["qasper"].append({"_id": "a", "n": 2})
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(paths.save_dir)]).returncode == -9
    assert not paths.results("trec").exists()
    whole_run(paths, value=3, settings={"window": 32})
    assert paths.results("qasper").read_text() == '{"_id": "a", "n": 2}\n{"_id": "b", "n": 3}\n'
    assert paths.results("trec").read_text() == '{"_id": "c", "n": 3}\n'


def test_exception_closes_everything(paths):
    with pytest.raises(RuntimeError), Run(paths, ORDERS) as run:
        run.start({"window": 8}, {}, DATA)
        run.results["qasper"].append({"_id": "b"})
        run.results["qasper"].append({"_id": "a"})
        raise RuntimeError
    assert paths.results("qasper").read_text() == '{"_id": "a"}\n{"_id": "b"}\n'
    (segment,) = load_record(paths.meta)["segments"]
    assert segment["end"] is not None and segment["exit"] is None


def test_one_file_that_cannot_be_closed_does_not_keep_the_others_open(paths, monkeypatch):
    with Run(paths, ORDERS) as run:
        run.start({"window": 8}, {}, DATA)
        run.results["trec"].append({"_id": "c"})

        def broken():
            raise OSError("gone")

        monkeypatch.setattr(run.results["trec"], "_sync", broken)
        with pytest.raises(OSError, match="gone"):
            run.close()
    Run(paths, ORDERS).close()


def test_notices_and_failures_are_gathered(paths):
    whole_run(paths)
    with open(paths.results("trec"), "ab") as file:
        file.write(b'{"_id')
    with Run(paths, ORDERS) as run:
        assert len(run.notices) == 1 and str(paths.results("trec")) in run.notices[0]
        assert run.complete
    os.unlink(paths.results("trec"))
    with Run(paths, ORDERS) as run:
        run.start({"window": 8}, {}, DATA)
        run.results["trec"].append({"_id": "c", "error": "x"})
        assert not run.complete and run.failed == 1


def test_refused_overwrite_discards_nothing(paths):
    whole_run(paths)
    before = paths.results("qasper").read_bytes()
    with pytest.raises(ValueError, match="would leave results on trec"):
        with Run(paths, {"qasper": ORDERS["qasper"]}, overwrite=True) as run:
            run.start({"window": 32}, {}, {"qasper": DATA["qasper"]})
    assert paths.results("qasper").read_bytes() == before
