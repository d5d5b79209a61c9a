"""Merging of values as cache merging (CaM) does it: a token's value is spread over tokens that come after it.

Hs stored heads, S prompt tokens, D head dim. In the banded form the sources are the tokens [first, last) in ascending
order and each is added to the next `span` tokens, merged values included, so that values cascade.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MERGE_BLOCK = 128
"""Tokens solved at once by `merge_banded`."""


def banded_probabilities(mean_attention: torch.Tensor, start: int, window: int) -> torch.Tensor:
    """CAM's merge probabilities in the form of Zefan-Cai/KVCache-Factory (pyramidkv_utils.py, CAMKVCluster).

    A token's attention over the largest attention among the first `start` tokens and the `window` tokens from itself
    on, so the probability is at most 1; 0 where all of these are 0.

    Args:
        mean_attention: (B, Hs, S) not negative.

    Returns:
        (B, Hs, S - window - start) float32, for the tokens start .. S - window - 1.
    """
    a = mean_attention.float()
    S = a.shape[-1]
    sources = a[..., start : S - window]
    largest = F.max_pool1d(a[..., start : S - 1], window, stride=1)
    if start:
        largest = torch.maximum(largest, a[..., :start].amax(dim=-1, keepdim=True))
    return torch.where(largest > 0, sources / largest.clamp_min(torch.finfo(torch.float32).tiny), 0.0).clamp(0, 1)


def merge_banded(
    v: torch.Tensor, draws: torch.Tensor, first: int, span: int, *, cascade: bool = True, block: int = MERGE_BLOCK
) -> torch.Tensor:
    """Adds draws[p] * v'[p] / span to each of the `span` tokens after p, for p = first, first + 1, ...

    With v' = v + T v', T strictly lower triangular and banded, this is one triangular solve per block of tokens, exact
    in real arithmetic; in half precision it rounds once where the token by token loop rounds up to `span` times.

    Args:
        v: (B, Hk, S, D); left unchanged.
        draws: (B, Hs, n) with first + n + span <= S, usually 0 or 1; query head h merges a copy of kv head h // G.
        cascade: sources carry what was merged into them before; else the original value (v' = v + T v).
        block: tokens per solve.

    Returns:
        (B, Hs, S, D) in v's dtype.
    """
    B, Hk, S, D = v.shape
    Hs, n = draws.shape[1:]
    assert first + n + span <= S, (first, n, span, S)
    exact = torch.promote_types(v.dtype, torch.float32)
    weight = F.pad(draws.to(exact) / span, (first, S - first - n))  # (B, Hs, S), 0 where nothing is merged
    copies = Hs // Hk
    out = v.new_empty(B, Hs, S, D)
    out[:, :, :first] = v[:, :, :first].repeat_interleave(copies, dim=1)
    carry = out[:, :, max(0, first - span) : first].to(exact)  # sources that still reach into the next block
    for begin in range(first, S, block):
        end = min(begin + block, S)
        rows = v[:, :, begin:end].to(exact).repeat_interleave(copies, dim=1)
        before = begin - carry.shape[2]
        distance = torch.arange(begin, end, device=v.device)[:, None] - torch.arange(before, end, device=v.device)
        band = ((distance > 0) & (distance <= span)) * weight[:, :, None, before:end]  # (B, Hs, rows, sources)
        merged = rows + band[..., : begin - before] @ carry
        inside = band[..., begin - before :]
        if cascade:
            identity = torch.eye(end - begin, dtype=exact, device=v.device)
            merged = torch.linalg.solve_triangular(identity - inside, merged, upper=False, unitriangular=True)
        else:
            merged = merged + inside @ rows
        out[:, :, begin:end] = merged
        carry = torch.cat([carry, merged if cascade else rows], dim=2)[:, :, -span:]
    return out


def merge_loop(v: torch.Tensor, draws: torch.Tensor, first: int, span: int) -> torch.Tensor:
    """`merge_banded` token by token in v's own precision, with the rounding of the original's loop."""
    out = v.repeat_interleave(draws.shape[1] // v.shape[1], dim=1)
    weight = draws.to(v.dtype)
    for step in range(draws.shape[2]):
        p = first + step
        out[:, :, p + 1 : p + 1 + span] += (weight[:, :, step, None] * out[:, :, p] / span).unsqueeze(2)
    return out


def evicted_probabilities(mean_attention: torch.Tensor, kept: torch.Tensor, span: int) -> torch.Tensor:
    """CaM's probabilities at prompt time: attention over the mean attention of the next `span` kept tokens, at most 1.

    Args:
        mean_attention: (B, Hs, S) not negative.
        kept: (B, Hs, n) ascending positions; the last one is S - 1.

    Returns:
        (B, Hs, S) float32, 0 for kept tokens and where the targets have no attention.
    """
    a = mean_attention.float()
    at_kept = a.gather(-1, kept)
    ahead = F.pad(at_kept, (0, span - 1)).unfold(-1, span, 1).sum(dim=-1) / _targets(kept, span)
    mean = ahead.gather(-1, _first_target(kept, a.shape[-1]))
    ratio = torch.where(mean > 0, a / mean.clamp_min(torch.finfo(torch.float32).tiny), 0.0).clamp(0, 1)
    return ratio.scatter(-1, kept, 0.0)


def merge_evicted(v: torch.Tensor, kept: torch.Tensor, draws: torch.Tensor, span: int) -> torch.Tensor:
    """Spreads the value of every drawn evicted token evenly over the next `span` kept tokens, fewer at the end.

    Evicted tokens are never targets, so nothing cascades: sources with the same next kept token are summed, and the
    sums are spread.

    Args:
        v: (B, Hk, S, D); kept (B, Hs, n) ascending, the last one S - 1; draws (B, Hs, S), those of kept tokens do not
            count.

    Returns:
        (B, Hs, n, D) merged values of the kept tokens, in v's dtype.
    """
    B, Hk, S, D = v.shape
    Hs, n = kept.shape[1:]
    exact = torch.promote_types(v.dtype, torch.float32)
    values = v.to(exact).repeat_interleave(Hs // Hk, dim=1)
    given = draws.to(exact).scatter(-1, kept, 0.0).unsqueeze(-1) * values
    target = _first_target(kept, S).unsqueeze(-1).expand(-1, -1, -1, D)
    sums = values.new_zeros(B, Hs, n, D).scatter_add_(2, target, given) / _targets(kept, span).unsqueeze(-1)
    merged = values.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, D))
    for step in range(min(span, n)):
        merged[:, :, step:] += sums[:, :, : n - step]
    return merged.to(v.dtype)


def _targets(kept: torch.Tensor, span: int) -> torch.Tensor:
    """(n,) how many kept tokens, at most `span`, there are from each kept token on."""
    n = kept.shape[-1]
    return torch.arange(n, 0, -1, device=kept.device).clamp_max(span)


def _first_target(kept: torch.Tensor, prompt_len: int) -> torch.Tensor:
    """(B, Hs, S) index into `kept` of the first kept token at or after each position."""
    positions = torch.arange(prompt_len, device=kept.device).expand(*kept.shape[:2], prompt_len)
    return torch.searchsorted(kept.contiguous(), positions.contiguous())
