from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kvfactory.ops.head_scores import check_scores_fit, load_head_scores, sidecar_path, uniform_scores

TRIALS = {"0-0": [1, 2], "0-1": [0, 0], "0-2": [3, 5], "1-0": [0.5, 0.5], "1-1": [1, 0], "1-2": [2, 4]}
MEANS = np.array([[1.5, 0, 4], [0.5, 0.5, 3]])


def write(path, content) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_scores_are_means_over_trials_with_sum_one(tmp_path):
    loaded = load_head_scores(write(tmp_path / "s.json", TRIALS))
    np.testing.assert_allclose(loaded.values, MEANS / MEANS.sum(), rtol=1e-15)
    assert loaded.model is None


def test_heads_are_read_by_index_whatever_the_order_and_line_breaks(tmp_path):
    items = list(TRIALS.items())
    random.Random(0).shuffle(items)
    shuffled = load_head_scores(write(tmp_path / "s.json", json.dumps(dict(items), indent=1)))
    np.testing.assert_array_equal(shuffled.values, load_head_scores(write(tmp_path / "o.json", TRIALS)).values)


def test_a_bare_matrix_is_accepted(tmp_path):
    loaded = load_head_scores(write(tmp_path / "m.json", MEANS.tolist()))
    np.testing.assert_allclose(loaded.values, MEANS / MEANS.sum(), rtol=1e-15)


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "m.json", [[1, 1]])
    first = load_head_scores(path)
    assert load_head_scores(path) is first
    write(tmp_path / "m.json", [[1, 3.0]])
    assert load_head_scores(path).values.tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize(
    "content, problem",
    [
        ("not json", "is not JSON"),
        ("3", "neither"),
        ({}, "no heads"),
        ([], "no heads"),
        ([[1, 2], 3], "row 1 of the matrix is not a list"),
        ([[1, 2], [3]], "row 1 has 1 heads and row 0 has 2"),
        ({"0-0": [1], "0-1": [1], "1-1": [1]}, "head 1-0 is missing"),
        ({"0-0": [1], "a-1": [1]}, "'a-1' is not"),
        ({"0-0": [1], "00-0": [1]}, "occurs twice"),
        ('{"0-0": [1], "0-0": [2]}', "a key occurs twice"),
        ({"0-0": []}, "head 0-0 is empty"),
        ({"0-0": [1, 1], "0-1": [1]}, "head 0-1 has 1 trials and others have 2"),
        ('{"0-0": [1], "0-1": [NaN]}', "head 0-1 holds nan"),
        ("[[1e308, 1e308]]", "row 0 holds a number beyond 1e+100"),
        ('{"0-0": [1, 1], "0-1": [1e308, 1e308]}', "head 0-1 holds a number beyond"),
        (f"[[1, {10**400}]]", "row 0 holds a number beyond"),
        ("[[1, Infinity]]", "row 0 holds inf"),
        ([[1, True]], "holds True"),
        ([["1"]], "holds '1'"),
        ({"0-0": [1], "0-1": [-2]}, "0-1 is negative"),
        ({"0-0": [0], "0-1": [0]}, "all scores are zero"),
    ],
)
def test_bad_files_are_refused_by_name_and_reason(tmp_path, content, problem):
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(ValueError) as caught:
        load_head_scores(path)
    assert path in str(caught.value) and "--head_path" in str(caught.value) and problem in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        load_head_scores(tmp_path / "none.json")


def test_another_shape_is_refused(tmp_path):
    scores = load_head_scores(write(tmp_path / "s.json", TRIALS))
    check_scores_fit(scores, 2, 3)
    for shape in ((3, 2), (2, 9), (30, 3)):
        with pytest.raises(ValueError, match="scores 2 layers x 3 heads, the model has"):
            check_scores_fit(scores, *shape)


def test_another_models_file_is_refused_unless_forced(tmp_path):
    path = write(tmp_path / "s.json", TRIALS)
    write(sidecar_path(path), {"model": "org/Model-A", "layers": 2, "heads": 3})
    scores = load_head_scores(path)
    check_scores_fit(scores, 2, 3, model="/some/folder/model-a")
    check_scores_fit(scores, 2, 3, model=None)
    check_scores_fit(scores, 2, 3, model="org/Model-B", force=True)
    with pytest.raises(ValueError, match="probed on org/Model-A, not on org/Model-B"):
        check_scores_fit(scores, 2, 3, model="org/Model-B")


def test_the_name_of_a_published_file_tells_its_model(tmp_path):
    path = write(tmp_path / "Model-A_retrieval_reasoning_heads.json", TRIALS)
    with pytest.raises(ValueError, match="probed on Model-A"):
        check_scores_fit(load_head_scores(path), 2, 3, model="Model-B")


@pytest.mark.parametrize(
    "sidecar, problem",
    [
        ({"layers": 2}, "does not name a model"),
        ({"model": "m", "layers": 4}, "says 4 layers, the file has 2"),
        ({"model": "m", "heads": 9}, "says 9 heads, the file has 3"),
        ("{", "is not JSON"),
    ],
)
def test_a_sidecar_of_another_file_is_refused(tmp_path, sidecar, problem):
    path = write(tmp_path / "s.json", TRIALS)
    write(sidecar_path(path), sidecar)
    with pytest.raises(ValueError, match=problem):
        load_head_scores(path)


def test_uniform_scores_sum_to_one():
    assert uniform_scores(3, 7).values.sum() == pytest.approx(1)
    assert np.ptp(uniform_scores(3, 7).values) == 0
