"""RULER's two metrics, without torch and without a model.

Source: NVIDIA/RULER @c3f5e3b4, scripts/eval/synthetic/constants.py and scripts/eval/evaluate.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfactory.ruler.tasks import get_ruler_task

_CONTROL = re.compile("[\x00-\x1f]")


def clean_prediction(pred: str) -> str:
    """The text that is scored: stripped, with a newline in place of every control character, and stripped again.

    A newline and not nothing, so that two words apart by a control character stay two words.
    """
    return _CONTROL.sub("\n", pred.strip()).strip()


def ruler_score(task: str, pred: str, outputs: Sequence[str]) -> float:
    """RULER's score of one prediction, in [0, 1]; a task's score is 100 times the mean, rounded to two decimals.

    A reference is found if it is a substring of the cleaned prediction, in any case of letters. `string_match_all` is
    the share of references found, `string_match_part` (the qa tasks) 1 if any is found.

    Args:
        task: name of one of the 13 tasks.
        pred: the text the model generated.
        outputs: all references.

    Raises:
        ValueError: unknown task, no reference, or an argument of the wrong type.
    """
    metric = get_ruler_task(task).metric
    if not isinstance(pred, str):
        raise ValueError(f"a prediction must be a string, got {type(pred).__name__}.")
    if isinstance(outputs, str) or not all(isinstance(output, str) for output in outputs):
        raise ValueError(f"references must be a list of strings, got {outputs!r}.")
    if not outputs:
        raise ValueError(f"{task} has no reference to score a prediction against.")
    text = clean_prediction(pred).lower()
    found = [output.lower() in text for output in outputs]
    return float(any(found)) if metric == "string_match_part" else sum(found) / len(found)
