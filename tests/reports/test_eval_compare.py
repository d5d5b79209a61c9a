"""Two result files or folders against each other."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvfactory.reports.eval_compare import bootstrap_interval, compare_paths, format_comparison


def row(number, good=True):
    return {"_id": f"id{number}", "answers": ["cat"], "pred": "cat" if good else "dog", "dataset": "hotpotqa"}


def share(good, n):
    """n rows of which the first `good` score 1."""
    return [row(i, i < good) for i in range(n)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_compare_two_files(tmp_path):
    a = write(tmp_path / "hotpotqa" / "FullKV.json", share(3, 6))
    b = write(tmp_path / "hotpotqa" / "snapkv.json", [row(9), *(row(i, i in (0, 1, 3, 4)) for i in (5, 4, 3, 2, 1, 0))])
    (d,) = compare_paths(a, b)
    assert (d.name_a, d.name_b, d.n, d.alone) == ("FullKV", "SnapKV", 6, 1)
    assert (d.score_a, d.score_b, d.difference) == pytest.approx((50.0, 200 / 3, 50 / 3), abs=1e-12)
    assert (d.wins, d.ties, d.losses) == (2, 3, 1)
    # the same resampling written out: 1000 draws from generator 0 over the differences in A's order
    change = 100 * np.array([0, 0, -1, 1, 1, 0])
    rng = np.random.default_rng(0)
    means = [change[rng.integers(0, 6, 6)].mean() for _ in range(1000)]
    assert (d.low, d.high) == tuple(np.percentile(means, [2.5, 97.5]))
    text = format_comparison([d], "A.json", "B.json")
    assert "| hotpotqa | FullKV -> SnapKV |   6 | 50.00 | 66.67 | +16.67 |" in text and "1000 draws, seed 0" in text


def test_nothing_in_common_is_an_empty_line(tmp_path):
    a = write(tmp_path / "hotpotqa" / "FullKV.json", [row(1)])
    b = write(tmp_path / "hotpotqa" / "SnapKV.json", [row(2)])
    (d,) = compare_paths(a, b)
    assert (d.n, d.alone, d.difference, d.low) == (0, 2, None, None)
    assert "None" not in format_comparison([d], "A", "B")


def test_the_interval_covers_the_mean_and_is_repeatable():
    values = np.random.default_rng(3).normal(5, 1, 400)
    low, high = bootstrap_interval(values)
    # the standard error is 1/20, so the interval is 5 +- 0.1 up to the noise of the sample and of 1000 draws
    assert low < values.mean() < high and 0.15 < high - low < 0.25
    assert (low, high) == bootstrap_interval(values)


def test_compare_folders_pairs_labels_or_the_only_ones(tmp_path):
    for run_name, good in (("a", 1), ("b", 2)):
        for method in ("FullKV", "SnapKV"):
            for dataset in ("qasper", "hotpotqa", *(("lcc",) if run_name == "a" else ())):
                write(tmp_path / run_name / dataset / f"{method}.json", share(good, 4))
    found = [(d.dataset, d.name_a, d.name_b, d.difference) for d in compare_paths(tmp_path / "a", tmp_path / "b")]
    assert found == [
        *(("qasper", "FullKV", "FullKV", 25.0), ("hotpotqa", "FullKV", "FullKV", 25.0)),
        *(("qasper", "SnapKV", "SnapKV", 25.0), ("hotpotqa", "SnapKV", "SnapKV", 25.0)),
    ]
    write(tmp_path / "c" / "qasper" / "H2O.json", share(1, 4))
    write(tmp_path / "d" / "qasper" / "CAM.json", share(1, 4))
    assert [(d.name_a, d.name_b) for d in compare_paths(tmp_path / "c", tmp_path / "d")] == [("H2O", "CAM")]
    with pytest.raises(ValueError, match="no method and dataset in common"):
        compare_paths(tmp_path / "a", tmp_path / "c")


def test_compare_refuses_what_cannot_be_paired(tmp_path):
    a = write(tmp_path / "hotpotqa" / "FullKV.json", share(1, 2))
    b = write(tmp_path / "qasper" / "FullKV.json", share(1, 2))
    write(tmp_path / "more" / "m_64" / "qasper" / "H2O.json", share(1, 2))
    write(tmp_path / "more" / "m_32" / "qasper" / "H2O.json", share(1, 2))
    for other, message in (
        (b, "is of hotpotqa and .* of qasper"),
        (tmp_path, "both be run folders"),
        (tmp_path / "none.json", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_paths(a, other)
    with pytest.raises(ValueError, match="holds 2 run folders, give one: m_32, m_64"):
        compare_paths(tmp_path, tmp_path / "more")
