from __future__ import annotations

import sys

import pytest

from kvfactory.needle import scores
from kvfactory.needle.needles import NEEDLES, Needle
from kvfactory.needle.scores import SCORE_MAX, SCORES, needle_scores

NEEDLE = Needle("n", "The best snack in town is baked figs.", "What is the best snack?", ("baked", "figs"))


def test_by_hand():
    # 8 words in the needle, 3 in the answer, common: baked, fig (stemmed), is -> P 3/3, R 3/8, F 6/11.
    found = needle_scores(NEEDLE, "Is: BAKED, fig")
    assert found == {"rouge1_f10": pytest.approx(60 / 11), "recall": 0.5, "exact": 0}
    # Common: baked, figs of 3 and 8 words -> F 4/11. The original would miss "figs!" and "baked,".
    assert needle_scores(NEEDLE, 'Really "baked," figs!') == {
        "rouge1_f10": pytest.approx(40 / 11),
        "recall": 1.0,
        "exact": 1,
    }
    # A repeated word is found once; ROUGE counts it at most as often as the needle has it: P 1/4, R 1/8.
    assert needle_scores(NEEDLE, "figs figs figs figs")["rouge1_f10"] == pytest.approx(10 / 6)


@pytest.mark.parametrize("pred", ["", "   \n", "...", "无"])
def test_nothing_found(pred):
    assert needle_scores(NEEDLE, pred) == {"rouge1_f10": 0, "recall": 0, "exact": 0}


@pytest.mark.parametrize("needle", NEEDLES, ids=lambda n: n.name)
def test_own_needles(needle):
    best = needle_scores(needle, needle.text)
    assert best == {name: SCORE_MAX[name] for name in SCORES}
    assert needle_scores(needle, needle.question)["recall"] == 0


def test_missing_package_is_named(monkeypatch):
    scores._rouge1.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ValueError, match="pip install rouge-score"):
        needle_scores(NEEDLE, "figs")
