"""Timing and records: medians after warm-up, peaks over what was there before, one JSON line per case."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfactory.loading import hardware
from kvfactory.reports.environment import collect_environment

GIB = 2**30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        for i in range(torch.cuda.device_count()):
            torch.cuda.synchronize(i)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wall_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """One call, device work included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def repeat_within(
    call: Callable[[], float], repeats: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Up to `repeats` results of `call` after one warm-up; none is begun once `seconds` are over, but the first is."""
    start = clock()
    call()
    results = [call()]
    while len(results) < repeats and clock() - start < seconds:
        results.append(call())
    return results


def kernel_us(calls: list[Callable[[], Any]], device: torch.device, repeats: int = 20, seconds: float = 2.0) -> float:
    """Median microseconds of one of `calls`, which are run in turn so that their inputs leave the L2 cache.

    Up to `repeats` rounds, none begun after `seconds`.

    On CUDA the round is captured and replayed, which leaves out what launches cost on the host; elsewhere wall time.
    """
    if device.type != "cuda":
        calls[0]()
        rounds = [wall_seconds(lambda: [call() for call in calls], device) for _ in range(3)]
        return statistics.median(rounds) / len(calls) * 1e6
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    began = time.perf_counter()
    while not times or (len(times) < repeats and time.perf_counter() - began < seconds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls) * 1e3)
    return statistics.median(times)


@dataclass
class Peak:
    """Device memory of a region, in bytes; None off CUDA.

    Attributes:
        before: allocated when the region began.
        extra: the most that was allocated beyond that.
    """

    before: int | None = None
    extra: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Summed over all devices, each at its own peak."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return
    every = range(torch.cuda.device_count())
    synchronize(device)
    for i in every:
        torch.cuda.reset_peak_memory_stats(i)
    peak.before = sum(torch.cuda.memory_allocated(i) for i in every)
    yield peak
    synchronize(device)
    peak.extra = sum(torch.cuda.max_memory_allocated(i) for i in every) - peak.before


def gib(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 3)


def steady_ms(marks: list[tuple[float, int]], rows: int) -> float | None:
    """Median milliseconds a step over the middle half of the steps that all `rows` rows took.

    Args:
        marks: (seconds at which a step was done, rows in it).
    """
    steps = [b[0] - a[0] for a, b in zip(marks, marks[1:], strict=False) if a[1] == b[1] == rows]
    middle = steps[len(steps) // 4 : len(steps) - len(steps) // 4]
    return round(statistics.median(middle) * 1e3, 4) if middle else None


class Log:
    """JSON lines, each written as soon as it is known, and one short line of progress on standard error for each.

    Attributes:
        records: all lines so far; failed: how many cases ended in an error.
    """

    def __init__(self, path: str | None, device: torch.device):
        self.records: list[dict[str, Any]] = []
        self.failed = 0
        self._start = time.perf_counter()
        self._file = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
        facts = collect_environment(hardware(device.type))
        self.write({"kind": "environment", "date": time.strftime("%Y-%m-%d")} | facts)

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        line = json.dumps(record)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()
        if record["kind"] != "environment":
            line = line if len(line) < 600 else line[:600] + " ..."
            print(f"[{time.perf_counter() - self._start:6.1f} s] {line}", file=sys.stderr, flush=True)

    def case(self, facts: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> bool:
        """Writes `facts` with what `measure` returns, or with its error: one case does not end a benchmark."""
        try:
            record = facts | measure()
        except Exception as error:
            self.failed += 1
            if not isinstance(error, (ValueError, torch.OutOfMemoryError)):
                traceback.print_exc()
            record = facts | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
        self.write(record)
        free_memory()
        return "error" not in record


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; None is an empty cell, floats have three significant decimals."""
    cells = [["" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
