"""The run record: what it holds, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import RunRecord, differences, load_record

SETTINGS = {"method": "SnapKV", "window_size": 8, "skip": (0, 1), "model": {"path": "m", "sha256": "aa"}}
DATA = {"qasper": {"examples": 5, "sha256": "d1", "prompt_head": "You are"}}
ENVIRONMENT = {"argv": ["x"], "versions": {"torch": "2.6"}, "hardware": {}}


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results", "org/M", "512", "SnapKV+kv_head")


def started(paths, settings=SETTINGS, datasets=DATA, overwrite=False):
    record = RunRecord(paths)
    record.start(settings, ENVIRONMENT, datasets, {name: [] for name in datasets}, overwrite)
    return record


def with_results(paths, *datasets):
    for name in datasets:
        paths.results(name).parent.mkdir(parents=True, exist_ok=True)
        paths.results(name).write_text('{"_id": "a"}\n')


def test_content(paths):
    record = started(paths)
    record.note("beta is recalled")
    record.note("beta is recalled")
    record.update("qasper", truncated=1)
    record.update("qasper", truncated=3, cut=0.5)
    record.close(0)
    held = load_record(paths.meta)
    (segment,) = held.pop("segments")
    assert held == {
        "label": "SnapKV+kv_head",
        "shard": None,
        "settings": {"method": "SnapKV", "window_size": 8, "skip": [0, 1], "model": {"path": "m", "sha256": "aa"}},
        "notes": ["beta is recalled"],
        "datasets": DATA,
        "counts": {"qasper": {"truncated": 3, "cut": 0.5}},
        "replaced": [],
    }
    assert segment["start"] <= segment["end"] and segment["exit"] == 0 and segment["overwrite"] is False
    assert segment["versions"] == {"torch": "2.6"} and segment["argv"] == ["x"]
    assert [p.name for p in paths.meta.parent.iterdir()] == ["SnapKV+kv_head.json"]


def test_nothing_is_written_before_start(paths):
    record = RunRecord(paths)
    record.check(SETTINGS, DATA)
    record.close()
    assert not paths.save_dir.exists()


def test_each_start_adds_a_segment_and_a_killed_one_has_no_end(paths):
    started(paths)
    started(paths).close(75)
    first, second = load_record(paths.meta)["segments"]
    assert (first["end"], first["exit"]) == (None, None) and second["exit"] == 75
    assert first["id"] != second["id"]


def test_more_examples_and_more_datasets_are_no_change(paths):
    started(paths)
    more = {"qasper": DATA["qasper"] | {"examples": 9, "window_text": "x"}, "trec": {"examples": 2, "sha256": "d2"}}
    started(paths, datasets=more)
    assert load_record(paths.meta)["datasets"] == more
    started(paths, datasets={"trec": more["trec"]})
    assert load_record(paths.meta)["datasets"] == more


@pytest.mark.parametrize(
    "settings, datasets, phrases",
    [
        (SETTINGS | {"window_size": 32}, DATA, ["window_size: 8 on record, now 32"]),
        (SETTINGS | {"model": {"path": "m", "sha256": "bb"}}, DATA, ['model.sha256: "aa" on record, now "bb"']),
        (SETTINGS | {"new": None}, DATA, ["new: nothing on record, now null"]),
        ({k: v for k, v in SETTINGS.items() if k != "skip"}, DATA, ["skip: [0, 1] on record, now nothing"]),
        (SETTINGS, {"qasper": DATA["qasper"] | {"sha256": "d9"}}, ['qasper.sha256: "d1" on record, now "d9"']),
        (
            SETTINGS | {"window_size": 1, "method": "H2O"},
            {"qasper": DATA["qasper"] | {"prompt_head": "I am"}},
            ["window_size", 'method: "SnapKV"', "qasper.prompt_head"],
        ),
    ],
)
def test_changes_are_refused_naming_each(paths, settings, datasets, phrases):
    started(paths)
    before = paths.meta.read_bytes()
    for act in (lambda: RunRecord(paths).check(settings, datasets), lambda: started(paths, settings, datasets)):
        with pytest.raises(ValueError) as error:
            act()
        text = str(error.value)
        assert all(phrase in text for phrase in phrases), text
        assert str(paths.meta) in text and "--overwrite" in text and "\n" not in text
    assert paths.meta.read_bytes() == before


def test_results_without_a_record_are_refused(paths):
    with_results(paths, "qasper", "trec")
    with pytest.raises(ValueError, match="qasper/SnapKV.kv_head.json holds results, but .* --overwrite"):
        RunRecord(paths).check(SETTINGS, DATA)
    paths.results("qasper").unlink()
    started(paths)
    with pytest.raises(ValueError, match="trec/SnapKV"):  # a record, but without that dataset
        RunRecord(paths).check(SETTINGS, {"trec": {"examples": 1}})
    RunRecord(paths).check(SETTINGS, {"trec": {"examples": 1}}, overwrite=True)


def test_overwrite_puts_the_old_settings_aside(paths):
    record = started(paths)
    record.update("qasper", truncated=3)
    other = SETTINGS | {"window_size": 32}
    started(paths, other, {"qasper": {"examples": 5, "sha256": "d9"}}, overwrite=True)
    held = load_record(paths.meta)
    assert held["settings"]["window_size"] == 32 and held["counts"] == {}
    assert held["datasets"] == {"qasper": {"examples": 5, "sha256": "d9"}}
    (old,) = held["replaced"]
    assert old["settings"]["window_size"] == 8 and old["datasets"] == DATA
    assert [s["overwrite"] for s in held["segments"]] == [False, True]


def test_overwrite_must_not_orphan_results_of_other_datasets(paths):
    started(paths, datasets=DATA | {"trec": {"examples": 1}})
    with_results(paths, "qasper", "trec")
    other = SETTINGS | {"window_size": 32}
    with pytest.raises(ValueError, match="would leave results on trec .*window_size: 8 on record, now 32.*--datasets"):
        RunRecord(paths).check(other, DATA, overwrite=True)
    RunRecord(paths).check(SETTINGS, DATA, overwrite=True)  # the same settings: trec's record stays true
    started(paths, SETTINGS, DATA, overwrite=True)
    assert set(load_record(paths.meta)["datasets"]) == {"qasper", "trec"}
    paths.results("trec").unlink()
    started(paths, other, DATA, overwrite=True)
    assert set(load_record(paths.meta)["datasets"]) == {"qasper"}


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}', '{"settings": 1}'])
def test_a_broken_record_is_named(paths, content):
    paths.meta.parent.mkdir(parents=True)
    paths.meta.write_text(content)
    with pytest.raises(ValueError, match="SnapKV.kv_head.json"):
        RunRecord(paths).check(SETTINGS, DATA)
    with pytest.raises(ValueError, match="SnapKV.kv_head.json"):
        started(paths)
    assert paths.meta.read_text() == content


@pytest.mark.parametrize(
    "part, told",
    [
        ({"datasets": {"qasper": 1}}, "datasets has no object at 'qasper'"),
        ({"counts": {"qasper": []}}, "counts has no object at 'qasper'"),
        ({"segments": []}, "segments names no call that made its datasets"),
        *(
            ({"counts": {"qasper": {"wall_s": value}}}, "counts has no number at 'qasper', 'wall_s'")
            for value in ("3", None, True)
        ),
        *(
            ({"segments": [segment]}, "segments does not list calls with the id and the start of each")
            for segment in (7, {"id": "a"}, {"start": "2026-01-01"}, {"id": 1, "start": "2026-01-01"})
        ),
    ],
)
def test_a_record_edited_inside_is_named_and_left_alone(paths, part, told):
    started(paths)
    content = json.dumps(load_record(paths.meta) | part)
    paths.meta.write_text(content)
    for reads in (lambda: load_record(paths.meta), lambda: started(paths), lambda: RunRecord(paths).note("x")):
        with pytest.raises(ValueError, match=rf"SnapKV\+kv_head.json is broken \({told}\): delete it and its results"):
            reads()
    assert paths.meta.read_text() == content


def test_processes_on_different_datasets_share_a_record(paths):
    code = """
import sys
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import RunRecord
name = sys.argv[2]
record = RunRecord(RunPaths(sys.argv[1], "org/M", "512", "X"))
record.start({"a": 1}, {}, {name: {"examples": 1}}, {name: []})
for i in range(12):
    record.update(name, n=i)
record.close(0)
"""
    names = ["qasper", "trec", "lcc"]
    command = [sys.executable, "-c", code, str(paths.save_dir)]
    running = [subprocess.Popen([*command, name]) for name in names]
    assert [process.wait(30) for process in running] == [0, 0, 0]
    held = json.loads((paths.meta.parent / "X.json").read_text())
    assert held["counts"] == {name: {"n": 11} for name in names} and set(held["datasets"]) == set(names)
    assert [s["exit"] for s in held["segments"]] == [0, 0, 0]


def test_long_values_are_cut_where_they_part():
    (text,) = differences({"head": "a" * 300 + "OLD" + "b" * 300}, {"head": "a" * 300 + "NEW" + "b" * 300})
    assert "OLD" in text and "NEW" in text and len(text) < 250


def test_surrogates_in_a_prompt_are_recorded(paths):
    started(paths, datasets={"qasper": {"prompt_head": "\ud800é"}})
    assert load_record(paths.meta)["datasets"]["qasper"]["prompt_head"] == "\ud800é"
    RunRecord(paths).check(SETTINGS, {"qasper": {"prompt_head": "\ud800é"}})
