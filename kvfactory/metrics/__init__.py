"""LongBench's metrics, exactly, without torch and without a model.

`score_example` is the one entry point of the runner and of `eval.py`; `extra_scores` adds columns that never are the
headline. Source of every definition: THUDM/LongBench, LongBench/{metrics.py,eval.py}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfactory.data.tasks import Task, get_task
from kvfactory.metrics import classification, code, count, qa, retrieval, rouge  # noqa: F401 - they register themselves
from kvfactory.metrics.base import METRICS

__all__ = ["METRICS", "extra_scores", "scored_text", "score_example"]


def scored_text(dataset: str, pred: str) -> str:
    """The scored part of a prediction: on few-shot sets its first line after leading newlines (not blanks)."""
    return _scored_part(get_task(dataset), pred)


def score_example(dataset: str, pred: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """LongBench's score of one prediction, in [0, 1]: the best over all answers, 0 without answers.

    Args:
        dataset: LongBench or LongBench-E name; an `_e` set has the metric of its name without `_e`.
        pred: the text the model generated.
        answers: all reference answers.
        all_classes: class names, which the classification sets (trec, lsht) need.

    Raises:
        ValueError: unknown dataset, an argument of the wrong type, an answer or class list that cannot be scored, or a
            package missing that the dataset's metric needs.
    """
    task, answers = _checked(dataset, pred, answers)
    metric = METRICS.get(task.metric)
    text = _scored_part(task, pred)
    return max((float(metric(text, answer, all_classes)) for answer in answers), default=0.0)


def extra_scores(
    dataset: str, pred: str, answers: Sequence[str], all_classes: Sequence[str] | None = None
) -> dict[str, float]:
    """Further scores of one prediction under their own names, each in [0, 1] and the best over all answers.

    `rougeL_rs` and `rougeLsum_rs` (package rouge-score) on English ROUGE sets, `clean_classification` on classification
    sets, nothing elsewhere. None of them reproduces LongBench's figures.

    Raises:
        ValueError: as `score_example`.
    """
    task, answers = _checked(dataset, pred, answers)
    text = _scored_part(task, pred)
    if task.metric == "rouge_score":
        scores = [rouge.rouge_score_package(text, answer) for answer in answers]
        return {name: max((s[name] for s in scores), default=0.0) for name in ("rougeL_rs", "rougeLsum_rs")}
    if task.metric == "classification_score":
        clean: Callable[..., float] = classification.clean_classification
        return {"clean_classification": max((clean(text, answer, all_classes) for answer in answers), default=0.0)}
    return {}


def _scored_part(task: Task, pred: str) -> str:
    return pred.lstrip("\n").split("\n")[0] if task.first_line else pred


def _checked(dataset: str, pred: str, answers: Sequence[str]) -> tuple[Task, list[str]]:
    task = get_task(dataset)
    if not isinstance(pred, str):
        raise ValueError(f"a prediction must be a string, got {type(pred).__name__}.")
    if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"answers must be a list of strings, got {answers!r}.")
    return task, list(answers)
