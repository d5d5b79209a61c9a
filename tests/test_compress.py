from __future__ import annotations

import pytest
import torch

from kvfactory import compress_prompt
from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS

COMPRESSING = [m for m in METHODS if METHODS.get(m).capability.stage in ("none", "prompt-evict")]


def qkv(B=1, S=50):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, h, S, 8, generator=g) for h in (6, 2, 2))


def compress(method, *tensors, budget=20, **options):
    return compress_prompt(
        method,
        *tensors,
        **{"layer_idx": 2, "num_layers": 3, "max_capacity_prompt": budget},
        **REQUIRED_SETTINGS.get(method, {}),
        **options,
    )


@pytest.mark.parametrize("method", COMPRESSING)
@pytest.mark.parametrize("granularity, heads", [("query_head", 6), ("kv_head", 2)])
def test_one_list_per_row_and_head_of_the_granularity(method, granularity, heads):
    q, k, v = qkv(B=2)
    out = compress(method, q, k, v, kv_cache_granularity=granularity)
    assert len(out.indices) == len(out.keys) == len(out.values) == 2
    for b in range(2):
        assert len(out.indices[b]) == heads
        for h, positions in enumerate(out.indices[b]):
            assert positions.dtype == torch.int64 and positions.tolist() == sorted(set(positions.tolist()))
            assert out.keys[b][h].shape == out.values[b][h].shape == (len(positions), 8)
            if not METHODS.get(method).capability.randomised:
                assert torch.equal(out.keys[b][h], k[b, h // (heads // 2), positions])


@pytest.mark.parametrize("method", COMPRESSING)
def test_inputs_stay_as_they_are(method):
    tensors = qkv()
    copies = [x.clone() for x in tensors]
    compress(method, *tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("method", COMPRESSING)
def test_a_prompt_within_the_budget_is_whole(method):
    q, k, v = qkv()
    out = compress(method, q, k, v, budget=50)
    assert [row.tolist() for row in out.indices[0]] == [list(range(50))] * 6


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 6, 50, 8), (1, 4, 50, 8)),
        ((1, 6, 50, 8), (1, 2, 49, 8)),
        ((6, 50, 8), (2, 50, 8)),
        ((2, 6, 50, 8), (1, 2, 50, 8)),
        ((1, 6, 50, 8), (1, 2, 50, 9)),
    ],
)
def test_bad_shapes(shapes):
    q, k = (torch.zeros(s) for s in shapes)
    with pytest.raises(ValueError, match="need"):
        compress_prompt("snapkv", q, k, k, max_capacity_prompt=20)


def test_a_share_of_bytes_needs_a_model():
    with pytest.raises(ValueError, match="budget_bytes needs a model"):
        compress_prompt("snapkv", *qkv(), budget_bytes=20)
