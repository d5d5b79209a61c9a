"""What the methods are to reach on one H200 with the Llama-3-8B shape in bf16, and whether records of a run do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

EVICTING = ("SnapKV", "PyramidKV", "H2O", "StreamingLLM", "L2Norm", "AdaKV", "HeadKV")
CHEAP_PREFILL = tuple(name for name in EVICTING if name != "H2O")
KVPRESS_PEAK_GIB = {
    ("SnapKV", 8192): 1.16,
    ("SnapKV", 32768): 3.89,
    ("AdaKV", 8192): 1.91,
    ("AdaKV", 32768): 7.64,
    ("StreamingLLM", 8192): 1.16,
    ("L2Norm", 8192): 1.16,
}
"""Measured once on an H200 with kvpress 0.5.5; a run with kvpress beside ours is compared with that run's figures."""

BUDGET = 2048
PROMPTS = (8192, 32768, 131072)


class Outcome(NamedTuple):
    """One target: the figure, its limit, and met, missed or "not measured"."""

    target: str
    method: str
    value: float | None
    limit: float
    verdict: str


def _outcome(target: str, method: str, value: float | None, limit: float | None) -> Outcome:
    if value is None or limit is None:
        return Outcome(target, method, value, limit, "not measured")
    return Outcome(target, method, round(value, 4), limit, "met" if value <= limit else "missed")


class Figures:
    """The figures of a run by case; a case measured twice counts with its last figure."""

    def __init__(self, records: Iterable[dict[str, Any]]):
        self._by_case: dict[tuple, dict[str, Any]] = {}
        for record in records:
            if record.get("kind") != "case" or "error" in record:
                continue
            case = tuple(record.get(name) for name in ("system", "method", "prompt", "rows"))
            if record["method"] != "FullKV" and record.get("budget") != BUDGET:
                continue
            if record.get("granularity") not in (None, "kv_head"):
                continue
            self._by_case.setdefault(case, {}).update(
                {k: v for k, v in record.items() if k in ("prefill_s", "peak_extra_gib") and v is not None}
            )
            if record.get("decode_ms") is not None and record.get("decode") in (None, "graph"):
                self._by_case[case]["decode_ms"] = record["decode_ms"]

    def get(self, name: str, method: str, prompt: int, rows: int = 1, system: str = "kvfactory") -> float | None:
        return self._by_case.get((system, method, prompt, rows), {}).get(name)

    def ratio(self, name: str, method: str, other: str, prompt: int, rows: int = 1, system: str = "kvfactory"):
        """`method` over `other`, which ran in `system`; None where one of them is missing."""
        a, b = self.get(name, method, prompt, rows), self.get(name, other, prompt, rows, system)
        return None if a is None or b is None else a / b


def judge(records: Iterable[dict[str, Any]]) -> list[Outcome]:
    """Every target of bench_methods.py, at kv_head and under graph replay."""
    figures, found = Figures(records), []
    for method in EVICTING:
        found.append(_outcome("decode ms/token, 8192 -> 2048", method, figures.get("decode_ms", method, 8192), 7.5))
    for method in EVICTING:
        value = figures.ratio("decode_ms", method, "FullKV", 131072)
        found.append(_outcome("decode / our FullKV, 131072 -> 2048", method, value, 0.70))
    sixteen = ("SnapKV", 32768, 16)
    found += [
        _outcome("16 rows: step ms, 32768 -> 2048", "SnapKV", figures.get("decode_ms", *sixteen), 10.0),
        _outcome(
            "16 rows: step / our FullKV, 32768 -> 2048",
            "SnapKV",
            figures.ratio("decode_ms", "SnapKV", "FullKV", 32768, 16),
            0.50,
        ),
    ]
    for method in ("AdaKV", "HeadKV"):
        value = figures.ratio("decode_ms", method, "SnapKV", 8192)
        found.append(_outcome("decode / SnapKV, 8192 -> 2048", method, value, 1.15))
    for prompt in PROMPTS:
        for method in (*CHEAP_PREFILL, "H2O"):
            limit = 1.6 if method == "H2O" else 1.03
            for system, label in (("kvfactory", "our"), ("transformers", "transformers'")):
                value = figures.ratio("prefill_s", method, "FullKV", prompt, system=system)
                found.append(_outcome(f"prefill / {label} FullKV, {prompt}", method, value, limit))
    for (method, prompt), measured in KVPRESS_PEAK_GIB.items():
        limit = figures.get("peak_extra_gib", method, prompt, system="kvpress") or measured
        value = figures.get("peak_extra_gib", method, prompt)
        found.append(_outcome(f"prefill peak GiB at most kvpress's, {prompt}", method, value, limit))
    for method in EVICTING:
        value = figures.get("peak_extra_gib", method, 131072)
        found.append(_outcome("prefill peak GiB, 131072", method, value, 32.0))
    return found
