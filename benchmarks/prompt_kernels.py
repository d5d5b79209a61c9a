"""Kernels over whole prompts: scores, and the attention they are measured against."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_bench import Bench
from benchmarks.timing import wall_seconds
from kvfactory.backends import sdpa
from kvfactory.ops import scores


def _prompt(bench: Bench, length: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    q = bench.normal(1, bench.heads, length, bench.head_dim)
    return q, bench.normal(1, bench.kv_heads, length, bench.head_dim), bench.head_dim**-0.5


def bench_window(bench: Bench, length: int) -> None:
    """Windowed scores of SnapKV's kind: the keys read twice, once per kernel."""
    q, k, scale = _prompt(bench, length)
    for window in bench.args.windows:
        bytes_ = 2 * k.numel() * k.element_size() + bench.heads * (length - window) * 4
        flop = 4.0 * bench.heads * window * length * bench.head_dim
        bench.record(
            "window_scores",
            {"length": length, "window": window},
            lambda window=window: [lambda: scores.window_scores(q, k, window, scale=scale)],
            bytes_,
            flop,
        )


def bench_columns(bench: Bench, length: int) -> None:
    """Column sums over all rows, as H2O takes them: two causal products."""
    q, k, scale = _prompt(bench, length)
    bench.record(
        "column_sums",
        {"length": length},
        lambda: [lambda: scores.column_sums(q, k, scale=scale)],
        2 * (q.numel() + k.numel()) * q.element_size(),
        2.0 * bench.heads * length**2 * bench.head_dim,
    )


def bench_prefill(bench: Bench, length: int) -> None:
    """Causal attention of one layer by the libraries, the yardstick for the score kernels."""
    q, k, scale = _prompt(bench, length)
    flop, bytes_ = 2.0 * bench.heads * length**2 * bench.head_dim, 2 * (q.numel() + k.numel()) * q.element_size()
    facts = {"length": length}

    def grouped() -> list:
        return [lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)]

    bench.record("sdpa causal, grouped", facts, grouped, bytes_, flop)
    repeated = k.repeat_interleave(bench.heads // bench.kv_heads, dim=1)
    bench.record(
        "sdpa causal, repeated",
        facts,
        lambda: [lambda: F.scaled_dot_product_attention(q, repeated, repeated, is_causal=True)],
        bytes_,
        flop,
    )
    if (flash := bench.fa3()) is not None:
        a, b = q.transpose(1, 2), k.transpose(1, 2)
        bench.record(
            "FA3 causal", facts, lambda: [lambda: flash(a, b, b, softmax_scale=scale, causal=True)], bytes_, flop
        )


def bench_lengths(bench: Bench, length: int) -> None:
    """Attention to prompts, and of single tokens, of lengths that the process has not met, as launched; one layer.

    What sdpa plans per length shows here alone: graphs and repeated calls are timed after it.
    """

    def median_us(attend: Callable[..., Any], first: int, prompt: bool) -> float:
        times = []
        for n in (max(2, first - 7 * i) for i in range(5)):
            q = bench.normal(1, n if prompt else 1, bench.heads, bench.head_dim).transpose(1, 2)
            k = bench.normal(1, n, bench.kv_heads, bench.head_dim).transpose(1, 2)
            times.append(wall_seconds(lambda q=q, k=k: attend(q, k, k), bench.device))
        return statistics.median(times) * 1e6

    scale = bench.head_dim**-0.5
    ways = {
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True),
        "kvfactory's sdpa": lambda q, k, v: sdpa.attend(q, k, v, scale=scale, causal=q.shape[2] > 1),
    }
    for (i, (name, attend)), prompt in itertools.product(enumerate(ways.items()), (True, False)):
        attend(*[bench.normal(1, 2, 64, bench.head_dim)] * 3)  # loads libraries
        kernel = f"{name}, {'prompt' if prompt else 'one token'} at a new length"
        first = length - 50 * i - 1
        bench.log.case(
            {"kind": "kernel", "kernel": kernel, "length": length},
            lambda attend=attend, first=first, prompt=prompt: {"us": round(median_us(attend, first, prompt), 1)},
        )
