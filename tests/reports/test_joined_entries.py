"""Entries of --resume force in shards that are joined more than once: each row is listed once."""

from __future__ import annotations

import pytest

from kvfactory.reports import shards
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import load_record, mixture
from kvfactory.reports.shards import merge_shards, shard_share

ORDERS = {"qasper": ["q0", "q1", "q2"], "trec": ["t0", "t1"]}
A, B = {"window": 8}, {"window": 16}


def run(paths, settings, make):
    orders = {name: shard_share(order, paths.shard) for name, order in ORDERS.items()}
    with Run(paths, orders, force=True) as files:
        files.start(settings, {"argv": []}, {name: {"sha256": "d"} for name in orders})
        for results in files.results.values():
            for i in set(results.order) & set(make):
                results.append({"_id": i, "pred": str(settings)})


def test_an_entry_of_a_shard_is_taken_once_by_merges_dataset_by_dataset(tmp_path):
    paths = RunPaths(tmp_path, "org/M", "512", "SnapKV")
    one, two = paths.for_shard((0, 2)), paths.for_shard((1, 2))
    run(one, A, ["q0", "t0"])
    run(one, B, ["q2"])
    run(two, B, ["q1", "t1"])
    for name in ORDERS:
        merge_shards(paths, {name: ORDERS[name]}, 2)
        there = [i for e in load_record(paths.meta)["made_otherwise"] for i in e["rows"]]
        assert there == (["qasper"] if name == "qasper" else ["qasper", "trec"])
    record = load_record(paths.meta)
    assert [(e["settings"], e["rows"]) for e in record["made_otherwise"]] == [
        (A, {"qasper": ["q0"]}),
        (A, {"trec": ["t0"]}),
    ]
    assert [set(e["datasets"]) for e in record["made_otherwise"]] == [{"qasper"}, {"trec"}]
    assert "1 of qasper, 1 of trec were made with other settings" in mixture(record)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_shards(paths, ORDERS, 2)


def test_rows_that_shards_make_again_are_listed_no_more(tmp_path):
    paths = RunPaths(tmp_path, "org/M", "512", "SnapKV")
    run(paths, A, ["q0", "t0"])
    run(paths, B, ["q1"])
    paths.results("qasper").unlink()
    for k in (0, 1):
        run(paths.for_shard((k, 2)), B, ORDERS["qasper"])
    merge_shards(paths, {"qasper": ORDERS["qasper"]}, 2)
    (entry,) = load_record(paths.meta)["made_otherwise"]
    assert entry["settings"] == A and entry["rows"] == {"trec": ["t0"]}


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_merge_killed_before_its_results_are_there_ends_the_same(tmp_path, monkeypatch, kept):
    """The record is written first, then two result files; `kept` of these three are."""
    paths = RunPaths(tmp_path, "org/M", "512", "SnapKV")
    for settings, ids in ((A, ["q0", "q1", "t0"]), (B, ["q2", "t1"])):
        for k in (0, 1):
            run(paths.for_shard((k, 2)), settings, ids)
    left = [kept]

    def write(real):
        def step(*args):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(*args)

        return step

    with monkeypatch.context() as patch:
        for name in ("save_record", "write_atomically"):
            patch.setattr(f"kvfactory.reports.shards.{name}", write(getattr(shards, name)))
        with pytest.raises(KeyboardInterrupt):
            merge_shards(paths, ORDERS, 2)
    merge_shards(paths, ORDERS, 2)
    entries = load_record(paths.meta)["made_otherwise"]
    assert all(e["settings"] == A for e in entries)
    assert sorted(i for e in entries for ids in e["rows"].values() for i in ids) == ["q0", "q1", "t0"]
