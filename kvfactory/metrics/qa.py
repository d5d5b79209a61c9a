"""Question answering: multiset F1 over normalised words.

Definition: THUDM/LongBench, LongBench/metrics.py (English after SQuAD's evaluation script).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvfactory.metrics.base import METRICS
from kvfactory.metrics.chinese import segment

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
# Inclusive code-point ranges of the Chinese punctuation that LongBench deletes. The gaps are LongBench's own: U+FF0E,
# U+3008 to U+300A and U+00B7 stay in the text, so a Unicode category would give other scores.
CHINESE_PUNCTUATION_RANGES = (
    *((0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027)),
    *((0x3001, 0x3003), (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F)),
    *((0xFE4F, 0xFE4F), (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64)),
)
_CHINESE_PUNCTUATION = {
    **_ASCII_PUNCTUATION,
    **{code: None for first, last in CHINESE_PUNCTUATION_RANGES for code in range(first, last + 1)},
}


def _f1(prediction: list[str], answer: list[str]) -> float:
    """F1 of two bags of words, each word counted as often as it occurs; 0 without overlap."""
    common = sum((Counter(prediction) & Counter(answer)).values())
    if common == 0:
        return 0.0
    precision = common / len(prediction)
    recall = common / len(answer)
    return 2 * precision * recall / (precision + recall)


def english_words(text: str) -> list[str]:
    """Lower case, ASCII punctuation deleted (words on both sides of it join), articles dropped, split at whitespace."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split()


def chinese_words(text: str) -> list[str]:
    """jieba words of the RAW text, each then lower-cased and freed of punctuation and whitespace; empty ones dropped.

    Segmenting first matters: punctuation separates words for jieba.
    """
    words = ("".join(word.lower().translate(_CHINESE_PUNCTUATION).split()) for word in segment(text))
    return [word for word in words if word]


@METRICS.register("qa_f1_score")
def qa_f1_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """F1 over `english_words`."""
    return _f1(english_words(prediction), english_words(answer))


@METRICS.register("qa_f1_zh_score")
def qa_f1_zh_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """F1 over `chinese_words`."""
    return _f1(chinese_words(prediction), chinese_words(answer))
