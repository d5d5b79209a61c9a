"""How one budget becomes a number of kept tokens per layer."""

from __future__ import annotations


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
