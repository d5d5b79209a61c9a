"""Chinese word segmentation (jieba), loaded on first use and silent.

LongBench's Chinese metrics segment with jieba's default dictionary, so another segmenter or another dictionary changes
the scores; a missing jieba is therefore an error and never a score of 0.
"""

from __future__ import annotations

import functools
import logging
import types
import warnings


@functools.cache
def _jieba() -> types.ModuleType:
    """jieba with its dictionary loaded, once per process.

    Raises:
        ValueError: jieba is not installed.
    """
    try:
        with warnings.catch_warnings():
            # jieba 0.42.1 has old escape sequences and imports pkg_resources; neither is the user's business.
            warnings.simplefilter("ignore")
            import jieba
    except ImportError:
        raise ValueError(
            "Chinese datasets need the package jieba (0.42.1) for their scores; install it with `pip install jieba`."
        ) from None
    jieba.setLogLevel(logging.WARNING)  # it announces the dictionary on stderr at INFO and DEBUG
    jieba.initialize()
    return jieba


def segment(text: str) -> list[str]:
    """Words of `text` in jieba's accurate mode, punctuation and whitespace tokens included."""
    return list(_jieba().cut(text, cut_all=False))
