"""One layer's shape, its ceilings, and how a kernel is timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import arguments
from benchmarks.timing import Log, kernel_us

CYCLED_BYTES = 600 * 10**6
"""Inputs are rotated until they exceed ten times the largest L2 cache in use."""


class Bench:
    """The shape of one layer and where it runs."""

    def __init__(self, args: argparse.Namespace, log: Log, device: torch.device):
        self.args, self.log, self.device = args, log, device
        self.dtype = arguments.dtype_of(args)
        self.heads, self.kv_heads, self.head_dim = args.heads, args.kv_heads, args.head_dim
        self.ceilings: dict[str, float] = {}
        self.random = torch.Generator(device).manual_seed(args.seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device, dtype=self.dtype)

    def record(self, name: str, facts: dict[str, Any], make: Callable[[], list], bytes_: float, flop: float) -> None:
        """One line: time, rates, and the share of the ceiling that is nearer."""

        def measure() -> dict[str, Any]:
            us = kernel_us(make(), self.device, self.args.repeats)
            found = {
                "us": round(us, 3),
                "tb_per_s": round(bytes_ / us / 1e6, 4),
                "tflop_per_s": round(flop / us / 1e6, 3),
            }
            if self.ceilings.keys() >= {"copy", "matmul"}:
                least = max(bytes_ / self.ceilings["copy"], flop / self.ceilings["matmul"])
                found["of_ceiling"] = round(least / us, 4)
            return found

        self.log.case({"kind": "kernel", "kernel": name} | facts, measure)

    def copies(self, size: int) -> range:
        """How many sets of inputs of `size` bytes to rotate among."""
        return range(max(1, min(64, -(-CYCLED_BYTES // size))) if self.device.type == "cuda" else 1)

    def ceiling(self, name: str) -> None:
        """Measures what a copy or a matrix product reaches here, in bytes or operations per microsecond."""
        small = self.device.type == "cpu"
        if name == "copy":
            source = self.normal(1 << (20 if small else 30))
            target = torch.empty_like(source)
            work = 2 * source.numel() * source.element_size()
            call = lambda: torch.neg(source, out=target)  # noqa: E731  # a copy node of a graph is a third slower
        else:
            n = 256 if small else 8192
            a, b = self.normal(n, n), self.normal(n, n)
            work = 2 * n**3
            call = lambda: a @ b  # noqa: E731

        def measure() -> dict[str, Any]:
            us = kernel_us([call], self.device, 10)
            self.ceilings[name] = work / us
            return {"us": round(us, 2), "tb_per_s" if name == "copy" else "tflop_per_s": round(work / us / 1e6, 3)}

        self.log.case({"kind": "ceiling", "kernel": name}, measure)

    def fa3(self) -> Callable[..., Any] | None:
        """FlashAttention 3, where it is installed and takes the dtype."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        if self.device.type != "cuda" or not half or find_spec("fa3_fwd_interface") is None:
            return None
        from fa3_fwd_interface import flash_attn_func

        return flash_attn_func
