"""Prompts and kept positions, from which rows are gathered."""

from __future__ import annotations

import torch


def prompt(B, Hk, S, D, dtype=torch.float32):
    """Keys and values (B, Hk, S, D) as parts of one projection, tokens before heads."""
    joint = torch.randn(B, S, 2 * Hk, D, generator=torch.Generator().manual_seed(D)).to(dtype)
    return joint.transpose(1, 2).chunk(2, dim=1)


def positions(S, n, seed):
    return torch.randperm(S, generator=torch.Generator().manual_seed(seed))[:n].sort().values


def dense_kept(B, Hs, S, n):
    """(B, Hs, n), other ones for every head."""
    return torch.stack([positions(S, n, seed) for seed in range(B * Hs)]).view(B, Hs, n)


def ragged_kept(segments, S, spare):
    """Positions of segments of one to S tokens, then `spare` entries that belong to none; where segments end."""
    lengths = torch.arange(segments) * 5 % S + 1
    lengths[-1] = S
    parts = [positions(S, n, seed) for seed, n in enumerate(lengths.tolist())]
    return torch.cat([*parts, torch.full((spare,), S - 1)]), lengths.cumsum(0)


def empty_slots(count, slots, D, dtype=torch.float32):
    """`count` buffers of NaN, which nothing that is copied equals."""
    return [torch.full((slots, D), torch.nan, dtype=dtype) for _ in range(count)]
