"""A record of the sample suite in LongBench's eight fields."""

from __future__ import annotations

import hashlib
import json

FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")


def record(
    dataset: str,
    context: str,
    answers: list[str],
    question: str = "",
    language: str = "en",
    all_classes: list[str] | None = None,
) -> dict:
    """The record; `length` counts characters for Chinese and blank-separated words otherwise, as LongBench does.

    `_id` is the SHA-1 (40 hex characters) of what the model is asked and what is right, so it changes with them.
    """
    texts = [context, question, *answers]
    length = sum(len(text) if language == "zh" else len(text.split()) for text in texts)
    digest = hashlib.sha1(json.dumps([dataset, *texts], ensure_ascii=False).encode("utf-8")).hexdigest()
    values = (question, context, answers, length, dataset, language, all_classes, digest)
    return dict(zip(FIELDS, values, strict=True))


def as_lines(records: list[dict]) -> bytes:
    """JSON Lines in UTF-8, one record a line."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records).encode("utf-8")
