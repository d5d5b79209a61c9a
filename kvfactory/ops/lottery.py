"""Sampling without replacement with weights (Plackett-Luce) as one top-k over perturbed logits.

Drawing `count` items one after the other, each with probability softmax(logits) over those that are left, gives the
same distribution as the `count` largest of logits + Gumbel noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvfactory.ops.select import top_positions


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise, float32, on the generator's device."""
    exponential = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float32).tiny).log()


def draw_positions(
    scores: torch.Tensor,
    count: int,
    temperature: float,
    generator: torch.Generator,
    *,
    taken: torch.Tensor | None = None,
    sampler: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`count` different positions of every head, drawn with probability softmax(scores / temperature).

    Every row of a batch draws with the same noise, so that it comes out as it would alone; heads draw independently.

    Args:
        scores: (B, Hs, P) float32.
        temperature: above 0; infinity draws evenly.
        taken: (B, Hs, n) positions that cannot be drawn, n + count <= P.
        sampler: instead of the noise: a function of the probabilities (B, Hs, P) whose `count` largest results are
            drawn, ties to the lower position.

    Returns:
        (B, Hs, count) int64, ascending.
    """
    logits = torch.zeros_like(scores) if math.isinf(temperature) else scores / temperature
    if taken is not None:
        logits = logits.scatter(-1, taken, -torch.inf)
    if sampler is None:
        keys = logits + gumbel(logits.shape[1:], generator).to(logits.device)
    else:
        keys = sampler(logits.softmax(dim=-1)).float().masked_fill(logits == -torch.inf, -torch.inf)
    return top_positions(keys, count)
