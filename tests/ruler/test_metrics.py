"""RULER's metrics against values worked out by hand."""

from __future__ import annotations

import random
import string
import subprocess
import sys

import pytest

from kvfactory.ruler.metrics import clean_prediction, ruler_score
from kvfactory.ruler.tasks import RULER_TASKS

QA = ("qa_1", "qa_2")


@pytest.mark.parametrize(
    "pred, cleaned",
    [
        ("  a\tb \n", "a\nb"),
        ("\x00a\x1fb\x00", "a\nb"),
        ("a\r\n\x0bb", "a\n\n\nb"),
        ("\x7f a\x80\x20b", "\x7f a\x80 b"),  # the first one above and the last one below the class stay
        ("\x01\x02", ""),
        ("", ""),
    ],
)
def test_clean_prediction(pred, cleaned):
    assert clean_prediction(pred) == cleaned


@pytest.mark.parametrize("task", RULER_TASKS)
def test_all_and_part_differ_on_several_references(task):
    outputs = ["1234567", "Blue Heron", "x_1", "7654321"]
    scores = [ruler_score(task, pred, outputs) for pred in ("none", "7654321", "X_1, blue heron", " ".join(outputs))]
    assert scores == ([0, 1, 1, 1] if task in QA else [0, 0.25, 0.5, 1])


def test_a_reference_is_a_substring_in_any_case():
    assert ruler_score("VT", "vars: ABCDE.", ["abc"]) == 1
    assert ruler_score("vt", "abc", ["ABCDE"]) == 0
    assert ruler_score("qa_1", "", ["a"]) == 0


def test_a_control_character_parts_words():
    assert ruler_score("cwe", "blue\x00heron", ["blueheron"]) == 0
    assert ruler_score("cwe", "blue\x00heron", ["blue", "heron", "blue\nheron"]) == 1


def test_every_reference_counts_also_a_repeated_one():
    assert ruler_score("fwe", "aaa", ["aaa", "aaa", "bbb"]) == pytest.approx(2 / 3, abs=1e-15)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_right_answers_score_100_and_those_of_other_examples_under_5(task):
    rng = random.Random(0)
    outputs = [["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(4)] for _ in range(200)]
    preds = [", ".join(o).upper() for o in outputs]
    assert sum(ruler_score(task, p, o) for p, o in zip(preds, outputs, strict=True)) == 200
    shifted = preds[1:] + preds[:1]
    assert sum(ruler_score(task, p, o) for p, o in zip(shifted, outputs, strict=True)) < 10


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("niah", "a", ["a"]), "niah_single_1"),
        (("vt", None, ["a"]), "NoneType"),
        (("vt", "a", "a"), "list of strings"),
        (("vt", "a", [1]), "list of strings"),
        (("vt", "a", []), "no reference"),
    ],
)
def test_what_cannot_be_scored(arguments, told):
    with pytest.raises(ValueError, match=told):
        ruler_score(*arguments)


def test_neither_torch_nor_transformers_is_loaded():
    body = (
        "import sys, kvfactory.ruler.read, kvfactory.ruler.metrics; print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
