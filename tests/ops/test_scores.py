"""Scores against loops in float64; sizes are odd on purpose."""

from __future__ import annotations

import pytest
import torch
from oracles import dense_attention, pool, reduce_heads

from kvfactory.ops.scores import attention_rows, column_sums, pool_scores, reduce_groups, window_scores

# float32 scores of up to 37 summands against float64; a wrong mask or scale is off by 1e-2 and more.
CLOSE = dict(rtol=1e-5, atol=1e-6)


def qkv(B=2, Hq=6, Hk=2, S=37, D=10, seed=0, spread=2.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, h, S, D, generator=g) * spread for h in (Hq, Hk))


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (3, 3), (5, 1)])
@pytest.mark.parametrize("window", [1, 8, 36])
def test_window_scores(heads, window):
    """Rows S-W to S-1, softmax over all the keys that each may see, summed."""
    q, k = qkv(Hq=heads[0], Hk=heads[1])
    want = dense_attention(q, k, 0.3)[:, :, -window:, : 37 - window].sum(2)
    torch.testing.assert_close(window_scores(q, k, window, scale=0.3).double(), want, **CLOSE)


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (3, 3)])
@pytest.mark.parametrize("block_rows", [1, 5, 36, 37, 100])
@pytest.mark.parametrize("first_row", [0, 11])
def test_column_sums(heads, block_rows, first_row):
    """Blocks that divide the rows, that do not, and one block for all."""
    q, k = qkv(Hq=heads[0], Hk=heads[1])
    got = column_sums(q, k, scale=0.3, first_row=first_row, block_bytes=4 * 2 * heads[0] * 37 * block_rows)
    torch.testing.assert_close(got.double(), dense_attention(q, k, 0.3)[:, :, first_row:].sum(2), **CLOSE)


def test_column_sums_hold_all_attention():
    """Every row gives one unit, and the first token receives the first row's whole unit."""
    q, k = qkv()
    got = column_sums(q, k, scale=0.3)
    torch.testing.assert_close(got.sum(-1), torch.full((2, 6), 37.0), rtol=1e-6, atol=0)
    assert bool((got[..., 0] >= 1).all())


def test_column_sums_never_hold_all_rows(monkeypatch):
    """The bound on a block is kept: no intermediate is larger, whatever the prompt."""
    from kvfactory.ops import scores

    q, k = qkv(B=1, S=301)
    largest = []
    inner = scores.attention_rows

    def watched(*args, **kwargs):
        out = inner(*args, **kwargs)
        largest.append(out.numel() * 4)
        return out

    monkeypatch.setattr(scores, "attention_rows", watched)
    column_sums(q, k, scale=0.3, block_bytes=2**16)
    assert max(largest) <= 2**16 and len(largest) > 20


def test_attention_rows_see_no_future():
    q, k = qkv()
    rows = attention_rows(q, k, 11, 20, scale=0.3)
    torch.testing.assert_close(rows.double(), dense_attention(q, k, 0.3)[:, :, 11:20, :20], **CLOSE)
    assert bool((rows.triu(12) == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_score_dtype_rounds_probabilities(dtype):
    """ "model" rounds logits and each probability to the model's dtype before summing; "float32" does not."""
    q, k = (x.to(dtype) for x in qkv())
    rough = window_scores(q, k, 8, scale=0.3, score_dtype="model")
    fine = window_scores(q, k, 8, scale=0.3)
    assert rough.dtype == dtype and fine.dtype == torch.float32
    assert not torch.equal(rough.float(), fine)
    torch.testing.assert_close(rough.float(), fine, rtol=0.1, atol=0.1)  # 8 and 11 bits per logit of magnitude 10
    sums = column_sums(q, k, scale=0.3, score_dtype="model")
    assert sums.dtype == dtype
    torch.testing.assert_close(fine.double(), dense_attention(q, k, 0.3)[:, :, -8:, :29].sum(2), **CLOSE)


@pytest.mark.parametrize("how", ["mean", "max", "sum"])
def test_reduce_groups(how):
    """Query head h belongs to kv head h // G: consecutive heads, not strided ones."""
    scores = torch.rand(2, 6, 11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reduce_groups(scores, 2, how), reduce_heads(scores, 2, how))
    assert torch.equal(reduce_groups(scores[:, [2, 0, 1, 5, 4, 3]], 2, "max"), reduce_groups(scores, 2, "max"))


@pytest.mark.parametrize("how", ["maxpool", "avgpool"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 15])
def test_pool_scores(how, kernel):
    """Edges too: max over what exists, mean with zeros beyond; also a kernel wider than the row."""
    scores = torch.rand(2, 3, 11, generator=torch.Generator().manual_seed(0)) - 0.5
    got = pool_scores(scores, kernel, how)
    for b in range(2):
        for h in range(3):
            want = torch.tensor(pool(scores[b, h].tolist(), kernel, how))
            torch.testing.assert_close(got[b, h], want, rtol=1e-5, atol=1e-6)  # a float32 sum in another order


def test_which_orders_of_aggregation_and_pooling_commute():
    scores = torch.rand(1, 6, 40, generator=torch.Generator().manual_seed(0))

    def first(how, pooling):
        return pool_scores(reduce_groups(scores, 2, how), 7, pooling)

    def last(how, pooling):
        return reduce_groups(pool_scores(scores, 7, pooling), 2, how)

    assert torch.equal(first("max", "maxpool"), last("max", "maxpool"))
    torch.testing.assert_close(first("mean", "avgpool"), last("mean", "avgpool"))
    assert not torch.allclose(first("mean", "maxpool"), last("mean", "maxpool"))


@pytest.mark.parametrize("call", [lambda s: reduce_groups(s, 2, "median"), lambda s: pool_scores(s, 3, "minpool")])
def test_unknown_words(call):
    with pytest.raises(ValueError, match="is not one of"):
        call(torch.rand(1, 6, 5))
