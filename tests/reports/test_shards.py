"""Joined shards equal an unsharded run."""

from __future__ import annotations

import os
import shutil

import pytest

from kvfactory.reports.files import FileInUse
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import load_record
from kvfactory.reports.shards import merge_shards, shard_share

ORDERS = {"qasper": [f"q{i}" for i in range(7)], "trec": ["t1", "t0"]}  # 3 shards: the last has none of trec


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results", "org/M", "512", "SnapKV")


def run(paths, settings=None, data="d", skip=(), orders=ORDERS, error=()):
    orders = {name: shard_share(order, paths.shard) for name, order in orders.items()}
    with Run(paths, orders) as files:
        facts = {name: {"examples": len(ORDERS[name]), "sha256": data} for name in orders}
        files.start(settings or {"window": 8}, {"argv": [str(paths.shard)]}, facts)
        files.record.note("common")
        for name, results in files.results.items():
            for i in reversed(orders[name]):
                if i not in skip:
                    results.append({"_id": i, "error": "x"} if i in error else {"_id": i, "pred": i * 3})
            files.record.update(name, truncated=len(orders[name]))
        files.exit_code = 0


def shards(paths, n=3, **kwargs):
    for k in range(n):
        run(paths.for_shard((k, n)), **kwargs)


def files_below(paths):
    return {str(p.relative_to(paths.folder)): p.read_bytes() for p in paths.folder.rglob("*") if p.is_file()}


def test_share_is_official_striding():
    assert [shard_share(list("abcde"), (k, 2)) for k in (0, 1)] == [list("ace"), list("bd")]
    assert shard_share(list("ab"), (2, 3)) == [] and shard_share(list("ab"), None) == list("ab")


def test_merge_equals_an_unsharded_run(paths, tmp_path):
    single = RunPaths(tmp_path / "single", "org/M", "512", "SnapKV")
    run(single, error=["q3"])
    shards(paths, error=["q3"])
    assert merge_shards(paths, ORDERS) == [paths.results("qasper"), paths.results("trec")]
    joined, whole = files_below(paths), files_below(single)
    assert set(joined) == set(whole) == {"qasper/SnapKV.json", "trec/SnapKV.json", "meta/SnapKV.json"}
    assert joined["qasper/SnapKV.json"] == whole["qasper/SnapKV.json"]
    assert joined["trec/SnapKV.json"] == whole["trec/SnapKV.json"]
    a, b = load_record(paths.meta), load_record(single.meta)
    segments = a.pop("segments"), b.pop("segments")
    assert a == b
    assert [s["shard"] for s in segments[0]] == [[0, 3], [1, 3], [2, 3]] and len(segments[1]) == 1
    Run(paths, ORDERS).close()  # the merged run can be resumed as a whole
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_shards(paths, ORDERS)


def test_dataset_by_dataset(paths):
    shards(paths)
    merge_shards(paths, {"trec": ORDERS["trec"]})
    assert len(list(paths.meta.parent.iterdir())) == 4  # the whole record, and those of shards with qasper rows
    merge_shards(paths, {"qasper": ORDERS["qasper"]})
    assert set(files_below(paths)) == {"qasper/SnapKV.json", "trec/SnapKV.json", "meta/SnapKV.json"}
    held = load_record(paths.meta)
    assert held["counts"] == {"qasper": {"truncated": 7}, "trec": {"truncated": 2}} and len(held["segments"]) == 3


def test_counters_of_shards_of_which_some_had_no_examples(paths):
    """Three shards of two examples: the last one never started, so it has no record."""
    orders = {"qasper": ["q0", "q1"]}
    shards(paths, 2, orders=orders)
    for k in (0, 1):
        for file in (paths.for_shard((k, 2)).meta, paths.for_shard((k, 2)).results("qasper")):
            file.rename(file.with_name(file.name.replace("of2", "of3")))
    merge_shards(paths, orders, 3)
    assert load_record(paths.meta)["counts"] == {"qasper": {"truncated": 2}}


@pytest.mark.parametrize("then", [["trec"], ["qasper", "trec"]])
def test_counters_after_the_records_of_shards_without_further_results_are_gone(paths, then):
    """Only shards 0 and 1 have examples of trec, so the record of shard 2 goes with its rows of qasper."""
    shards(paths)
    merge_shards(paths, {"qasper": ORDERS["qasper"]})
    assert not paths.for_shard((2, 3)).meta.exists()
    merge_shards(paths, {name: ORDERS[name] for name in then})
    assert load_record(paths.meta)["counts"] == {"qasper": {"truncated": 7}, "trec": {"truncated": 2}}


def refused(paths, match, orders=ORDERS, error=ValueError):
    before = files_below(paths)
    with pytest.raises(error, match=match) as caught:
        merge_shards(paths, orders)
    assert "\n" not in str(caught.value)
    assert files_below(paths) == before


def test_another_number_of_shards_than_was_asked_for(paths):
    shards(paths)
    before = files_below(paths)
    with pytest.raises(ValueError, match="--num_shards 2 --merge_shards .* made with --num_shards 3: give that"):
        merge_shards(paths, ORDERS, 2)
    assert files_below(paths) == before
    assert len(merge_shards(paths, ORDERS, 3)) == 2


def test_missing_shard(paths):
    shards(paths)
    paths.for_shard((1, 3)).results("qasper").unlink()
    refused(paths, "shard 1 of 3 on qasper is missing .*--shard_id 1")


def test_unfinished_shard(paths):
    shards(paths, skip=["q3"])
    refused(paths, "shard 0 of 3 on qasper lacks 1 of its 3 examples")


def test_running_shard(paths):
    shards(paths)
    with Run(paths.for_shard((2, 3)), {"qasper": shard_share(ORDERS["qasper"], (2, 3))}):
        before = [p for p in paths.folder.rglob("*.json")]
        with pytest.raises(FileInUse, match="shard2of3"):
            merge_shards(paths, ORDERS)
        assert [p for p in paths.folder.rglob("*.json")] == before


@pytest.mark.parametrize("change", [{"settings": {"window": 32}}, {"data": "e"}])
def test_shards_made_differently(paths, change):
    shards(paths)
    shutil.rmtree(paths.folder / "meta")
    for k in range(3):
        part = paths.for_shard((k, 3))
        for name in ORDERS:
            part.results(name).unlink(missing_ok=True)
        run(part, **(change if k == 1 else {}))
    refused(paths, 'shard1of3.json and .*shard0of3.json were not made alike .*(window: 8|sha256: "d") on record')


def test_record_of_a_shard_missing(paths):
    shards(paths)
    paths.for_shard((1, 3)).meta.unlink()
    refused(paths, "shard1of3.json is missing")


def test_two_numbers_of_shards(paths):
    shards(paths)
    run(paths.for_shard((0, 2)))
    refused(paths, "--num_shards 2 and 3")


def test_other_data(paths):
    shards(paths)
    refused(paths, "holds _id 'q1', which is not in shard 1 of 3", {"qasper": ["q0", "x", *ORDERS["qasper"][2:]]})


def test_unsharded_results_in_the_way(paths):
    shards(paths)
    run(paths, orders={"qasper": ORDERS["qasper"]}, error=["q0"])
    refused(paths, "already holds other results")


def test_whole_record_of_other_settings_in_the_way(paths):
    shards(paths)
    run(paths, settings={"window": 32}, orders={"trec": []})
    refused(paths, "were not made alike .window: 32 on record, now 8")


@pytest.mark.parametrize("kill_at", range(9))
def test_merge_cut_short_anywhere_can_be_run_again(paths, tmp_path, monkeypatch, kill_at):
    """A merge of this run makes 3 replaces and 8 removals of results and records; it dies at each of the first 9."""
    shards(paths)
    shutil.copytree(paths.folder, tmp_path / "copy" / paths.folder.name)
    whole = RunPaths(tmp_path / "copy", "org/M", "512", "SnapKV")
    merge_shards(whole, ORDERS)
    steps = [0]

    def counted(real):
        def step(*args, **kwargs):
            if not str(args[0]).endswith(".lock"):
                if steps[0] == kill_at:
                    raise KeyboardInterrupt
                steps[0] += 1
            return real(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(type(paths.folder), "unlink", counted(type(paths.folder).unlink))
        with pytest.raises(KeyboardInterrupt):
            merge_shards(paths, ORDERS)
    merge_shards(paths, ORDERS)
    assert not list(paths.folder.rglob("*shard*"))
    assert files_below(paths) == files_below(whole)
