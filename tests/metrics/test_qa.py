"""F1 of question answering: measured vectors and the traps of the normalisation."""

from __future__ import annotations

import json

import pytest

from kvfactory.metrics import METRICS
from kvfactory.metrics.qa import CHINESE_PUNCTUATION_RANGES, chinese_words, english_words, qa_f1_score, qa_f1_zh_score


# Values measured with LongBench's own functions; equality, since both sides do the same few float operations.
@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("The cat sat.", "a cat", 0.6666666666666666),
        ("the", "a", 0.0),
        ("don't-stop now", "dont stop now", 0.4),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_measured_english_vectors(prediction, answer, expected):
    assert qa_f1_score(prediction, answer) == expected


def test_measured_chinese_vectors():
    assert qa_f1_zh_score("北京大学", "北京") == 0.0
    longer = "2012年，铜仁市的财政总收入增长了25.89%。"
    assert qa_f1_zh_score("2012年，铜仁市的财政总收入增长了10.5%。", longer) == 0.8888888888888888


def test_words_count_as_often_as_they_occur():
    # 2 common of 3 predicted and 2 expected: P = 2/3, R = 1, F = 0.8; a set would give 1.0
    assert qa_f1_score("x x y", "x x") == pytest.approx(0.8, abs=1e-15)


def test_english_normalisation_order():
    # punctuation goes before articles: "a-n" becomes the article "an"; "theory" holds no article
    assert english_words("a-n Theory, THE\u00a0Cat's") == ["theory", "cats"]


def test_chinese_words_are_segmented_before_normalising():
    assert chinese_words("Ｕ。 ABC！") == ["ｕ", "abc"]
    # U+300A and U+FF0E are not in LongBench's list, U+300B is
    assert chinese_words("《书》．") == ["《", "书", "．"]


def test_chinese_punctuation_is_longbenchs(data_dir):
    config = json.loads((data_dir / "longbench_config.json").read_text(encoding="utf-8"))
    ours = {chr(code) for first, last in CHINESE_PUNCTUATION_RANGES for code in range(first, last + 1)}
    assert ours == set(config["zh_punctuation"]) - {"."}  # the full stop is ASCII punctuation anyway


def test_registered_names():
    assert METRICS.get("qa_f1_score") is qa_f1_score
    assert METRICS.get("qa_f1_zh_score") is qa_f1_zh_score
