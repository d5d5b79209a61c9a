from __future__ import annotations

import pytest
import torch

from kvfactory.ops.cam_merge import (
    banded_probabilities,
    evicted_probabilities,
    merge_banded,
    merge_evicted,
    merge_loop,
)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth_by_loop(v, draws, first, span, cascade):
    """One source at a time in float64, value rows of all stored heads."""
    original = v.repeat_interleave(draws.shape[1] // v.shape[1], dim=1).double()
    out = original.clone()
    for step in range(draws.shape[2]):
        p = first + step
        source = (out if cascade else original)[:, :, p].clone()
        for target in range(p + 1, p + 1 + span):
            out[:, :, target] += draws[:, :, step, None] * source / span
    return out


@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("S, window, first, span, block", [(57, 8, 6, 8, 16), (57, 8, 0, 8, 5), (40, 5, 13, 3, 128)])
def test_blocks_equal_the_loop(S, window, first, span, block, cascade):
    v = uniform(2, 3, S, 7) - 0.5
    draws = uniform(2, 6, S - window - first, seed=1)  # any number, not just 0 and 1
    got = merge_banded(v, draws, first, span, cascade=cascade, block=block)
    torch.testing.assert_close(got, smooth_by_loop(v, draws, first, span, cascade), rtol=1e-12, atol=1e-12)


def test_the_exact_loop_equals_the_reference_and_leaves_its_input():
    v = uniform(1, 2, 30, 4)
    before = v.clone()
    draws = (uniform(1, 4, 20, seed=1) < 0.5).double()
    got = merge_loop(v, draws, 4, 6)
    torch.testing.assert_close(got, smooth_by_loop(v, draws, 4, 6, True), rtol=1e-13, atol=1e-13)
    assert torch.equal(v, before)


def test_half_precision_rounds_once():
    v = (uniform(1, 2, 64, 8) - 0.5).to(torch.bfloat16)
    draws = (uniform(1, 2, 50, seed=1) < 0.5).float()
    exact = smooth_by_loop(v, draws.double(), 6, 8, True)
    got = merge_banded(v, draws, 6, 8, block=16)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()  # half an ulp of 8 bits of mantissa


def test_no_draw_leaves_values_alone():
    v = uniform(1, 2, 40, 3)
    got = merge_banded(v, torch.zeros(1, 4, 28), 4, 8)
    assert torch.equal(got, v.repeat_interleave(2, dim=1))


def test_probabilities_by_hand():
    # Window 2, start 2, S 7: sources 2, 3, 4; each over the larger of its own and the next token, and of the sinks.
    a = torch.tensor([[[0.1, 0.2, 0.1, 0.4, 0.3, 0.6, 9.0]]])
    assert banded_probabilities(a, 2, 2)[0, 0].tolist() == pytest.approx([0.1 / 0.4, 1.0, 0.3 / 0.6])
    a[..., 0] = 0.8
    assert banded_probabilities(a, 2, 2)[0, 0].tolist() == pytest.approx([0.1 / 0.8, 0.4 / 0.8, 0.3 / 0.8])
    assert banded_probabilities(torch.zeros(1, 1, 7), 2, 2).tolist() == [[[0.0] * 3]]


def test_probabilities_equal_the_loop_and_stay_in_range():
    a = uniform(2, 3, 61).float()
    for start, window in ((7, 8), (0, 3), (53, 7)):
        got = banded_probabilities(a, start, window)
        assert got.min() >= 0 and got.max() <= 1
        for i, p in enumerate(range(start, 61 - window)):
            largest = a[..., p : p + window].amax(-1)
            largest = torch.maximum(largest, a[..., :start].amax(-1)) if start else largest
            torch.testing.assert_close(got[..., i], a[..., p] / largest)


def random_kept(B: int, Hs: int, S: int, n: int, window: int) -> torch.Tensor:
    past = uniform(B, Hs, S - window, seed=5).topk(n - window, dim=-1).indices
    tail = torch.arange(S - window, S).expand(B, Hs, window)
    return torch.cat([past, tail], dim=-1).sort(dim=-1).values


def targets_by_search(kept: list[int], source: int, span: int) -> list[int]:
    return [slot for slot, position in enumerate(kept) if position > source][:span]


@pytest.mark.parametrize("span", [1, 5, 32])
def test_merging_evicted_tokens_equals_the_loop(span):
    B, Hk, Hs, S, n = 2, 2, 4, 47, 15
    v, kept = uniform(B, Hk, S, 5) - 0.5, random_kept(B, Hs, S, n, 4)
    draws, a = uniform(B, Hs, S, seed=2), uniform(B, Hs, S, seed=3)
    merged, probabilities = merge_evicted(v, kept, draws, span), evicted_probabilities(a, kept, span)
    for b in range(B):
        for h in range(Hs):
            slots = kept[b, h].tolist()
            expected = v[b, h // 2][slots].clone()
            for source in range(S):
                if source in slots:
                    assert probabilities[b, h, source] == 0
                    continue
                targets = targets_by_search(slots, source, span)
                mean = a[b, h][[slots[t] for t in targets]].mean()
                assert probabilities[b, h, source].item() == pytest.approx(min(1, (a[b, h, source] / mean).item()))
                for t in targets:
                    expected[t] += draws[b, h, source] * v[b, h // 2, source] / len(targets)
            torch.testing.assert_close(merged[b, h], expected, rtol=1e-12, atol=1e-12)


def test_merging_evicted_tokens_conserves_the_sum_of_values():
    v, kept = uniform(1, 3, 40, 6), random_kept(1, 3, 40, 12, 5)
    merged = merge_evicted(v, kept, torch.ones(1, 3, 40), 7)
    torch.testing.assert_close(merged.sum(dim=2), v.sum(dim=2), rtol=1e-12, atol=1e-12)


def test_drawing_no_evicted_token_leaves_kept_values_alone():
    v, kept = uniform(1, 3, 40, 6), random_kept(1, 3, 40, 12, 5)
    merged = merge_evicted(v, kept, torch.zeros(1, 3, 40), 7)
    assert torch.equal(merged, v.gather(2, kept[..., None].expand(-1, -1, -1, 6)))
