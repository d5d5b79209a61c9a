"""What the last query rows of a prompt say about each token besides plain causal sums. No S x S matrix is held.

Fused kernels take over where `kvfactory.kernels.dispatch` has them run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvfactory.ops.scores import SCORE_BLOCK_BYTES, attention_rows, fused_scores

BELOW_AVERAGE = 1 - 1e-6
"""A weight times the number of visible tokens below this is low; the gap keeps an exactly even row from counting."""


def _blocks(q: torch.Tensor, first_row: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    B, Hq, S, _ = q.shape
    block = max(1, block_bytes // (4 * B * Hq * S))
    for start in range(first_row, S, block):
        yield start, min(start + block, S)


def low_weight_counts(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int, block_bytes: int = SCORE_BLOCK_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often the rows [first_row, S) give a token less than an even share, and how much they give it.

    Row i sees i + 1 tokens; its weight for a token is low when it is below 1 / (i + 1).

    Args:
        q: (B, Hq, S, D) and k (B, Hk, S, D), post-RoPE.

    Returns:
        counts (B, Hq, S) int64 and sums (B, Hq, S) float32.
    """
    if fused := fused_scores(q, k):
        return fused.low_weight_counts(q, k, scale=scale, first_row=first_row)
    B, Hq, S, _ = q.shape
    counts = torch.zeros(B, Hq, S, dtype=torch.int64, device=q.device)
    # Summed in float64, so that sums that are equal in exact arithmetic come out equal and tie.
    sums = torch.zeros(B, Hq, S, dtype=torch.float64, device=q.device)
    for start, stop in _blocks(q, first_row, block_bytes):
        rows = attention_rows(q, k, start, stop, scale=scale)
        visible = torch.arange(start + 1, stop + 1, device=q.device)  # tokens seen by each row of the block
        low = rows * visible[:, None] < BELOW_AVERAGE
        low &= torch.arange(stop, device=q.device) < visible[:, None]
        counts[..., :stop] += low.sum(dim=2)
        sums[..., :stop] += rows.sum(dim=2, dtype=torch.float64)
    return counts, sums.float()


def row_normalisers(q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int) -> torch.Tensor:
    """(B, Hq, S - first_row) float32 log-sum-exp of the causal logits of the query rows [first_row, S)."""
    if fused := fused_scores(q, k):
        return fused.row_normalisers(q, k, scale=scale, first_row=first_row)
    B, Hq, S, D = q.shape
    rows, Hk = S - first_row, k.shape[1]
    queries = q[:, :, first_row:].float().reshape(B, Hk, -1, D)
    logits = (queries @ k.float().transpose(2, 3)).view(B, Hq, rows, S) * scale
    future = torch.arange(S, device=q.device) > torch.arange(first_row, S, device=q.device)[:, None]
    return logits.masked_fill_(future, -torch.inf).logsumexp(dim=-1)


def unmasked_sums(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int, block_bytes: int = SCORE_BLOCK_BYTES
) -> torch.Tensor:
    """Attention that every token receives from the query rows [first_row, S) when each row sees the whole prompt.

    Returns:
        (B, Hq, S) float32.
    """
    if fused := fused_scores(q, k):
        return fused.unmasked_sums(q, k, scale=scale, first_row=first_row)
    B, Hq, S, D = q.shape
    Hk = k.shape[1]
    keys = k.float().transpose(2, 3)
    total = torch.zeros(B, Hq, S, dtype=torch.float32, device=q.device)
    for start, stop in _blocks(q, first_row, block_bytes):
        queries = q[:, :, start:stop].float().reshape(B, Hk, -1, D)
        rows = torch.softmax((queries @ keys) * scale, dim=-1)
        total += rows.view(B, Hq, stop - start, S).sum(dim=2)
    return total


def lowest_positions(counts: torch.Tensor, sums: torch.Tensor, count: int) -> torch.Tensor:
    """Positions with the smallest counts; among equal counts the larger sum wins, then the later position.

    Counts tie on most tokens, so the order within a tie decides. Two stable sorts keep it exact, where one floating
    key of both would round.

    Args:
        counts: (B, Hs, P) any real dtype.
        sums: (B, Hs, P) float.

    Returns:
        (B, Hs, count) int64, ascending.
    """
    last = counts.shape[-1] - 1
    by_sum = sums.flip(-1).sort(dim=-1, descending=True, stable=True).indices  # of flipped positions: later ones first
    by_count = counts.flip(-1).gather(-1, by_sum).sort(dim=-1, stable=True).indices[..., :count]
    return (last - by_sum.gather(-1, by_count)).sort(dim=-1).values
