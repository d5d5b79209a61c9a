"""Budgets that differ between heads: AdaKV's counts from one flat ranking, and selection with a count per head.

Scores are (B, Hs, P): batch rows, stored heads, past tokens (prompt tokens before the window).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch

from kvfactory.ops.scores import attention_rows, window_scores


def window_means(
    q: torch.Tensor, k: torch.Tensor, window: int, *, scale: float, score_dtype: str = "float32"
) -> torch.Tensor:
    """Attention that the last `window` queries give to each earlier token, averaged over the window.

    Returns:
        (B, Hq, S - window), float32 or q's dtype.
    """
    S = q.shape[2]
    if score_dtype == "float32":
        return window_scores(q, k, window, scale=scale) / window
    rows = attention_rows(q, k, S - window, S, scale=scale, score_dtype=score_dtype)
    return rows[..., : S - window].mean(dim=2)


class Ranking(NamedTuple):
    """A head's tokens from the best score to the worst, equal scores by position.

    Attributes:
        scores: (B, Hs, P) float32, descending along the last dim; order: (B, Hs, P) int64 positions of those scores.
    """

    scores: torch.Tensor
    order: torch.Tensor


def rank_tokens(scores: torch.Tensor) -> Ranking:
    """Sorts (B, Hs, P) scores of any float dtype, no NaN: once, for the functions below."""
    return Ranking(*scores.float().sort(dim=-1, descending=True, stable=True))


def retained_mass(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """(B, Hs, 1): the share of each head's total score that its `count` best tokens hold; 0 where the total is 0.

    Args:
        ranked: (B, Hs, P), descending.
    """
    best = ranked[..., :count].sum(dim=-1, keepdim=True)
    total = ranked.sum(dim=-1, keepdim=True)
    return best / total.clamp_min(torch.finfo(torch.float32).tiny)


def flat_ranking_counts(
    ranked: torch.Tensor, base: int, *, normalize: bool = False, protected: int = 0
) -> torch.Tensor:
    """How many of each head's tokens are among the Hs * base best of all heads together; ties go to the lower head.

    Args:
        ranked: (B, Hs, P) scores, descending in each head, float32, not negative.
        base: past tokens per head on the mean of the heads, at most P.
        normalize: weigh each head's scores by the mass its `base` best tokens hold, which demotes diffuse heads.
        protected: so many best tokens of every head come first, whatever their score.

    Returns:
        (B, Hs) int64 on the scores' device; every row sums to Hs * base.
    """
    B, Hs, P = ranked.shape
    if base == 0:
        return torch.zeros(B, Hs, dtype=torch.int64, device=ranked.device)
    weighed = ranked * retained_mass(ranked, base) if normalize else ranked.clone()
    weighed[..., :protected] = torch.inf
    least = weighed.flatten(1).topk(Hs * base, dim=-1, sorted=False).values.amin(dim=-1).view(B, 1, 1)
    above, tied = (weighed > least).sum(dim=-1), (weighed == least).sum(dim=-1)
    missing = Hs * base - above.sum(dim=-1, keepdim=True)
    lower = tied.cumsum(dim=-1) - tied  # tokens of lower heads that tie, which go first
    return above + torch.minimum((missing - lower).clamp_min(0), tied)


def mix_with_uniform(adaptive: torch.Tensor, base: int, floor: float, rounding: str = "round") -> torch.Tensor:
    """(1 - floor) * adaptive + floor * uniform budgets, the safeguard of AdaKV's paper.

    Args:
        adaptive: (B, Hs) int64 counts that sum to Hs * base in every row.
        rounding: "round" as published: the uniform part is cut to a whole number and each head is rounded half to
            even in float32, so up to Hs * (frac(base * floor) + 1/2) tokens are lost or up to Hs / 2 gained; "exact":
            largest remainders, ties to the lower head, every row sums to Hs * base.

    Returns:
        (B, Hs) int64.
    """
    if rounding == "round":
        return torch.round(adaptive.float() * (1 - floor) + int(base * floor)).long()
    share = as_fraction(floor)
    scaled = adaptive * (share.denominator - share.numerator) + base * share.numerator  # counts x denominator
    counts = scaled // share.denominator
    remainder = scaled % share.denominator
    missing = adaptive.shape[1] * base - counts.sum(dim=1, keepdim=True)
    order = torch.sort(remainder, dim=1, descending=True, stable=True).indices
    rank = torch.arange(adaptive.shape[1], device=adaptive.device).expand_as(order)
    return counts.scatter_add(1, order, (rank < missing).long())


def as_fraction(share: float) -> Fraction:
    """A share as the decimal number the user typed: 0.29 is 29/100, not the nearest binary fraction."""
    return Fraction(repr(float(share))).limit_denominator(10**6)


def ragged_positions(
    order: torch.Tensor, counts: torch.Tensor, window: int, size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `counts` positions in the order of every head, then the window.

    Args:
        order: (B, Hs, P) int64, each head a permutation of the P positions in front of the window.
        counts: (B, Hs) int64 on the same device, 0 to P.
        size: a number of positions that is enough; the exact one when not given, for which the host waits.

    Returns:
        (size,) int64 positions, segments (row, head) back to back and ascending inside, zeros behind the last one; and
        (B * Hs,) int64 segment lengths; both on the same device.
    """
    B, Hs, P = order.shape
    device, S = order.device, P + window
    lengths = counts.flatten() + window
    if size is None:
        size = int(lengths.sum())
    best = torch.arange(P, device=device) < counts.unsqueeze(-1)  # by rank
    chosen = torch.ones(B, Hs, S, dtype=torch.bool, device=device)
    chosen[..., :P].scatter_(-1, order, best)
    chosen = chosen.flatten()
    slots = torch.where(chosen, chosen.cumsum(0) - 1, size)  # what is not chosen goes behind the end
    positions = torch.arange(S, device=device).repeat(B * Hs)
    indices = torch.zeros(size + 1, dtype=torch.int64, device=device)
    return indices.scatter_(0, slots, positions)[:size], lengths
