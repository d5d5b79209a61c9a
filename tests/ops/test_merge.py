"""The chunked closed form of merging against a loop that merges one dropped token after the other."""

from __future__ import annotations

import pytest
import torch
from tiny import random_prompt, shared_model, step

from kvfactory import attach, detach, generate
from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS
from kvfactory.methods.base import Kept, RaggedKept
from kvfactory.ops import merge
from kvfactory.ops.merge import merge_dropped
from kvfactory.plan import make_plan

S = 43
CLOSE = dict(rtol=0, atol=2e-5)
"""float32 sums of up to 42 numbers of magnitude 1, against float64."""


def inputs(D, heads=2, B=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, S, D, generator=g) for _ in range(2))


def dense_kept(B, heads, n, seed=1):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(S, generator=g)[:n].sort().values for _ in range(B * heads)]
    return Kept(torch.stack(rows).view(B, heads, n))


def ragged_kept(lengths, seed=2):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(S, generator=g)[:n].sort().values for n in lengths]
    return RaggedKept(torch.cat(rows), torch.tensor(lengths))


def segments(kept, B):
    """Kept positions as lists, one per (row, stored head)."""
    if isinstance(kept, RaggedKept):
        return [part.tolist() for part in kept.indices.split(kept.lengths.tolist())]
    return [row.tolist() for row in kept.indices.flatten(0, 1)]


def heads(kept, B):
    """(row, kv head) of every segment, two kv heads a row."""
    Hs = len(segments(kept, B)) // B
    return [(b, h // (Hs // 2)) for b in range(B) for h in range(Hs)]


def weights(k, positions, mode):
    """(n, S) float64: how much of every prompt token ends up in every kept one, token by token; k (S, D)."""
    lengths = k.double().norm(dim=1)
    cosine_table = (k.double() @ k[positions].double().T / (lengths[:, None] * lengths[positions])).tolist()
    absorbed = [[] for _ in positions]
    for i, cosines in enumerate(cosine_table):
        if i in positions:
            continue
        j = cosines.index(max(cosines))
        absorbed[j].append((i, cosines[j]))
    rows = []
    for p, tokens in zip(positions, absorbed, strict=True):
        row, mass = [0.0] * S, 1.0
        row[p] = 1.0
        for i, cosine in tokens:
            if mode == "pivot":  # the mean of the dropped token and the pivot joins the pivot
                row[i] += 0.5
                row[p] += 0.5
                mass += 1
            else:
                weight = max((cosine + 1) / 2, 1e-6)
                row[i] += weight
                mass += weight
        rows.append([x / mass for x in row])
    return torch.tensor(rows, dtype=torch.float64)


def reference(k, v, kept, mode):
    """Merged keys and values, one (n, D) per segment, in float64."""
    B = k.shape[0]
    keys, values = [], []
    for positions, (b, h) in zip(segments(kept, B), heads(kept, B), strict=True):
        w = weights(k[b, h], positions, mode)
        keys.append(w @ k[b, h].double())
        values.append(w @ v[b, h].double())
    return keys, values


def as_segments(x, kept):
    return list(x.split(kept.lengths.tolist())) if isinstance(kept, RaggedKept) else list(x.flatten(0, 1))


LAYOUTS = {
    "kv-heads": (1, dense_kept(1, 2, 9)),
    "query-heads": (1, dense_kept(1, 6, 9)),
    "two-rows": (2, dense_kept(2, 2, 7)),
    "ragged-kv-heads": (1, ragged_kept([1, 17])),
    "ragged-query-heads": (1, ragged_kept([5, 1, 12, 30, 3, 9])),
    "ragged-two-rows": (2, ragged_kept([4, 11, 43, 2])),
}


@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_chunked_form_equals_the_loop(layout, mode, D, monkeypatch):
    B, kept = LAYOUTS[layout]
    k, v = inputs(D, B=B)
    before = k.clone(), v.clone()
    wanted = reference(k, v, kept, mode)
    monkeypatch.setattr(merge, "_CHUNK_BYTES", 4 * 6 * 9 * 5)  # several chunks, the last one shorter
    out = merge_dropped(k, v, kept, mode)
    for got, want in zip((out.keys, out.values), wanted, strict=True):
        for x, y in zip(as_segments(got, kept), want, strict=True):
            torch.testing.assert_close(x.double(), y, **CLOSE)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    assert torch.equal(out.indices, kept.indices) and type(out) is type(kept)
    assert kept.keys is None and kept.values is None  # the selection itself is left alone

    values_only = merge_dropped(k, v, kept, mode, target="v")
    assert torch.equal(values_only.values, out.values)
    for x, positions, (b, h) in zip(
        as_segments(values_only.keys, kept), segments(kept, B), heads(kept, B), strict=True
    ):
        assert torch.equal(x, k[b, h, positions])


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("layout", ["query-heads", "ragged-query-heads"])
def test_the_size_of_chunks_does_not_matter(layout, mode, monkeypatch):
    _, kept = LAYOUTS[layout]
    k, v = inputs(64)
    whole = merge_dropped(k, v, kept, mode)
    for size in (1, 4 * 6 * 30 * 42, 4 * 6 * 30 * 43):  # one token at a time; all but one; all
        monkeypatch.setattr(merge, "_CHUNK_BYTES", size)
        parts = merge_dropped(k, v, kept, mode)
        # The same float32 sums in another order.
        torch.testing.assert_close(parts.keys, whole.keys, rtol=0, atol=1e-6)
        torch.testing.assert_close(parts.values, whole.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [dense_kept(1, 2, S), ragged_kept([S, S])], ids=["dense", "ragged"])
def test_nothing_dropped_changes_nothing(kept, mode, dtype):
    k, v = (x.to(dtype) for x in inputs(64))
    out = merge_dropped(k, v, kept, mode)
    assert out.keys.dtype == dtype
    for got, x in ((out.keys, k), (out.values, v)):
        assert torch.equal(got.view(2, S, 64), x[0])


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("layout", ["query-heads", "ragged-query-heads"])
def test_slots_that_absorb_nothing_keep_their_bits(layout, mode):
    """In bfloat16, where one rounding of a product would show; a share of kept tokens is nobody's nearest."""
    _, kept = LAYOUTS[layout]
    k, v = (x.bfloat16() for x in inputs(64))
    out = merge_dropped(k, v, kept, mode)
    lonely = 0
    parts = zip(as_segments(out.keys, kept), as_segments(out.values, kept), segments(kept, 1), strict=True)
    for s, (keys, values, positions) in enumerate(parts):
        w = weights(k[0, s // 3], positions, mode)
        for j, p in enumerate(positions):
            if w[j, p] == 1:
                lonely += 1
                assert torch.equal(keys[j], k[0, s // 3, p]) and torch.equal(values[j], v[0, s // 3, p])
    assert lonely > 0


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
def test_merged_rows_are_weighted_means(mode):
    """Unit vectors as values read the weights off: not negative, summing to 1, from one's own group alone."""
    kept = dense_kept(1, 2, 9)
    k, _ = inputs(64)
    v = torch.eye(S).expand(1, 2, S, S).contiguous()
    out = merge_dropped(k, v, kept, mode).values
    assert bool((out >= 0).all())
    torch.testing.assert_close(out.sum(-1), torch.ones(1, 2, 9), rtol=0, atol=1e-6)
    for h in range(2):
        positions = kept.indices[0, h]
        torch.testing.assert_close(out[0, h].double(), weights(k[0, h], positions.tolist(), mode), **CLOSE)
        assert torch.equal(out[0, h].gt(0).sum(0), torch.ones(S, dtype=torch.int64))  # every token went to one place


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_follow_the_assignment_of_keys(layout, mode):
    B, kept = LAYOUTS[layout]
    k, _ = inputs(64, B=B)
    out = merge_dropped(k, k.clone(), kept, mode)
    assert torch.equal(out.keys, out.values)


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("kept", [dense_kept(1, 2, 9), ragged_kept([5, 12])], ids=["dense", "ragged"])
def test_identical_tokens_stay_as_they_are(kept, mode):
    """All cosines tie, so all dropped tokens go to one slot."""
    k, v = (x[:, :, :1].expand(1, 2, S, 64).contiguous() for x in inputs(64))
    out = merge_dropped(k, v, kept, mode)
    for got, x in ((out.keys, k), (out.values, v)):
        for h, part in enumerate(as_segments(got, kept)):
            # Sums of up to 38 numbers of magnitude 2 in float32, divided again.
            torch.testing.assert_close(part, x[0, h, : len(part)], rtol=0, atol=1e-5)


def test_rows_that_a_method_changed_are_the_base_of_its_merge():
    """CAM's values and StreamingLLM's rotated sinks are replaced before merging; similarity is of the prompt's keys."""
    kept = dense_kept(1, 2, 9)
    k, v = inputs(64)
    plain = merge_dropped(k, v, kept, "weighted")
    kept.keys, kept.values = (torch.stack([x[0, h, kept.indices[0, h]] for h in range(2)])[None] + 1.0 for x in (k, v))
    changed = merge_dropped(k, v, kept, "weighted")
    for h in range(2):
        own = weights(k[0, h], kept.indices[0, h].tolist(), "weighted").gather(1, kept.indices[0, h][:, None])
        for got, without in ((changed.keys, plain.keys), (changed.values, plain.values)):
            torch.testing.assert_close((got - without)[0, h].double(), own.expand(9, 64), **CLOSE)


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("kept", [dense_kept(1, 6, 9), ragged_kept([5, 1, 12, 30, 3, 9])], ids=["dense", "ragged"])
def test_columns_of_decoding_survive(kept, mode):
    k, v = inputs(64)
    if isinstance(kept, RaggedKept):
        assert torch.equal(merge_dropped(k, v, kept, mode).lengths, kept.lengths)
    else:
        kept.columns = {"position": kept.indices.int()}
        assert merge_dropped(k, v, kept, mode).columns is kept.columns


PAPER = {"CAM": {"window_size": 7}}
"""Settings that a budget of 20 tokens asks for in the paper preset."""

EVICTING = [m for m in METHODS.names() if METHODS.get(m).capability.stage == "prompt-evict"]
STORING = [m for m in METHODS.names() if not METHODS.get(m).capability.drops_tokens]


def test_methods_that_store_everything_refuse():
    assert {"FullKV", "Oracle"} <= set(STORING)
    for method in STORING:
        for mode in ("pivot", "weighted"):
            with pytest.raises(ValueError, match=f"--merge {mode} has nothing to merge: {method} stores every prompt"):
                make_plan(method, merge=mode, max_capacity_prompt=24)
    with pytest.raises(ValueError, match="--merge_target v is read with --merge only"):
        make_plan("snapkv", merge_target="v", max_capacity_prompt=24)


@pytest.mark.parametrize("method", EVICTING)
def test_merging_under_every_evicting_method(method):
    """Same slots and bytes as without merging, and the stored rows are the loop's over the method's own selection."""
    model, prompt = shared_model("llama"), random_prompt(S)
    options = dict(max_capacity_prompt=24, kv_cache_granularity="kv_head", **REQUIRED_SETTINGS.get(method, {}))
    seen = {}
    for mode, target in ((None, "kv"), ("pivot", "kv"), ("weighted", "v")):
        attachment = attach(model, method, merge=mode, merge_target=target, **options)
        try:
            cache = attachment.new_cache(example_id="e", max_new_tokens=4)
            watched = []
            for layer in cache.kv_layers:
                inner = layer.cluster.compress

                def compress(q, k, v, ctx, inner=inner, watched=watched):
                    kept = inner(q, k, v, ctx)
                    watched.append((k, v, kept))
                    return kept

                layer.cluster.compress = compress
            step(model, prompt, cache)
            for layer in cache.kv_layers:
                del layer.cluster.compress
            first = generate(model, prompt, 5, eos_token_id=[], example_id="e").rows[0].tokens
            assert generate(model, prompt, 5, eos_token_id=[], example_id="e", decode="hf").rows[0].tokens == first
        finally:
            detach(model)
        seen[mode] = cache
        assert cache.kept_tokens == seen[None].kept_tokens and cache.bytes() == seen[None].bytes()
        if mode is None:
            continue
        for layer, (k, v, kept) in zip(cache.kv_layers, watched, strict=True):
            if kept is None or kept.keys is not None or kept.values is not None:
                continue
            keys, values = reference(k, v, kept, mode)
            stored = [x[0] for x in layer.store.view()]
            for h, (key, value) in enumerate(zip(keys, values, strict=True)):
                wanted_key = k[0, h, segments(kept, 1)[h]] if target == "v" else key
                torch.testing.assert_close(stored[0][h, : len(key)].double(), wanted_key.double(), rtol=0, atol=1e-4)
                torch.testing.assert_close(stored[1][h, : len(value)].double(), value, rtol=0, atol=1e-4)
    layers = zip(seen[None].kv_layers, seen["weighted"].kv_layers, strict=True)
    assert any(not torch.equal(a.store.view()[1], b.store.view()[1]) for a, b in layers)


@pytest.mark.parametrize("mode", ["pivot", "weighted"])
@pytest.mark.parametrize("method", ["H2O", "StreamingLLM", "Scissorhands", "CAM"])
def test_decode_time_eviction_goes_on_from_merged_rows(method, mode):
    model, prompt = shared_model("llama"), random_prompt(S)
    runs = []
    for merged in (mode, None):
        attach(model, method, merge=merged, max_capacity_prompt=20, preset="paper", **PAPER.get(method, {}))
        try:
            runs.append(generate(model, prompt, 5, eos_token_id=[], example_id="e"))
        finally:
            detach(model)
    lengths = [[layer.store.length for layer in run.cache.kv_layers] for run in runs]
    assert lengths[0] == lengths[1] and max(lengths[0]) <= 20
    values = ([layer.store.view()[1] for layer in run.cache.kv_layers] for run in runs)
    assert any(not torch.equal(a, b) for a, b in zip(*values, strict=True))
