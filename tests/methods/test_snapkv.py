"""SnapKV and PyramidKV: positions against a slow reference."""

from __future__ import annotations

import pytest
import torch
from oracles import best, dense_attention, pool, qkv, reduce_heads

from kvfactory import compress_prompt
from kvfactory.ops.budget import pyramid_schedule


def reference(q, k, kept, window, kernel, pooling, how):
    """Window rows of dense attention, reduced over groups (None: not), pooled, best by (score, position), window."""
    S = q.shape[2]
    raw = dense_attention(q, k, q.shape[3] ** -0.5)[:, :, -window:, : S - window].sum(2)
    if how is not None:
        raw = reduce_heads(raw, k.shape[1], how)
    return [best(pool(row.tolist(), kernel, pooling), kept - window) + list(range(S - window, S)) for row in raw[0]]


@pytest.mark.parametrize("pooling", ["maxpool", "avgpool"])
@pytest.mark.parametrize("window, kernel", [(8, 7), (1, 1), (13, 3), (8, 15)])
@pytest.mark.parametrize("how", [None, "mean", "max", "sum"])
def test_positions(pooling, window, kernel, how):
    q, k, v = qkv()
    options = {} if how is None else {"gqa_score_agg": how}
    kept = compress_prompt(
        "snapkv",
        q,
        k,
        v,
        max_capacity_prompt=21,
        window_size=window,
        kernel_size=kernel,
        pooling=pooling,
        kv_cache_granularity="query_head" if how is None else "kv_head",
        **options,
    )
    want = reference(q, k, 21, window, kernel, pooling, how)
    assert [row.tolist() for row in kept.indices[0]] == want
    for h, positions in enumerate(want):
        source = h if how else h // 3
        assert torch.equal(kept.keys[0][h], k[0, source, positions])
        assert torch.equal(kept.values[0][h], v[0, source, positions])


def test_a_spike_keeps_its_neighbours():
    """One token that all window queries look at: with kernel 7 the three on either side survive."""
    q, k, v = (torch.zeros(1, 2, 60, 4) for _ in range(3))
    q[..., 0] = 5.0
    k[:, :, 30, 0] = 5.0
    kept = compress_prompt("snapkv", q, k, v, max_capacity_prompt=8 + 7, window_size=8, kernel_size=7)
    assert kept.indices[0][0].tolist() == [*range(27, 34), *range(52, 60)]


def test_order_of_heads_inside_a_group_does_not_matter():
    q, k, v = qkv()
    pair = [
        compress_prompt("snapkv", x, k, v, max_capacity_prompt=21, kv_cache_granularity="kv_head", gqa_score_agg="max")
        for x in (q, q[:, [2, 0, 1, 5, 3, 4]])
    ]
    assert [row.tolist() for row in pair[0].indices[0]] == [row.tolist() for row in pair[1].indices[0]]


@pytest.mark.parametrize("layer", [0, 3, 6])
@pytest.mark.parametrize("rounding", ["floor", "exact"])
def test_pyramidkv_is_snapkv_at_the_budget_of_its_layer(layer, rounding):
    q, k, v = qkv(S=90)
    kept = compress_prompt(
        "pyramidkv",
        q,
        k,
        v,
        layer_idx=layer,
        num_layers=7,
        max_capacity_prompt=30,
        window_size=8,
        kernel_size=5,
        pooling="avgpool",
        pyramid_beta=4,
        pyramid_rounding=rounding,
    )
    count = pyramid_schedule(30, 8, 90, 7, 4, rounding)[layer]
    assert [row.tolist() for row in kept.indices[0]] == reference(q, k, count, 8, 5, "avgpool", None)


@pytest.mark.parametrize(
    "bad, word",
    [
        (dict(kernel_size=6), "kernel_size 6"),
        (dict(kernel_size=0), "kernel_size 0"),
        (dict(window_size=0), "window_size 0"),
        (dict(window_size=21), "max_capacity_prompts 21"),
        (dict(window_size=30), "max_capacity_prompts 21"),
        (dict(window_size=None), "window_size"),
        (dict(window_size="eight"), "window_size 'eight'"),
        (dict(window_size=8.5), "window_size 8.5"),
        (dict(pooling="minpool"), "pooling 'minpool'"),
        (dict(sinks=4), "sinks is not read by SnapKV"),
    ],
)
def test_bad_settings(bad, word):
    with pytest.raises(ValueError, match=word):
        compress_prompt("snapkv", *qkv(), max_capacity_prompt=21, **bad)


def test_a_ratio_below_the_window_is_refused():
    with pytest.raises(ValueError, match="window"):
        compress_prompt("snapkv", *qkv(), max_capacity_prompt_ratio=0.1)
