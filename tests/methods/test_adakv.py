from __future__ import annotations

import pytest
import torch
from golden_cases import case_inputs, load_cases, random_qkv

from kvfactory.methods.adakv import AdaKV
from kvfactory.methods.base import LayerShape, PromptContext, RaggedKept
from kvfactory.methods.pyramidkv import PyramidKV
from kvfactory.methods.snapkv import SnapKV
from kvfactory.plan import make_plan
from kvfactory.settings import resolve_settings


def cluster(q, k, *, layer: int = 0, layers: int = 1, cls=AdaKV, granularity="query_head", agg="mean", **given):
    settings = resolve_settings(cls.name, cls.Settings, "factory", given)
    return cls(settings, LayerShape(layer, layers, q.shape[1], k.shape[1], q.shape[3]), granularity, agg)


def segments(kept: RaggedKept) -> list[list[int]]:
    return [part.tolist() for part in kept.indices.split(kept.lengths.tolist())]


def kept_by_loop(
    q, k, budget: int, heads: int, *, window=8, kernel=7, floor=0.2, normalize=True, protected: int | None = None
) -> list[list[int]]:
    """The method head by head and token by token, one row, mean over groups, in float64.

    With `protected` so many best tokens of every head come first, and the floor is not blended in.
    """
    S, group = q.shape[2], q.shape[1] // k.shape[1]
    base, past = budget - window, S - window
    pooled = []
    for head in range(q.shape[1]):
        rows = []
        for i in range(past, S):
            logits = (q[0, head, i].double() @ k[0, head // group, : i + 1].double().T) * q.shape[3] ** -0.5
            rows.append(torch.nn.functional.pad(logits.softmax(0), (0, S - i - 1)))
        pooled.append(torch.stack(rows)[:, :past].mean(0))
    if heads != q.shape[1]:
        pooled = [torch.stack(pooled[h * group : (h + 1) * group]).mean(0) for h in range(heads)]
    reach = kernel // 2
    pooled = [[max(s[max(0, j - reach) : j + reach + 1]).item() for j in range(past)] for s in pooled]
    ranked, flat = [], []
    for h, s in enumerate(pooled):
        order = sorted(range(past), key=lambda j, s=s: (-s[j], j))
        ratio = sum(s[j] for j in order[:base]) / sum(s) if normalize else 1
        flat += [(rank >= (protected or 0), -s[j] * ratio, h, rank) for rank, j in enumerate(order)]
        ranked.append(order)
    counts = [0] * heads
    for _, _, h, _ in sorted(flat)[: heads * base]:
        counts[h] += 1
    if protected is None:
        counts = [round(c * (1 - floor) + int(base * floor)) for c in counts]  # Python rounds half to even too
    return [sorted(order[:c]) + list(range(past, S)) for order, c in zip(ranked, counts, strict=True)]


def test_golden_selection(golden_dir):
    cases, arrays = load_cases(golden_dir, "prompt_selection", "adakv")
    for case in cases:
        q, k, v = case_inputs(case)
        ada = cluster(
            q,
            k,
            layer=case["layer_idx"],
            layers=case["num_hidden_layers"],
            granularity=case["granularity"],
            agg=case["agg"],
            **{name: case[name] for name in ("window_size", "kernel_size", "pooling", "floor", "normalize")},
        )
        kept = ada.compress(q, k, v, PromptContext(case["L"], case["max_capacity_prompt"]))
        assert kept.lengths.tolist() == case["head_lens"], case["key"]
        expected = torch.from_numpy(arrays[f"{case['key']}_idx"]).split(case["head_lens"])
        assert segments(kept) == [sorted(part.tolist()) for part in expected], case["key"]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("heads, granularity", [(6, "query_head"), (2, "kv_head")])
def test_selection_equals_the_loop_row_by_row(heads, granularity, normalize):
    q, k, v = random_qkv(2, 6, 2, 83, 16)
    q[:, 2:] *= 3  # heads of different sharpness
    kept = cluster(q, k, granularity=granularity, normalize=normalize).compress(q, k, v, PromptContext(83, 29))
    expected = [s for b in range(2) for s in kept_by_loop(q[b : b + 1], k[b : b + 1], 29, heads, normalize=normalize)]
    assert segments(kept) == expected


@pytest.mark.parametrize("rounding, protected", [("round", 28), ("exact", 29)])  # 100 * 0.29 is 28.999... in floats
def test_the_safeguard_min_equals_the_loop(rounding, protected):
    q, k, v = random_qkv(1, 4, 2, 230, 8)
    q[:, 2:] *= 40  # a few tokens have all their attention, so that they keep little beyond what is protected
    kept = cluster(q, k, floor=0.29, kernel_size=1, adakv_safeguard="min", adakv_rounding=rounding)
    kept = kept.compress(q, k, v, PromptContext(230, 108))
    assert segments(kept) == kept_by_loop(q, k, 108, 4, kernel=1, protected=protected)
    assert kept.lengths.min() == protected + 8
    assert segments(kept) != kept_by_loop(q, k, 108, 4, kernel=1, protected=protected, normalize=False)


def test_a_floor_of_one_is_snapkv():
    q, k, v = random_qkv(1, 6, 3, 90, 16)
    kept = cluster(q, k, floor=1).compress(q, k, v, PromptContext(90, 30))
    snap = cluster(q, k, cls=SnapKV).compress(q, k, v, PromptContext(90, 30))
    assert segments(kept) == snap.indices[0].tolist()


def test_floor_changes_the_shares():
    q, k, v = random_qkv(1, 6, 3, 90, 16)
    shares = {
        f: cluster(q, k, floor=f).compress(q, k, v, PromptContext(90, 30)).lengths.tolist() for f in (0, 0.2, 0.9)
    }
    assert len({tuple(s) for s in shares.values()}) == 3
    assert max(shares[0.9]) - min(shares[0.9]) < max(shares[0]) - min(shares[0])


def test_equal_heads_get_equal_shares():
    q, k, v = random_qkv(1, 1, 1, 90, 16)
    q, k, v = (x.expand(1, 5, 90, 16) for x in (q, k, v))
    lengths = cluster(q, k, floor=0).compress(q, k, v, PromptContext(90, 30)).lengths
    # All heads tie everywhere, so only the last score level is cut unevenly: at most one plateau of the pooling.
    assert lengths.max() - lengths.min() <= 7


@pytest.mark.parametrize(
    "safeguard, rounding", [("mix", "round"), ("mix", "exact"), ("min", "round"), ("min", "exact")]
)
@pytest.mark.parametrize("budget", [18, 30, 37])
def test_what_is_kept_lies_within_the_declared_bounds(budget, safeguard, rounding):
    q, k, v = random_qkv(1, 6, 3, 90, 16)
    q[:, 3:] *= 4
    for floor in (0.0, 0.29, 0.77):
        ada = cluster(q, k, floor=floor, adakv_safeguard=safeguard, adakv_rounding=rounding)
        ctx = PromptContext(90, budget)
        kept = ada.compress(q, k, v, ctx)
        least, most = ada.declared_bounds(ctx)
        assert least <= int(kept.lengths.sum()) <= most
        if (safeguard, rounding) != ("mix", "round"):
            assert least == most == 6 * budget
        if safeguard == "min":
            assert kept.lengths.min() >= int((budget - 8) * floor) + 8


def test_bounds_are_as_wide_as_rounding_and_no_wider():
    q, k, _ = random_qkv(1, 32, 8, 4, 16)
    # Past budget 56, floor 0.2: 11.2 loses 0.2 per head, then half a token per head either way.
    assert cluster(q, k).declared_bounds(PromptContext(1000, 64)) == (32 * 64 - 22, 32 * 64 + 9)


def test_the_pyramid_sets_the_mean_of_every_layer():
    q, k, v = random_qkv(1, 6, 3, 200, 16)
    for layer in range(5):
        ctx = PromptContext(200, 40)
        ada = cluster(q, k, layer=layer, layers=5, adakv_pyramid=True, adakv_rounding="exact")
        pyramid = cluster(q, k, cls=PyramidKV, layer=layer, layers=5)
        assert ada.compress(q, k, v, ctx).lengths.sum() == 6 * pyramid.kept(ctx)
    assert cluster(q, k, layer=0, layers=5, adakv_pyramid=True).kept(ctx) > 40


@pytest.mark.parametrize("length, compresses", [(8, False), (30, False), (31, True)])
def test_a_prompt_within_the_budget_is_kept_whole(length, compresses):
    q, k, v = random_qkv(1, 6, 3, length, 16)
    ada, ctx = cluster(q, k), PromptContext(length, 30)
    assert (ada.compress(q, k, v, ctx) is not None) == compresses
    assert compresses or ada.declared(ctx) == [length] * 3 and ada.declared_bounds(ctx) == (3 * length,) * 2


def test_sum_and_mean_over_a_group_select_alike_and_max_does_not():
    q, k, v = random_qkv(1, 8, 2, 120, 16)
    kept = {
        agg: segments(cluster(q, k, granularity="kv_head", agg=agg).compress(q, k, v, PromptContext(120, 40)))
        for agg in ("mean", "sum", "max")
    }
    assert kept["mean"] == kept["sum"] != kept["max"]


def test_scores_without_any_mass_do_not_fail():
    q, k, v = random_qkv(1, 2, 2, 60, 16)
    k[:, :, -8:] *= 0
    k[:, :, :-8] = -1000 * torch.sign(q[:, :, -1:])  # everything before the window underflows to 0
    q[:, :, -8:] = q[:, :, -1:]
    kept = cluster(q, k).compress(q, k, v, PromptContext(60, 20))
    assert kept.lengths.sum() <= 2 * 20 + 1


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"floor": -0.1}, "--floor -0.1 is not in"),
        ({"floor": 1.5}, "--floor 1.5 is not in"),
        ({"floor": float("nan")}, "--floor nan is not a number"),
        ({"pyramid_beta": 10}, "--adakv_pyramid on only"),
        ({"pyramid_rounding": "exact"}, "--adakv_pyramid on only"),
        ({"adakv_pyramid": True, "pyramid_beta": 0}, "--pyramid_beta 0"),
        ({"max_capacity_prompt": 8}, "larger than the window"),
        ({"adakv_safeguard": "max"}, "not one of mix, min"),
        ({"recent_size": 3}, "is not read by AdaKV"),
    ],
)
def test_bad_settings_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        make_plan("adakv", **given)


def test_presets():
    factory, paper = (make_plan("adakv", preset=p).settings for p in ("factory", "paper"))
    assert (factory.window_size, factory.floor, factory.normalize) == (8, 0.2, True)
    assert (paper.window_size, paper.floor, paper.normalize) == (32, 0.2, False)
