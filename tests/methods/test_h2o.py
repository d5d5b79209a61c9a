"""H2O: column sums of all prompt rows, then the window."""

from __future__ import annotations

import pytest
import torch
from oracles import best, dense_attention, reduce_heads

from kvfactory import compress_prompt


def qkv(S=53, Hq=6, Hk=2, D=12, seed=3):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, h, S, D, generator=g) * 1.5 for h in (Hq, Hk, Hk))


@pytest.mark.parametrize("window", [1, 8, 20])
@pytest.mark.parametrize("how", [None, "mean", "max", "sum"])
def test_positions(window, how):
    q, k, v = qkv()
    more = {} if how is None else {"gqa_score_agg": how}
    kept = compress_prompt(
        "h2o",
        q,
        k,
        v,
        max_capacity_prompt=21,
        window_size=window,
        kv_cache_granularity="query_head" if how is None else "kv_head",
        **more,
    )
    sums = dense_attention(q, k, 12**-0.5).sum(2)[:, :, : 53 - window]
    if how is not None:
        sums = reduce_heads(sums, 2, how)
    want = [best(row.tolist(), 21 - window) + list(range(53 - window, 53)) for row in sums[0]]
    assert [row.tolist() for row in kept.indices[0]] == want


def test_paper_preset_halves_the_budget():
    """Recent B - B // 2, heavy B // 2."""
    q, k, v = qkv()
    paper = compress_prompt("h2o", q, k, v, max_capacity_prompt=21, preset="paper")
    same = compress_prompt("h2o", q, k, v, max_capacity_prompt=21, window_size=11)
    assert [row.tolist() for row in paper.indices[0]] == [row.tolist() for row in same.indices[0]]
    with pytest.raises(ValueError, match="halved"):
        compress_prompt("h2o", q, k, v, max_capacity_prompt=1, preset="paper")
