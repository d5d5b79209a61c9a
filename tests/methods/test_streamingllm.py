"""StreamingLLM: sinks and a window, no scores."""

from __future__ import annotations

import pytest
import torch

from kvfactory import compress_prompt


def kept(S=50, **options):
    q, k = torch.randn(1, 4, S, 8), torch.randn(1, 2, S, 8)
    out = compress_prompt("streamingllm", q, k, k, **options)
    assert len({tuple(row.tolist()) for row in out.indices[0]}) == 1
    return out.indices[0][0].tolist()


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize(
    "options, sinks",
    [({}, 4), ({"sinks": 0}, 0), ({"sinks": 7}, 7), ({"window_size": 19}, 1), ({"window_size": 20}, 0)],
)
def test_positions(granularity, options, sinks):
    got = kept(max_capacity_prompt=20, kv_cache_granularity=granularity, **options)
    assert got == [*range(sinks), *range(50 - (20 - sinks), 50)]


def test_short_prompts_are_whole():
    assert kept(S=20, max_capacity_prompt=20) == list(range(20))
    assert kept(S=21, max_capacity_prompt=20) == [*range(4), *range(5, 21)]


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(max_capacity_prompt=4), "max_capacity_prompts 4"),
        (dict(max_capacity_prompt=20, sinks=20), "max_capacity_prompts 20"),
        (dict(max_capacity_prompt=20, sinks=-1), "sinks -1"),
        (dict(max_capacity_prompt=20, window_size=21), "max_capacity_prompts 20"),
        (dict(max_capacity_prompt=20, window_size=0), "window_size 0"),
        (dict(max_capacity_prompt=20, sinks=4, window_size=15), "add up"),
    ],
)
def test_bad_settings(options, word):
    with pytest.raises(ValueError, match=word):
        kept(**options)
