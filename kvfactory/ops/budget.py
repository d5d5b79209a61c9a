"""How one budget becomes a number of kept tokens per layer, and per head where the counts are known beforehand."""

from __future__ import annotations

import numpy as np


def pyramid_schedule(
    capacity: int,
    window: int,
    prompt_len: int,
    num_layers: int,
    beta: int,
    rounding: str = "floor",
    mid_branch: str = "uniform",
) -> list[int]:
    """PyramidKV: kept tokens of every layer, window included.

    Integer arithmetic of Zefan-Cai/KVCache-Factory (`pyramidkv_utils.py`, PyramidKVCluster); the paper's schedule with
    the window outside the pyramid and inside the capacity.

    Args:
        capacity: tokens per stored head, the mean over layers up to rounding; larger than `window`.
        rounding: "floor" as published (the mean exceeds `capacity` by up to (num_layers - 2) / 2 tokens), "exact" makes
            the past tokens sum to num_layers * (capacity - window).
        mid_branch: prompts of fewer than 2 * (capacity - window) tokens are "uniform" as published, or "pyramid".

    Returns:
        num_layers counts, first layer first; `prompt_len` everywhere when the prompt fits the capacity.
    """
    base = capacity - window
    past = prompt_len - window
    if prompt_len <= capacity:
        return [prompt_len] * num_layers
    if prompt_len < 2 * base and mid_branch == "uniform":
        return [capacity] * num_layers
    low = base // beta
    high = 2 * base - low
    if high >= past:
        high, low = past, 2 * base - past
    if rounding == "floor":
        step = (high - low) // (num_layers - 1) if num_layers > 1 else 0
        return [high - layer * step + window for layer in range(num_layers)]
    if num_layers == 1:
        return [capacity]
    # Largest remainder on the real line: floors first, then one unit each to the largest fractions, lower layer first.
    span = num_layers - 1
    floors = [(high * span - layer * (high - low)) // span for layer in range(num_layers)]
    remainders = [(high * span - layer * (high - low)) % span for layer in range(num_layers)]
    missing = num_layers * base - sum(floors)
    for layer in sorted(range(num_layers), key=lambda i: (-remainders[i], i))[:missing]:
        floors[layer] += 1
    return [count + window for count in floors]


def head_demand(shares: np.ndarray, capacity: int, beta: float) -> np.ndarray:
    """HeadKV: past tokens each head asks for, before rounding.

    Every head gets a minimum and the rest is a pool shared by importance. A larger beta makes the pool smaller.
    Formula of FYYFU/HeadKV, headkv/snapkv_utils.py, with its float floor division (44 // 1.1 is 39).

    Args:
        shares: (L, H) float64 importance, sum 1.
        capacity: past tokens per head on the mean of all heads; beta >= 1.

    Returns:
        (L, H) float64 that sums to L * H * capacity.
    """
    pooled = capacity // beta
    return shares * (pooled * shares.size) + (capacity - pooled)


def per_kv_head(table: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """(L, Hq) -> (L, Hk) float64: mean over the query heads of each kv head."""
    layers, heads = table.shape
    return table.reshape(layers, num_kv_heads, heads // num_kv_heads).mean(axis=2)


def water_fill(demand: np.ndarray, weights: np.ndarray, limit: int, total: int) -> np.ndarray:
    """Whole numbers near `demand`, none above `limit`, that sum to min(total, size * limit).

    What a head asks for above the limit goes to the others in proportion to their weights (evenly where those are all
    0), again and again until no head is above; largest remainders at the end, ties to the lower index.

    Args:
        demand, weights: (L, H) float64, not negative; demand sums to `total` up to rounding.

    Returns:
        (L, H) int64.
    """
    total = min(total, demand.size * limit)
    want, weight = demand.flatten(), weights.flatten()
    while True:
        full = want >= limit
        given = np.where(full, limit, want)
        excess = total - given.sum()
        if excess <= 1e-6 or full.all():
            break
        share = np.where(full, 0, weight)
        share = share / share.sum() if share.sum() > 0 else ~full / (~full).sum()
        want = given + excess * share
        if not ((want >= limit) & ~full).any():
            given = want
            break
    counts = np.floor(given + 1e-9).astype(np.int64)
    open_heads = np.flatnonzero(counts < limit)
    remainders = np.round(given[open_heads] - counts[open_heads], 9)  # equal ones differ by float noise
    order = open_heads[np.argsort(-remainders, kind="stable")]
    counts[order[: total - counts.sum()]] += 1
    assert counts.sum() == total, (counts.sum(), total)
    return counts.reshape(demand.shape)
