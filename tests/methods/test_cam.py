from __future__ import annotations

import math

import pytest
import torch
from golden_cases import case_inputs, load_cases, random_qkv

from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.methods.cam import CAM
from kvfactory.methods.snapkv import SnapKV
from kvfactory.plan import make_plan
from kvfactory.settings import resolve_settings


def cluster(q, k, *, layer: int = 0, granularity: str = "query_head", agg: str = "mean", **given) -> CAM:
    settings = resolve_settings("CAM", CAM.Settings, "factory", given)
    return CAM(settings, LayerShape(layer, 4, q.shape[1], k.shape[1], q.shape[3]), granularity, agg)


def window_only(q, k, budget: int, granularity: str = "query_head"):
    """SnapKV without pooling: what CAM keeps."""
    snap = SnapKV(SnapKV.Settings(kernel_size=1), LayerShape(0, 1, q.shape[1], k.shape[1], q.shape[3]), granularity)
    return lambda v: snap.compress(q, k, v, PromptContext(q.shape[2], budget)).indices


def dense_window_mean(q, k, window: int) -> torch.Tensor:
    """(B, Hq, S) float64 attention of the last rows, averaged."""
    S = q.shape[2]
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = (q.double() @ keys.transpose(2, 3)) * q.shape[3] ** -0.5
    rows = logits.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    return rows[:, :, -window:].mean(2)


def smooth_by_loop(q, k, v, sampler, start_ratio=0.1, window=8) -> torch.Tensor:
    """The factory form for query_head storage and one row, token by token in float64, as the original walks it."""
    S, mean = q.shape[2], dense_window_mean(q, k, window)[0]
    values = v[0].double().repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    start = math.ceil(start_ratio * S)
    for t in range(start + window, S):
        p = t - window
        largest = torch.cat([mean[:, :start], mean[:, p:t]], dim=-1).amax(-1)
        draws = sampler((mean[:, p] / largest).clamp(0, 1))
        values[:, p + 1 : t + 1] += (draws[:, None] * values[:, p] / window)[:, None]
    return values


def half(p: torch.Tensor) -> torch.Tensor:
    return (p >= 0.5).to(p)


@pytest.mark.parametrize("exact_loop", [False, True])
def test_golden_selection_and_values(golden_dir, exact_loop):
    cases, arrays = load_cases(golden_dir, "cam", "cam")
    for case in cases:
        q, k, v = case_inputs(case)
        cam = cluster(
            q,
            k,
            granularity=case["granularity"],
            agg=case["agg"],
            window_size=case["window_size"],
            cam_start_ratio=case["start_ratio"],
            cam_exact_loop=exact_loop,
        )
        ctx = PromptContext(case["L"], case["max_capacity_prompt"], sampler=lambda p: (p >= 0.02).float())
        _, seen = cam.before_attend(q, k, v, ctx)
        kept = cam.compress(q, k, v, ctx)
        index = torch.from_numpy(arrays[f"{case['key']}_idx"]).long()
        order = index.argsort(dim=-1)
        assert torch.equal(kept.indices[0], index.gather(1, order)), case["key"]
        expected = torch.from_numpy(arrays[f"{case['key']}_v"]).gather(1, order[..., None].expand(-1, -1, case["D"]))
        # float32 sums of up to 8 values near 9, in another order.
        torch.testing.assert_close(kept.values[0], expected, rtol=1e-5, atol=1e-5)
        full = torch.from_numpy(arrays[f"{case['key']}_vfull_sum"])
        torch.testing.assert_close(seen[0].sum(-1), full, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("S, start_ratio", [(90, 0.1), (61, 0.0), (61, 0.33)])
def test_the_factory_form_equals_the_loop(S, start_ratio):
    q, k, v = random_qkv(1, 6, 2, S, 16)
    expected = smooth_by_loop(q, k, v, half, start_ratio)
    ctx = PromptContext(S, 40, sampler=half)
    kept = cluster(q, k, cam_start_ratio=start_ratio).compress(q, k, v, ctx)
    assert torch.equal(kept.indices, window_only(q, k, 40)(v))
    picked = expected.gather(1, kept.indices[0][..., None].expand(-1, -1, 16))
    torch.testing.assert_close(kept.values[0].double(), picked, rtol=1e-5, atol=1e-5)  # float32 against float64


def test_draws_of_a_generator_are_those_of_the_loop():
    """One draw in step-major order gives the bits that asking token by token gives."""
    q, k, v = random_qkv(1, 6, 2, 70, 16)
    ctx = PromptContext(70, 40, seed=3, example_id="a")
    generator = ctx.generator(2)
    expected = smooth_by_loop(q, k, v, lambda p: (torch.rand(p.shape, generator=generator) < p).to(p))
    kept = cluster(q, k, layer=2).compress(q, k, v, ctx)
    picked = expected.gather(1, kept.indices[0][..., None].expand(-1, -1, 16))
    torch.testing.assert_close(kept.values[0].double(), picked, rtol=1e-5, atol=1e-5)


def test_draws_depend_on_seed_example_and_layer_alone():
    q, k, v = random_qkv(1, 4, 2, 90, 16)

    def values(layer=0, **facts):
        return cluster(q, k, layer=layer).compress(q, k, v, PromptContext(90, 40, **facts)).values

    first = values(seed=1, example_id="a")
    torch.manual_seed(99)
    values(seed=1, example_id="b")
    assert torch.equal(values(seed=1, example_id="a"), first)
    for other in (values(seed=2, example_id="a"), values(seed=1, example_id="b"), values(1, seed=1, example_id="a")):
        assert not torch.equal(other, first)


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_a_row_of_a_batch_comes_out_as_it_would_alone(granularity):
    q, k, v = random_qkv(3, 6, 2, 80, 16)
    for given in ({}, {"cam_variant": "paper_prompt"}):
        together = cluster(q, k, granularity=granularity, **given).compress(q, k, v, PromptContext(80, 30))
        for b in range(3):
            alone = cluster(q, k, granularity=granularity, **given).compress(
                q[b : b + 1], k[b : b + 1], v[b : b + 1], PromptContext(80, 30)
            )
            assert torch.equal(together.indices[b], alone.indices[0])
            torch.testing.assert_close(together.values[b], alone.values[0], rtol=1e-5, atol=1e-6)


def test_the_leak_shows_merged_values_to_the_prompt_and_is_drawn_once():
    q, k, v = random_qkv(1, 6, 2, 80, 16)
    calls = []

    def sampler(p):
        calls.append(p)
        return torch.rand(p.shape) < p  # another result at every call

    cam, ctx = cluster(q, k), PromptContext(80, 30, sampler=sampler)
    for handed_back in (False, True):
        calls.clear()
        before = v.clone()
        seen_k, seen_v = cam.before_attend(q, k, v, ctx)
        assert torch.equal(seen_k, k.repeat_interleave(3, dim=1)) and torch.equal(v, before)
        changed = (seen_v != v.repeat_interleave(3, dim=1)).any(-1)
        assert not changed[..., :9].any() and changed[..., 9:].any()  # the first tenth is never a target
        kept = cam.compress(q, *((seen_k, seen_v) if handed_back else (k, v)), ctx)
        index = kept.indices[..., None].expand(-1, -1, -1, 16)
        assert torch.equal(kept.values, seen_v.gather(2, index)) and len(calls) == 1
        assert cam._leaked is None


def test_without_the_leak_the_prompt_sees_its_own_values_and_the_cache_is_the_same():
    q, k, v = random_qkv(1, 6, 2, 80, 16)
    ctx = PromptContext(80, 30)
    clean, leaky = cluster(q, k, cam_leak=False), cluster(q, k)
    seen = clean.before_attend(q, k, v, ctx)
    assert seen[0] is k and seen[1] is v and not clean.changes_prompt and leaky.changes_prompt
    leaky.before_attend(q, k, v, ctx)
    assert torch.equal(clean.compress(q, k, v, ctx).values, leaky.compress(q, k, v, ctx).values)


def test_a_prompt_within_the_budget_is_neither_merged_nor_cut():
    q, k, v = random_qkv(1, 6, 2, 30, 16)
    cam, ctx = cluster(q, k), PromptContext(30, 30)
    assert cam.before_attend(q, k, v, ctx)[1] is v and cam.compress(q, k, v, ctx) is None


@pytest.mark.parametrize("variant", ["factory", "paper_prompt"])
def test_drawing_nothing_is_plain_selection(variant):
    q, k, v = random_qkv(1, 6, 2, 80, 16)
    ctx = PromptContext(80, 30, sampler=torch.zeros_like)
    kept = cluster(q, k, cam_variant=variant).compress(q, k, v, ctx)
    index = window_only(q, k, 30)(v)
    assert torch.equal(kept.indices, index)
    for head in range(6):
        assert torch.equal(kept.values[0, head], v[0, head // 3, index[0, head]])


@pytest.mark.parametrize("granularity, heads", [("query_head", 6), ("kv_head", 2)])
def test_the_papers_form_merges_evicted_tokens_into_the_next_kept_ones(granularity, heads):
    q, k, v = random_qkv(1, 6, 2, 80, 16)
    span = 5
    mean = dense_window_mean(q, k, 8)[0]
    if heads == 2:
        mean = mean.view(2, 3, 80).mean(1)
    given = {"cam_variant": "paper_prompt", "cam_span": span}
    kept = cluster(q, k, granularity=granularity, **given).compress(q, k, v, PromptContext(80, 30, sampler=half))
    assert torch.equal(kept.indices, window_only(q, k, 30, granularity)(v))
    merges = 0
    for h in range(heads):
        slots, group = kept.indices[0, h].tolist(), heads // 2
        expected = v[0, h // group].double()[slots]
        for source in sorted(set(range(72)) - set(slots)):
            targets = [t for t, position in enumerate(slots) if position > source][:span]
            if mean[h, source] / mean[h, [slots[t] for t in targets]].mean() >= 0.5:
                merges += 1
                for t in targets:
                    expected[t] += v[0, h // group, source].double() / len(targets)
        torch.testing.assert_close(kept.values[0, h].double(), expected, rtol=1e-5, atol=1e-5)
    assert 0 < merges < heads * 50


def test_the_papers_form_conserves_the_sum_of_merged_values():
    q, k, v = random_qkv(1, 4, 4, 80, 16)
    ctx = PromptContext(80, 30, sampler=torch.ones_like)
    kept = cluster(q, k, cam_variant="paper_prompt").compress(q, k, v, ctx)
    # 80 float32 values of size 1 summed in another order.
    torch.testing.assert_close(kept.values.sum(2), v.sum(2), rtol=1e-5, atol=2e-5)


def test_max_over_a_group_is_taken_row_by_row():
    q, k, v = random_qkv(1, 8, 2, 120, 16)
    logits = (q.double() @ k.double().repeat_interleave(4, 1).transpose(2, 3)) * 16**-0.5
    rows = logits.masked_fill(torch.ones(120, 120, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[:, :, -8:]
    by_row = rows.view(2, 4, 8, 120).amax(1).mean(1)[:, :112].topk(32).indices.sort(-1).values
    kept = cluster(q, k, granularity="kv_head", agg="max").compress(q, k, v, PromptContext(120, 40))
    assert torch.equal(kept.indices[0, :, :32], by_row)


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"cam_start_ratio": 1.1}, "--cam_start_ratio 1.1 is not in"),
        ({"cam_span": 0}, "--cam_span 0 merges into nothing"),
        ({"cam_span": 9}, "must not exceed --window_size 8"),
        ({"cam_variant": "paper_prompt", "cam_leak": True}, "--cam_leak on belongs to --cam_variant factory"),
        ({"cam_variant": "paper", "cam_exact_loop": True}, "--cam_exact_loop belongs to"),
        ({"cam_variant": "paper", "cam_start_ratio": 0.2}, "--cam_start_ratio belongs to"),
        ({"cam_exact_loop": True, "cam_cascade": False}, "which cascades"),
        ({"cam_variant": "official"}, "not one of factory, paper_prompt, paper"),
        ({"max_capacity_prompt": 8}, "larger than the window"),
        ({"kernel_size": 7}, "is not read by CAM"),
    ],
)
def test_bad_settings_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        make_plan("cam", **given)


def test_presets():
    factory, paper = (make_plan("cam", preset=p).settings for p in ("factory", "paper"))
    assert (factory.cam_variant, factory.leaks, factory.span) == ("factory", True, 8)
    assert (paper.cam_variant, paper.leaks, paper.span) == ("paper", False, 32)
