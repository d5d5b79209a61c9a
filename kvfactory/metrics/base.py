"""The registry of LongBench metrics and the signature they share.

A metric is `metric(prediction, answer, all_classes=None) -> float` in [0, 1] for ONE answer. The first-line rule and
the maximum over answers belong to `kvfactory.metrics.score_example`, not to a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfactory.registry import Registry

Metric = Callable[[str, str, Sequence[str] | None], float]
METRICS: Registry[Metric] = Registry("metric")
