"""Progress of one dataset: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Shows dataset, examples done, running score x100, seconds per example and time left.

    Args:
        dataset: name shown.
        total: number of examples.
        scores: scores in [0, 1] of the examples that an earlier run did; they count as done and not for the speed.
        every: examples between two lines where `stream` is no terminal.
        stream: where to; standard error by default, so that standard output stays the caller's.
    """

    def __init__(
        self, dataset: str, total: int, scores: Iterable[float] = (), every: int = 20, stream: TextIO | None = None
    ):
        self.dataset = dataset
        self.total = total
        self.every = max(1, every)
        self.stream = sys.stderr if stream is None else stream
        before = list(scores)
        self.done = self._before = len(before)
        self.failed = 0
        self._scored = len(before)
        self._sum = sum(before)
        self._start = time.perf_counter()
        self._bar = None
        if self.stream.isatty():
            shape = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{rate_inv_fmt}, {remaining} left{postfix}]"
            self._bar = tqdm(
                total=total, initial=self.done, desc=dataset, unit="ex", file=self.stream, bar_format=shape,
                dynamic_ncols=True, smoothing=0.1,
            )  # fmt: skip
            self._bar.set_postfix_str(self._state(), refresh=True)

    @property
    def score(self) -> float | None:
        """Mean score x100 of the examples that have one."""
        return 100 * self._sum / self._scored if self._scored else None

    def step(self, score: float | None) -> None:
        """One more example is done; `score` in [0, 1], None when it failed."""
        self.done += 1
        if score is None:
            self.failed += 1
        else:
            self._scored += 1
            self._sum += score
        if self._bar is not None:
            self._bar.set_postfix_str(self._state(), refresh=False)
            self._bar.update(1)
        elif (self.done - self._before) % self.every == 0 and self.done < self.total:
            self._line()

    def _state(self) -> str:
        score = "-" if self.score is None else f"{self.score:.2f}"
        return f"score {score}" + (f", {self.failed} failed" if self.failed else "")

    def _line(self) -> None:
        fresh = self.done - self._before
        text = f"{self.dataset} {self.done}/{self.total}, {self._state()}"
        if fresh:
            each = (time.perf_counter() - self._start) / fresh
            text += f", {each:.2f} s/example"
            if self.done < self.total:
                text += f", {tqdm.format_interval(each * (self.total - self.done))} left"
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """End the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
