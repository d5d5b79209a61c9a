"""Score kernels: tiles chosen on the host, and the kernels against dense attention, interpreted and on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_cuda, run_cases

from kvfactory.ops import row_statistics, scores


@pytest.mark.parametrize(
    "rows, group, size, tile",
    [
        (8, 4, 64, (4, 8)),  # a whole group beside each other
        (32, 4, 64, (2, 32)),
        (1, 1, 64, (1, 16)),  # a matrix product has 16 rows at least
        (1, 3, 64, (4, 4)),
        (33, 3, 128, (2, 64)),
        (400, 4, 64, (1, 64)),  # as many rows of one head as fit
    ],
)
def test_tiles_of_rows(rows, group, size, tile):
    pytest.importorskip("triton")
    from kvfactory.kernels.attention_scores import _row_tile

    assert _row_tile(rows, group, size) == tile


def test_shared_memory_of_the_tiles_stays_below_100_kb():
    """What a program of compute capability 8.6 may have: 99 KiB, for the held tile and every stage of the other."""
    pytest.importorskip("triton")
    from kvfactory.kernels.attention_scores import DTYPES, choose_blocks

    for dtype in DTYPES:
        for D in (16, 64, 80, 128, 192, 256):
            for counts in (False, True):
                blocks = choose_blocks(dtype, D, counts=counts)
                width = 1 << (D - 1).bit_length()
                assert (blocks.held + blocks.stages * blocks.streamed) * width * dtype.itemsize <= 98 * 1024


def test_kernels_interpreted():
    run_cases("attention_scores_cases.py", interpreted=True)


@pytest.mark.gpu
@needs_cuda
def test_kernels_on_the_gpu():
    run_cases("attention_scores_cases.py", interpreted=False)


def real_qk(S, dtype, Hq=32, Hk=8, D=128):
    g = torch.Generator(device="cuda").manual_seed(S)
    q, k = (torch.randn(1, S, h, D, generator=g, device="cuda").to(dtype).transpose(1, 2) for h in (Hq, Hk))
    return q, k, 2 * D**-0.5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("S", [2048, 8191])
def test_real_shapes_equal_the_torch_path(S, dtype, monkeypatch):
    """32 query heads on 8 kv heads of 128; matrix units cut float32 sums off, hence 2e-5."""
    q, k, scale = real_qk(S, dtype)
    calls = [
        lambda: scores.window_scores(q, k, 8, scale=scale),
        lambda: scores.window_scores(q, k, 32, scale=scale),
        lambda: scores.column_sums(q, k, scale=scale),
        lambda: scores.column_sums(q, k, scale=scale, first_row=S - 82),
        lambda: row_statistics.low_weight_counts(q, k, scale=scale, first_row=S - 400)[1],
        lambda: row_statistics.unmasked_sums(q, k, scale=scale, first_row=S - 82),
        lambda: row_statistics.row_normalisers(q, k, scale=scale, first_row=S - 400),
    ]
    for call in calls:
        monkeypatch.setenv("KVFACTORY_KERNELS", "triton")
        got = call()
        monkeypatch.setenv("KVFACTORY_KERNELS", "torch")
        torch.testing.assert_close(got, call(), rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
@needs_cuda
def test_counts_of_a_real_shape():
    """Counts differ from the torch path's only where a weight is within rounding of an even share."""
    from kvfactory.kernels import attention_scores

    q, k, scale = real_qk(8191, torch.bfloat16)
    got, _ = attention_scores.low_weight_counts(q, k, scale=scale, first_row=8191 - 400)
    rows = scores.attention_rows(q, k, 8191 - 400, 8191, scale=scale)
    visible = torch.arange(8191 - 399, 8192, device="cuda")[:, None]
    seen = torch.arange(8191, device="cuda") < visible
    want = ((rows * visible < row_statistics.BELOW_AVERAGE) & seen).sum(2)
    unclear = ((rows * visible - 1).abs() < 1e-4).sum(2)
    assert ((got - want).abs() <= unclear).all() and unclear.sum() < 1e-3 * want.sum()


@pytest.mark.gpu
@needs_cuda
def test_column_sums_of_131072_tokens():
    """No S x S matrix: the memory used is that of the row statistics and the result; every row gives one unit."""
    from kvfactory.kernels import attention_scores

    S = 131072
    q, k, scale = real_qk(S, torch.bfloat16, Hq=8, Hk=2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = attention_scores.column_sums(q, k, scale=scale)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 8 * S * 4
    torch.testing.assert_close(
        got.double().sum(-1), torch.full((1, 8), float(S), device="cuda").double(), rtol=1e-5, atol=0
    )
    last = attention_scores.column_sums(q, k, scale=scale, first_row=S - 128)
    want = scores.attention_rows(q, k, S - 128, S, scale=scale).sum(2)
    torch.testing.assert_close(last, want, rtol=5e-5, atol=1e-7)
