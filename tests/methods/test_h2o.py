"""H2O: column sums of all prompt rows, then the window."""

from __future__ import annotations

import pytest
import torch
from oracles import best, dense_attention, qkv, reduce_heads

from kvfactory import compress_prompt
from kvfactory.methods import h2o
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.ops.scores import column_sums
from kvfactory.plan import make_plan


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


@pytest.mark.parametrize(
    "score_dtype, kernels, wants", [("float32", True, True), ("float32", False, False), ("model", True, False)]
)
def test_the_log_sum_exp_of_the_prompt_reaches_the_sums(score_dtype, kernels, wants, monkeypatch):
    """It is wanted where the fused kernels can use it; what comes is used, whether it was wanted or not."""
    cluster = make_plan("h2o", max_capacity_prompt=21, score_dtype=score_dtype).build(LayerShape(0, 1, 6, 2, 12))
    q, k, v = qkv()
    monkeypatch.setattr(h2o, "fused_scores", lambda *_: object() if kernels else None)
    assert cluster.wants_lse(q, k) is wants
    given = []
    monkeypatch.setattr(h2o, "column_sums", lambda *a, lse=None, **kw: given.append(lse) or column_sums(*a, **kw))
    lse = torch.randn(1, 6, 53)
    for ctx in (PromptContext(53, 21), PromptContext(53, 21, lse=lse)):
        cluster.compress(q, k, v, ctx)
    assert given[0] is None and given[1] is lse
