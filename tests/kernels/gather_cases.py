"""The gather kernel on odd shapes, interpreted or on a GPU: see `interpreter`."""

from __future__ import annotations

import pytest
import torch
from gathering import dense_kept, empty_slots, prompt, ragged_kept
from interpreter import DEVICE, INTERPRETED

from kvfactory.cache.ragged import RaggedStore
from kvfactory.cache.store import DenseStore
from kvfactory.kernels import reference
from kvfactory.kernels.gather import check, gather_kept
from kvfactory.methods.base import Kept, RaggedKept


def same(got, want):
    """Bit for bit, NaN included."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return torch.equal(got.view(kind), want.view(kind))


def both(sources, kept, slots, slack, ends=None):
    """What kernel and definition make of slots full of NaN."""
    D, dtype = sources[0].shape[-1], sources[0].dtype
    results = []
    for gather in (gather_kept, reference.gather_kept):
        targets = [x.to(DEVICE) for x in empty_slots(len(sources), slots, D, dtype)]
        where = None if ends is None else ends.to(DEVICE)
        gather([x.to(DEVICE) for x in sources], kept.to(DEVICE), targets, slack=slack, ends=where)
        results.append(targets)
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "B, Hk, copies, S, n, D", [(1, 3, 1, 41, 40, 80), (2, 2, 3, 37, 13, 96), (3, 1, 8, 19, 1, 256)]
)
def test_dense_rows(B, Hk, copies, S, n, D, dtype):
    """From keys and values that are strided as projections leave them; slack stays as it was."""
    sources = prompt(B, Hk, S, D, dtype)
    assert not any(x.is_contiguous() for x in sources)
    kept, segments = dense_kept(B, Hk * copies, S, n), B * Hk * copies
    for slack in (0, 7):
        for got, want in both(sources, kept, kept.numel() + segments * slack, slack):
            assert same(got, want) and int(got.isnan().sum()) == segments * slack * D


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("B, Hk, copies, S, D", [(1, 3, 1, 41, 80), (2, 2, 3, 37, 96), (1, 5, 8, 19, 16)])
def test_ragged_rows(B, Hk, copies, S, D, dtype):
    """Segments of one row and of all, more of them than are looked at at once; spare rows are not copied anywhere."""
    sources, segments = prompt(B, Hk, S, D, dtype), B * Hk * copies
    for slack, spare in ((0, 0), (7, 5)):
        kept, ends = ragged_kept(segments, S, spare)
        owned = int(ends[-1]) + segments * slack
        for got, want in both(sources, kept, owned + spare, slack, ends):
            assert same(got[:owned], want[:owned]) and got[owned:].isnan().all()
            assert int(got[:owned].isnan().sum()) == segments * slack * D


def test_one_source_alone_and_any_stride():
    """Channels apart, rows shared among the batch, positions in reverse order and shared among heads."""
    x = torch.randn(1, 3, 11, 40, generator=torch.Generator().manual_seed(0))[..., ::2].expand(2, -1, -1, -1)
    kept = torch.arange(10, -1, -3).expand(2, 6, 4)
    ((got, want),) = both([x], kept, 2 * 6 * 6, 2)
    assert same(got, want)


def test_layouts_of_the_two_sources_may_differ():
    k = torch.randn(1, 2, 9, 24, generator=torch.Generator().manual_seed(1))
    for got, want in both([k, k.transpose(1, 2).contiguous().transpose(1, 2) + 1], dense_kept(1, 2, 9, 5), 14, 2):
        assert same(got, want)


def test_spare_positions_are_never_read():
    """They mean nothing, so they need not even lie in the prompt."""
    k, v = (x.to(DEVICE) for x in prompt(1, 2, 9, 16))
    kept, ends = torch.tensor([1, 4, 8, 10**12], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    got = [x.to(DEVICE) for x in empty_slots(2, 4, 16)]
    gather_kept((k, v), kept, got, slack=0, ends=ends)
    for x, buffer in zip((k, v), got, strict=True):
        assert torch.equal(buffer[0], x[0, 0, 1]) and torch.equal(buffer[1:3], x[0, 1, [4, 8]])
        assert buffer[3].isnan().all()


def test_nothing_kept_is_nothing_copied():
    got = [x.to(DEVICE) for x in empty_slots(2, 6, 16)]
    sources = [x.to(DEVICE) for x in prompt(1, 2, 9, 16)]
    gather_kept(sources, torch.zeros(1, 2, 0, dtype=torch.int64, device=DEVICE), got, slack=3)
    assert all(x.isnan().all() for x in got)


@pytest.mark.parametrize("replaced", [(), ("keys",), ("values",), ("keys", "values")])
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_stores_are_filled_alike(kind, replaced, monkeypatch):
    """Kernel against torch, through the dispatch, where a method has replaced nothing, one of the two, or both."""
    k, v = (x.to(DEVICE) for x in prompt(1, 2, 23, 16))
    stores = []
    for kernels in ("triton", "torch"):
        monkeypatch.setenv("KVFACTORY_KERNELS", kernels)
        if kind == "dense":
            indices = dense_kept(1, 6, 23, 9).to(DEVICE)
            new = {name: torch.arange(6.0 * 9 * 16, device=DEVICE).view(1, 6, 9, 16) for name in replaced}
            stores.append(DenseStore(k, v, 0, kept=Kept(indices, **new)))
        else:
            indices, ends = ragged_kept(6, 23, 4)
            new = {name: torch.arange(16.0 * int(ends[-1]), device=DEVICE).view(-1, 16) for name in replaced}
            kept = RaggedKept(indices.to(DEVICE), ends.diff(prepend=ends.new_zeros(1)), **new)
            stores.append(RaggedStore.build(k, v, kept, 2))
    for got, want in zip(*(store.view() for store in stores), strict=True):
        assert torch.equal(got, want) and got.any()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies buffers of 4 GiB")
def test_places_beyond_two_to_the_31_elements():
    """In the source, where tokens come before heads, and in the target."""
    many = 2**31 // 256 + 300  # rows
    k = torch.zeros(1, many // 2, 2, 256, dtype=torch.int8, device=DEVICE)
    k[0, -1, 1] = torch.arange(-128, 128, device=DEVICE)
    target = torch.zeros(2 * many, 256, dtype=torch.int8, device=DEVICE)
    kept = torch.tensor([[[0], [many // 2 - 1]]], device=DEVICE)
    gather_kept([k.transpose(1, 2)], kept, [target], slack=many - 1)
    assert torch.equal(target[many], k[0, -1, 1]) and int(target.count_nonzero()) == 255


@pytest.mark.parametrize(
    "change, said",
    [
        ({"targets": 1}, "as many targets"),
        ({"slots": 15}, "do not fit 15 slots"),
        ({"dtype": torch.float16}, "in their torch.float32"),
        ({"heads": 3}, "not a multiple of 1 rows of 2 kv heads"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    sources = [x.to(DEVICE) for x in prompt(1, 2, 9, 16)]
    heads = change.get("heads", 2)
    targets = empty_slots(change.get("targets", 2), change.get("slots", 24), 16, change.get("dtype", torch.float32))
    kept = dense_kept(1, heads, 9, 5).to(DEVICE)
    with pytest.raises(ValueError, match=said):
        gather_kept(sources, kept, [x.to(DEVICE) for x in targets], slack=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_doctors_checks_pass(dtype):
    for result in check(DEVICE, dtype):
        assert result.passed, result
