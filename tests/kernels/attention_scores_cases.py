"""The score kernels on odd shapes, interpreted or on a GPU: see `interpreter`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, teach_bfloat16

from kvfactory.kernels import attention_scores as fused
from kvfactory.ops import row_statistics, scores

if INTERPRETED:
    teach_bfloat16()

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Products of half-precision numbers are exact in float32, so every dtype meets float32's error: a few roundings of
# logits of up to 30 and of the sums. Matrix units cut sums off instead of rounding them.
CLOSE = dict(rtol=3e-6, atol=1e-6) if INTERPRETED else dict(rtol=2e-5, atol=2e-6)


def random_qk(B, Hk, G, S, D, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, S, h, D, generator=g).to(DEVICE, dtype).transpose(1, 2) for h in (Hk * G, Hk))
    return q, k, 2 * D**-0.5  # logits of spread 2: peaked rows, but not one-hot


def dense(q, k, scale, causal=True):
    """Float64 probabilities (B, Hq, S, S) and log-sum-exp (B, Hq, S)."""
    S = q.shape[2]
    x = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3) * scale
    if causal:
        x = x.masked_fill(torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return x.softmax(-1), x.logsumexp(-1)


SHAPES = [(2, 2, 3, 37, 16), (1, 2, 1, 130, 64), (1, 1, 3, 257, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_window_scores(shape, window, dtype):
    q, k, scale = random_qk(*shape, dtype)
    P, _ = dense(q, k, scale)
    S = q.shape[2]
    got = fused.window_scores(q, k, window, scale=scale)
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), P[:, :, -window:, : S - window].sum(2), **CLOSE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_row", [0, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums(shape, first_row, dtype):
    q, k, scale = random_qk(*shape, dtype)
    P, lse = dense(q, k, scale)
    want = P[:, :, first_row:].sum(2)
    torch.testing.assert_close(fused.column_sums(q, k, scale=scale, first_row=first_row).double(), want, **CLOSE)
    lse = lse.float().transpose(1, 2).contiguous().transpose(1, 2)  # in whatever order a library leaves it
    given = fused.column_sums(q, k, scale=scale, first_row=first_row, lse=lse)
    # A log-sum-exp of about 8 has an error of half a millionth, and so have all its weights.
    torch.testing.assert_close(given.double(), want, rtol=5 * CLOSE["rtol"], atol=5e-6)


def test_a_wrong_normaliser_shows():
    """The given log-sum-exp is what is used: one more in every row divides all by e."""
    q, k, scale = random_qk(*SHAPES[0], torch.float32)
    P, lse = dense(q, k, scale)
    got = fused.column_sums(q, k, scale=scale, lse=lse.float() + 1)
    torch.testing.assert_close(got.double(), P.sum(2) / torch.e, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_row", [0, 19])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_low_weight_counts(shape, first_row, dtype):
    q, k, scale = random_qk(*shape, dtype)
    P, _ = dense(q, k, scale)
    counts, sums = fused.low_weight_counts(q, k, scale=scale, first_row=first_row)
    torch.testing.assert_close(sums.double(), P[:, :, first_row:].sum(2), **CLOSE)
    S = q.shape[2]
    visible = torch.arange(1, S + 1, device=DEVICE)
    shares = (P * visible[:, None])[:, :, first_row:]
    low = (shares < row_statistics.BELOW_AVERAGE) & (visible <= visible[first_row:, None])
    unclear = (shares - 1).abs() < 1e-5  # one or two, by chance
    assert unclear[:, :, 1:].sum() <= 2 and counts.dtype == torch.int64
    assert ((counts - low.sum(2)).abs() <= unclear.sum(2)).all()


@pytest.mark.parametrize("rows", [1, 70])
def test_even_rows_count_nothing_as_low_and_their_sums_tie(rows):
    """Zero queries give every token the same weight, so the sums of tokens that all rows see are one number."""
    q, k, _ = random_qk(1, 2, 2, 300, 16, torch.float32)
    counts, sums = fused.low_weight_counts(torch.zeros_like(q), k, scale=1.0, first_row=300 - rows)
    assert not counts.any()
    assert (sums[..., : 301 - rows] == sums[..., :1]).all()


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_equal_keys_share_evenly_at_any_size_of_the_logits(size):
    """Nothing counts as low, however large the equal products are, and whatever multiplications are fused."""
    q, k, _ = random_qk(1, 1, 2, 150, 64, torch.float32)
    k = k[:, :, :1].expand_as(k) * size
    counts, _ = fused.low_weight_counts(q, k.contiguous(), scale=0.37, first_row=0)
    assert not counts.any()


def test_sums_of_the_same_weights_in_another_order_tie():
    """Tokens 3 and 5 get each other's weights in pairs of rows; float32 sums would depend on the order of the rows."""
    g = torch.Generator().manual_seed(0)
    a = torch.randint(0, 12, (16, 2), generator=g)
    rows = torch.cat([a, a.flip(1)])[torch.randperm(32, generator=g)].float().to(DEVICE)
    q, k = torch.zeros(1, 1, 82, 16, device=DEVICE), torch.zeros(1, 1, 82, 16, device=DEVICE)
    q[0, 0, 50:, :2], q[..., 2] = rows, 1
    k[0, 0, 3, 0], k[0, 0, 5, 1] = 1, 1
    k[0, 0, 50:, 2] = -1e4  # the rows themselves get nothing, so every row divides by weights of the same 50 tokens
    _, sums = fused.low_weight_counts(q, k, scale=math.log(2), first_row=50)  # exponentials are powers of two
    assert sums[0, 0, 3] > 1 and torch.equal(sums[..., 3], sums[..., 5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_row", [0, 19])
def test_row_normalisers_and_unmasked_sums(first_row, dtype):
    q, k, scale = random_qk(2, 2, 3, 131, 24, dtype)
    _, lse = dense(q, k, scale)
    got = fused.row_normalisers(q, k, scale=scale, first_row=first_row)
    torch.testing.assert_close(got.double(), lse[:, :, first_row:], rtol=1e-6, atol=5e-6)
    P, _ = dense(q, k, scale, causal=False)
    got = fused.unmasked_sums(q, k, scale=scale, first_row=first_row)
    torch.testing.assert_close(got.double(), P[:, :, first_row:].sum(2), **CLOSE)


def test_many_splits_join(monkeypatch):
    """A device of many multiprocessors splits the keys of few rows; the first rows see no key of the last split."""
    monkeypatch.setattr(fused, "_processors", lambda device: 100)
    q, k, scale = random_qk(1, 1, 3, 517, 16, torch.float32)
    P, lse = dense(q, k, scale)
    top, _ = fused._softmax_statistics(q, k, 40, scale, True, fused.choose_blocks(q.dtype, 16))
    assert top.shape[0] == 16
    torch.testing.assert_close(fused.window_scores(q, k, 40, scale=scale).double(), P[:, :, -40:, :477].sum(2), **CLOSE)
    got = fused.row_normalisers(q, k, scale=scale, first_row=477)
    torch.testing.assert_close(got.double(), lse[:, :, 477:], rtol=1e-6, atol=5e-6)
    counts, _ = fused.low_weight_counts(q, k, scale=scale, first_row=477)
    assert torch.equal(counts.cpu(), row_statistics.low_weight_counts(q.cpu(), k.cpu(), scale=scale, first_row=477)[0])


def test_large_logits_neither_overflow_nor_vanish():
    q, k, scale = random_qk(1, 1, 2, 70, 16, torch.float32)
    q = q * 1e4
    P, _ = dense(q, k, scale)
    got = fused.column_sums(q, k, scale=scale)
    assert got.isfinite().all()
    # Logits of 1e5 have float32 errors of 1e-2.
    torch.testing.assert_close(got.double(), P.sum(2), rtol=5e-2, atol=5e-2)


def test_results_repeat_bit_for_bit():
    q, k, scale = random_qk(1, 2, 2, 200, 64, torch.float16)
    assert torch.equal(fused.column_sums(q, k, scale=scale), fused.column_sums(q, k, scale=scale))


def test_views_and_strides():
    """The window ends before the prompt does (a template tail), and a last dim that is not dense is copied."""
    q, k, scale = random_qk(1, 2, 2, 90, 32, torch.float32)
    q, k = q[:, :, :77], k[:, :, :77]
    want = fused.window_scores(q.contiguous(), k.contiguous(), 8, scale=scale)
    assert torch.equal(fused.window_scores(q, k, 8, scale=scale), want)
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(fused.window_scores(q, strided, 8, scale=scale), want)


def test_dispatch_reaches_every_kernel(monkeypatch):
    """Each torch function hands float32 scores over where kernels run, and keeps the model's rounding for itself."""
    monkeypatch.setenv("KVFACTORY_KERNELS", "triton")
    q, k, scale = random_qk(1, 2, 3, 61, 16, torch.bfloat16)
    seen = []
    for name in ("window_scores", "column_sums", "low_weight_counts", "row_normalisers", "unmasked_sums"):
        inner = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, _n=name, _f=inner, **kw: seen.append(_n) or _f(*a, **kw))
    calls = [
        lambda **kw: scores.window_scores(q, k, 8, scale=scale, **kw),
        lambda **kw: scores.column_sums(q, k, scale=scale, first_row=5, **kw),
    ]
    for call in calls:
        call(score_dtype="model")
    assert not seen
    for name in ("low_weight_counts", "row_normalisers", "unmasked_sums"):
        calls.append(partial(getattr(row_statistics, name), q, k, scale=scale, first_row=5))
    by_kernel = [call() for call in calls]
    assert seen == ["window_scores", "column_sums", "low_weight_counts", "row_normalisers", "unmasked_sums"]
    monkeypatch.setenv("KVFACTORY_KERNELS", "torch")
    for got, want in zip(by_kernel, [call() for call in calls], strict=True):
        for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
            torch.testing.assert_close(a, b, **CLOSE)
    assert len(seen) == 5


def test_what_the_kernels_do_not_take_stays_with_torch(monkeypatch):
    monkeypatch.setenv("KVFACTORY_KERNELS", "triton")
    q, k = torch.randn(1, 2, 9, 16, device=DEVICE), torch.randn(1, 1, 9, 16, device=DEVICE)
    assert scores.fused_scores(q, k) is fused
    assert scores.fused_scores(q.double(), k.double()) is None
    assert scores.fused_scores(q, k.half()) is None
    assert scores.fused_scores(q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_doctors_check_passes(dtype):
    results = fused.check(DEVICE, dtype)
    assert {r.dtype for r in results} == {dtype} and len(results) == 14
    assert all(r.passed for r in results), [r for r in results if not r.passed]


def test_the_doctors_check_can_fail(monkeypatch):
    monkeypatch.setattr(fused, "LOG2E", 1.40)
    assert not any(r.passed for r in fused.check(DEVICE, torch.float16) if "sum" in r.name or "window" in r.name)
