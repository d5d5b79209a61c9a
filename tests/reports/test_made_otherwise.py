"""--resume force: what the run record keeps of rows that were made otherwise, in one run and in joined shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfactory.reports.eval_files import read_run
from kvfactory.reports.files import FileInUse
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import RunRecord, load_record, mixture
from kvfactory.reports.shards import merge_shards, shard_share

ORDERS = {"qasper": [f"q{i}" for i in range(6)], "trec": ["t0", "t1"]}
A, B, C = ({"window": n} for n in (8, 16, 32))


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results", "org/M", "512", "SnapKV")


def run(paths, settings, make, *, data=None, force=True, overwrite=False, names=("qasper", "trec")):
    """Adds rows for the `_id`s of `make`; `data` gives datasets another hash than theirs."""
    orders = {name: shard_share(ORDERS[name], paths.shard) for name in names}
    with Run(paths, orders, overwrite, force) as files:
        facts = {name: {"examples": len(orders[name]), "sha256": (data or {}).get(name, "d")} for name in names}
        changed = files.check(settings, facts)
        files.start(settings, {"argv": []}, facts)
        for results in files.results.values():
            for i in set(results.order) & set(make):
                results.append({"_id": i, "error": "x"} if i == "q5" else {"_id": i, "pred": str(settings)})
        files.exit_code = 0
    return changed


def held(paths):
    record = load_record(paths.meta)
    return record["settings"], [(e["settings"], e["rows"]) for e in record.get("made_otherwise", [])]


def test_rows_before_are_listed_with_their_settings(paths):
    run(paths, A, ["q1", "q0", "t0"], force=False)
    with pytest.raises(ValueError, match="window: 8 on record, now 16.*--resume force"):
        run(paths, B, ["q2"], force=False)
    assert "made_otherwise" not in load_record(paths.meta)
    assert run(paths, B, ["q2", "q5"]) == ["window: 8 on record, now 16"]  # q5 fails, so it is to be made again
    assert held(paths) == (B, [(A, {"qasper": ["q0", "q1"], "trec": ["t0"]})])
    assert run(paths, B, ["q3"]) == [] and run(paths, B, ["t1"], force=False) == []
    assert run(paths, C, ["q4"]) == ["window: 16 on record, now 32"]
    assert held(paths) == (
        C,
        [(A, {"qasper": ["q0", "q1"], "trec": ["t0"]}), (B, {"qasper": ["q2", "q3"], "trec": ["t1"]})],
    )
    record = load_record(paths.meta)
    first, *_, last = [s["id"] for s in record["segments"]]
    assert [e["segments"][0] for e in record["made_otherwise"]] == [first, first]
    assert record["made_otherwise"][0]["segments"] == [first] and last not in record["made_otherwise"][1]["segments"]
    assert record["replaced"] == [] and set(record["datasets"]) == {"qasper", "trec"}
    with pytest.raises(ValueError, match="window: 32 on record, now 8"):
        run(paths, A, [], force=False)


def test_data_that_changed_set_only_its_own_rows_apart(paths):
    run(paths, A, ["q0", "t0"])
    assert run(paths, A, ["q1"], data={"qasper": "new"}) == ['qasper.sha256: "d" on record, now "new"']
    record = load_record(paths.meta)
    (entry,) = record["made_otherwise"]
    assert entry["rows"] == {"qasper": ["q0"]} and entry["datasets"] == {"qasper": {"examples": 6, "sha256": "d"}}
    assert record["datasets"]["qasper"]["sha256"] == "new" and record["datasets"]["trec"]["sha256"] == "d"
    assert mixture(record).startswith("results mixed by --resume force: 1 of qasper were made with other settings or")


def test_one_sentence_tells_the_mixture_and_forgets_what_is_as_the_rest(paths):
    run(paths, A, ["q0", "q1", "t0"])
    assert mixture(load_record(paths.meta)) is None and mixture(None) is None
    run(paths, B, ["q2"])
    sentence = mixture(load_record(paths.meta))
    assert "2 of qasper, 1 of trec" in sentence and "window: 8 on record, now 16" in sentence
    run(paths, A, ["q3"])  # back again: only q2 is not of A
    assert "1 of qasper were" in mixture(load_record(paths.meta))


def test_settings_change_for_all_recorded_datasets_or_for_none(paths):
    run(paths, A, ["t0"], names=["trec"])
    with pytest.raises(ValueError, match="would change the settings of trec as well.*add them to --datasets"):
        run(paths, B, ["q0"], names=["qasper"])
    assert run(paths, A, ["q0"], names=["qasper"]) == []
    assert run(paths, A, ["q1"], data={"qasper": "new"}, names=["qasper"]) != []  # of a dataset's own facts, no other's


def test_results_without_a_record_and_a_file_in_use_stay_refused(paths):
    run(paths, A, ["q0"])
    with Run(paths, ORDERS), pytest.raises(FileInUse):
        run(paths, B, ["q1"])
    with pytest.raises(ValueError, match="not among this run's"):
        with Run(paths, {"qasper": ["q7"]}, force=True):
            pass
    paths.meta.unlink()
    with pytest.raises(ValueError, match="does not say how they were made"):
        run(paths, B, ["q1"])


def test_overwritten_rows_take_their_entry_along(paths):
    run(paths, A, ["q0", "t0"])
    run(paths, B, ["q1", "t1"])
    run(paths, B, ["q0", "q1"], force=False, overwrite=True, names=["qasper"])
    assert held(paths) == (B, [(A, {"trec": ["t0"]})])
    (old,) = load_record(paths.meta)["replaced"]
    assert [e["rows"] for e in old["made_otherwise"]] == [{"qasper": ["q0"]}]
    run(paths, C, ["q0"], force=False, overwrite=True)
    assert held(paths) == (C, [])


def test_entries_go_with_results_that_are_gone(paths):
    run(paths, A, ["q0", "t0"])
    run(paths, B, ["q1"])
    paths.results("trec").unlink()
    run(paths, C, ["q0"], force=False, overwrite=True, names=["qasper"])
    assert held(paths) == (C, [])
    assert load_record(paths.meta)["replaced"][0]["made_otherwise"][0]["rows"] == {"qasper": ["q0"], "trec": ["t0"]}


def delete(file, *ids):
    """Takes the lines of `ids` out of a result file by hand."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if json.loads(line)["_id"] not in ids))


def test_a_row_made_again_is_listed_no_more(paths):
    run(paths, A, ["q0", "q1", "t0"])
    run(paths, B, ["q2"])
    delete(paths.results("qasper"), "q0")
    run(paths, B, ["q0"], force=False)
    assert held(paths) == (B, [(A, {"qasper": ["q1"], "trec": ["t0"]})])
    assert "1 of qasper, 1 of trec were" in mixture(load_record(paths.meta))
    run(paths, A, ["q3"])
    assert held(paths)[1][1] == (B, {"qasper": ["q0", "q2"]})
    assert "2 of qasper were" in mixture(load_record(paths.meta))


@pytest.mark.parametrize("force", [True, False])
def test_rows_of_a_deleted_file_are_forgotten_before_the_first_new_one(paths, force):
    run(paths, A, ["q0", "t0"])
    run(paths, B, ["q1"])
    paths.results("qasper").unlink()
    run(paths, B, [], force=force, names=["trec"])  # of another dataset's rows it knows nothing
    assert held(paths) == (B, [(A, {"qasper": ["q0"], "trec": ["t0"]})])
    run(paths, B, [], force=force)  # as a run that is killed after `start` leaves it
    assert held(paths) == (B, [(A, {"trec": ["t0"]})]) and mixture(load_record(paths.meta)).count(" of ") == 1
    delete(paths.results("trec"), "t0")
    run(paths, B, ["q0", "t0"], force=force)
    assert held(paths) == (B, []) and mixture(load_record(paths.meta)) is None


ENTRY = {"settings": A, "datasets": {"qasper": {}}, "segments": [], "rows": {"qasper": ["q0"]}}


@pytest.mark.parametrize(
    "broken",
    [
        *("x", None, {}, 3, [{}], ["q0"], [ENTRY, None]),
        *([ENTRY | {key: 1}] for key in ENTRY),
        *([{k: v for k, v in ENTRY.items() if k != key}] for key in ENTRY),
        *([ENTRY | {"rows": {"qasper": rows}}] for rows in ("q0", None, [7])),
        *([ENTRY | {"datasets": datasets}] for datasets in ({}, {"qasper": 1})),
    ],
)
def test_a_broken_list_is_one_sentence_to_runs_and_to_eval(paths, broken):
    run(paths, A, ["q0"])
    record = load_record(paths.meta)
    paths.meta.write_text(json.dumps(record | {"made_otherwise": [ENTRY]}))
    assert load_record(paths.meta)["made_otherwise"] == read_run(paths.folder, []).records["SnapKV"]["made_otherwise"]
    paths.meta.write_text(json.dumps(record | {"made_otherwise": broken}))
    before = paths.meta.read_bytes()
    for reads in (lambda: run(paths, A, ["q1"]), lambda: run(paths, B, ["q1"]), lambda: read_run(paths.folder, [])):
        with pytest.raises(ValueError, match=r"SnapKV.json is broken \(made_otherwise does not list") as error:
            reads()
        assert "\n" not in str(error.value) and paths.meta.read_bytes() == before


def test_counters_go_on(paths):
    run(paths, A, ["q0"])
    RunRecord(paths).update("qasper", wall_s=3)
    run(paths, B, ["q1"])
    assert load_record(paths.meta)["counts"] == {"qasper": {"wall_s": 3}}


# --- shards --------------------------------------------------------------------------------------------------------

EVEN, ODD = ["q0", "q2", "q4", "t0"], ["q1", "q3", "q5", "t1"]


@pytest.fixture
def clock(monkeypatch):
    """Every segment begins a second after the one before."""
    ticks = iter(range(10, 60))
    monkeypatch.setattr("kvfactory.reports.run_record._now", lambda: f"2026-01-01T00:00:{next(ticks)}+00:00")


def test_shards_made_otherwise_are_joined_by_force_alone(paths, clock):
    one, two = paths.for_shard((0, 2)), paths.for_shard((1, 2))
    run(one, A, ["q0"])
    run(two, A, ODD)
    run(one, B, EVEN[1:])  # begun last: the joined record's settings
    with pytest.raises(ValueError, match="not made alike.*window.*only with --resume force"):
        merge_shards(paths, ORDERS, 2)
    before = {p: p.read_bytes() for p in paths.folder.rglob("*.json")}
    assert len(before) == 6  # nothing was written
    merge_shards(paths, ORDERS, 2, force=True)
    assert held(paths) == (B, [(A, {"qasper": ["q0"]}), (A, {"qasper": ["q1", "q3"], "trec": ["t1"]})])
    assert not list(paths.folder.rglob("*shard*"))
    assert run(paths, B, ["q5"], force=False) == []  # the joined run goes on under the record's settings
    assert "3 of qasper, 1 of trec" in mixture(load_record(paths.meta))


def test_alike_shards_of_which_one_was_forced_need_no_force_to_be_joined(paths):
    run(paths.for_shard((0, 2)), A, ["q0"])
    run(paths.for_shard((0, 2)), B, EVEN[1:])
    run(paths.for_shard((1, 2)), B, ODD)
    merge_shards(paths, ORDERS, 2)
    assert held(paths) == (B, [(A, {"qasper": ["q0"]})])


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_forced_merge_that_was_cut_short_ends_the_same(paths, clock, monkeypatch, kept):
    run(paths.for_shard((1, 2)), A, ODD)
    run(paths.for_shard((0, 2)), B, EVEN)
    real, left = Path.unlink, [kept]

    def unlink(self, missing_ok=False):
        if "shard" in self.name and self.suffix == ".json":
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        merge_shards(paths, ORDERS, 2, force=True)
    monkeypatch.setattr(Path, "unlink", real)
    merge_shards(paths, ORDERS, 2, force=True)
    assert held(paths) == (B, [(A, {"qasper": ["q1", "q3"], "trec": ["t1"]})])
    assert not list(paths.folder.rglob("*shard*"))


def test_forced_merges_dataset_by_dataset_list_the_rows_of_each(paths, clock):
    run(paths.for_shard((0, 2)), A, EVEN)
    run(paths.for_shard((1, 2)), B, ODD)  # begun last
    merge_shards(paths, {"trec": ORDERS["trec"]}, 2, force=True)
    merge_shards(paths, {"qasper": ORDERS["qasper"]}, 2, force=True)
    assert held(paths) == (B, [(A, {"trec": ["t0"]}), (A, {"qasper": ["q0", "q2", "q4"]})])


def test_check_alone_writes_nothing(paths):
    run(paths, A, ["q0"])
    before = paths.meta.read_bytes()
    assert RunRecord(paths).check(B, {"qasper": {"sha256": "d"}, "trec": {"sha256": "d"}}, force=True)
    assert paths.meta.read_bytes() == before
