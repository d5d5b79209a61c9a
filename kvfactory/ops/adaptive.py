"""Budgets that differ between heads: AdaKV's counts from one flat ranking, and selection with a count per head.

Scores are (B, Hs, P): batch rows, stored heads, past tokens (prompt tokens before the window).
"""

from __future__ import annotations

from fractions import Fraction

import torch

from kvfactory.ops.scores import attention_rows, window_scores
from kvfactory.ops.select import rank_keys, top_positions


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


def retained_mass(scores: torch.Tensor, count: int) -> torch.Tensor:
    """(B, Hs, 1): the share of each head's total score that its `count` best tokens hold; 0 where the total is 0."""
    best = scores.float().topk(count, dim=-1).values.sum(dim=-1, keepdim=True)
    total = scores.float().sum(dim=-1, keepdim=True)
    return best / total.clamp_min(torch.finfo(torch.float32).tiny)


def flat_ranking_counts(
    scores: torch.Tensor, base: int, *, normalize: bool = False, protected: int = 0
) -> torch.Tensor:
    """How many of each head's tokens are among the Hs * base best of all heads together; ties go to the lower head.

    Args:
        scores: float, not negative, no NaN.
        base: past tokens per head on the mean of the heads, at most P.
        normalize: weigh each head's scores by the mass its `base` best tokens hold, which demotes diffuse heads.
        protected: so many best tokens of every head come first, whatever their score.

    Returns:
        (B, Hs) int64 on the scores' device; every row sums to Hs * base.
    """
    B, Hs, P = scores.shape
    weighed = scores.float() * retained_mass(scores, base) if normalize else scores.float()
    if protected:
        best = top_positions(scores, protected)
        weighed = weighed.scatter(-1, best, torch.inf)
    # The position inside a head does not change a count, so the flat position is the whole tie rule.
    chosen = rank_keys(weighed.reshape(B, Hs * P)).topk(Hs * base, dim=-1, sorted=False).indices
    counts = torch.zeros(B, Hs, dtype=torch.int64, device=scores.device)
    return counts.scatter_add_(1, chosen // P, torch.ones_like(chosen))


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
    scores: torch.Tensor, counts: torch.Tensor, prompt_len: int, window: int, size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `counts` best tokens of every head, then the window; ties go to the lower position.

    Args:
        scores: (B, Hs, P) float with P = prompt_len - window, no NaN.
        counts: (B, Hs) int64 on the scores' device, 0 to P.
        size: a number of positions that is enough; the exact one when not given, for which the host waits.

    Returns:
        (size,) int64 positions, segments (row, head) back to back and ascending inside, zeros behind the last one; and
        (B * Hs,) int64 segment lengths; both on the scores' device.
    """
    B, Hs, P = scores.shape
    device = scores.device
    lengths = counts.flatten() + window
    if size is None:
        size = int(lengths.sum())
    order = scores.float().sort(dim=-1, descending=True, stable=True).indices
    best = torch.arange(P, device=device) < counts.unsqueeze(-1)  # by rank
    chosen = torch.ones(B, Hs, prompt_len, dtype=torch.bool, device=device)
    chosen[..., :P].scatter_(-1, order, best)
    starts = (lengths.cumsum(0) - lengths).view(B, Hs, 1)
    slots = torch.where(chosen, starts + chosen.cumsum(-1) - 1, size)  # what is not chosen goes behind the end
    positions = torch.arange(prompt_len, device=device).expand(B, Hs, prompt_len)
    indices = torch.zeros(size + 1, dtype=torch.int64, device=device)
    return indices.scatter_(0, slots.flatten(), positions.flatten())[:size], lengths
