"""Prefill and decode of one plan, through `kvfactory.decoder` as the runner drives it, but phase by phase.

`Decoder.run` interleaves prompts and steps; here rows are prefilled, kept, and then decoded with all of them in flight,
so that each phase has its own time and peak.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.timing import free_memory, gib, peak_memory, repeat_within, steady_ms, synchronize
from kvfactory.decoder import Decoder
from kvfactory.graph_support import graph_obstacle
from kvfactory.monkeypatch import attach_plan, detach, get_attachment
from kvfactory.plan import Plan
from kvfactory.rows import LiveRow, Request

SHARED_PREFILL = 4
"""Rows of a batch that one prompt pass fills: less device time, and no more full-length caches than this at once."""


@contextmanager
def attached(model: PreTrainedModel, plan: Plan, backend: str) -> Iterator[None]:
    """Attached within, with the fused operations that a run has; captured steps and pools are gone afterwards."""
    attachment = attach_plan(model, plan, backend)
    try:
        with attachment.fused():
            yield
    finally:
        detach(model)
        free_memory()


def prefill_rows(decoder: Decoder, ids: torch.Tensor, plans: list[Plan], new_tokens: int) -> list[LiveRow]:
    """One prompt pass -> a row per plan.

    Raises:
        Exception: what the pass or a compression raised.
    """
    request = Request(ids, new_tokens, 0, [], plans, example_id="benchmark")
    rows = list(decoder._prompt(request))
    for row in rows:
        if not isinstance(row, LiveRow):
            raise row[1]
    return rows


def stored(row: LiveRow) -> dict[str, Any]:
    """What a row holds after its prompt, and how unevenly over heads."""
    cache = row.output.cache
    kept = [count for layer in cache.kept_tokens for count in layer]
    held = row.output.prompt_bytes
    return {
        "bytes": held.used,
        "bytes_aux": held.aux,
        "bytes_full": cache.full_bytes(cache.prompt_len),
        "kept_min": min(kept),
        "kept_mean": round(sum(kept) / len(kept), 1),
        "kept_max": max(kept),
    }


def measure_prefill(
    model: PreTrainedModel, ids: torch.Tensor, plan: Plan, new_tokens: int, repeats: int, seconds: float
) -> tuple[dict[str, Any], LiveRow]:
    """Median seconds and peak of the prompt pass, compression included; the last repeat's row, ready to decode."""
    decoder = Decoder(model)
    rows: list[LiveRow] = []
    peaks: list[int | None] = []

    def once() -> float:
        rows.clear()
        with peak_memory(model.device) as peak:
            rows.extend(prefill_rows(decoder, ids, [plan], new_tokens))
        peaks.append(peak.extra)
        return rows[0].output.timing.prefill_s

    times = repeat_within(once, repeats, seconds)
    facts = {
        "prefill_s": round(statistics.median(times), 5),
        "prefill_all_s": [round(t, 5) for t in times],
        # The warm-up may hold workspaces that stay; the last run is like every later one.
        "peak_extra_gib": gib(peaks[-1]),
    }
    return facts | stored(rows[0]), rows[0]


def measure_decode(
    model: PreTrainedModel, ids: torch.Tensor, plan: Plan, new_tokens: int, rows: int, path: str, first: LiveRow | None
) -> dict[str, Any]:
    """Milliseconds of a step with `rows` rows of one prompt in flight, once all of them have entered.

    Args:
        path: graph or loop.
        first: a prefilled row to begin with.

    Raises:
        ValueError: `plan` cannot be replayed here.
    """
    if path == "graph" and (why := graph_obstacle(get_attachment(model), plan, model.device, model.dtype)):
        raise ValueError(f"no graph: {why}")
    with peak_memory(model.device) as peak:
        decoder = Decoder(model, rows, graph=path == "graph", keep_caches=False)
        marks: list[tuple[float, int]] = []
        count = decoder.counters.count_step

        def count_and_mark(in_flight: int) -> None:
            marks.append((time.perf_counter(), in_flight))
            count(in_flight)

        decoder.counters.count_step = count_and_mark
        waiting, entry_s, entered = [first] if first is not None else [], None, 0
        while entered < rows:
            # A pool holds all places: rows that enter it one by one never lie in memory twice. The loop would copy
            # its batch for each.
            size = 1 if path == "graph" else rows - entered
            while len(waiting) < size:
                copies = [dataclasses.replace(plan) for _ in range(min(SHARED_PREFILL, rows - entered - len(waiting)))]
                waiting += prefill_rows(decoder, ids, copies, new_tokens)
            entering, waiting = waiting[:size], waiting[size:]
            synchronize(model.device)
            start = time.perf_counter()
            for _, error, _ in decoder._enter(entering):
                raise error
            synchronize(model.device)
            entry_s = time.perf_counter() - start if entry_s is None else entry_s
            entered += len(entering)
            del entering
        while decoder._in_flight:
            for engine in decoder._engines:
                for _, row, _ in engine.step() if engine.live else ():
                    if isinstance(row, Exception):
                        raise row
    return {
        "decode_ms": steady_ms(marks, rows),
        # Building the pool, warming up and capturing; without a graph, regrouping.
        "entry_s": round(entry_s, 4),
        "captures": decoder.counters.captures,
        "decode_peak_extra_gib": gib(peak.extra),
    }
