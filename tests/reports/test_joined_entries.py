"""Entries of --resume force in shards that are joined more than once: each row is listed once."""

from __future__ import annotations

import pytest

from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import load_record, mixture
from kvfactory.reports.shards import merge_shards

ORDERS = {"qasper": ["q0", "q1", "q2"], "trec": ["t0", "t1"]}
A, B = {"window": 8}, {"window": 16}


def run(paths, settings, make):
    orders = {name: order[paths.shard[0] :: paths.shard[1]] for name, order in ORDERS.items()}
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
    record = load_record(paths.meta)
    assert [(e["settings"], e["rows"]) for e in record["made_otherwise"]] == [(A, {"qasper": ["q0"], "trec": ["t0"]})]
    assert "1 of qasper, 1 of trec were made with other settings" in mixture(record)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_shards(paths, ORDERS, 2)
