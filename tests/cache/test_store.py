"""Stores against a plain list of tokens per head."""

from __future__ import annotations

import pytest
import torch

from kvfactory.backends import get_backend
from kvfactory.cache.ragged import RaggedStore, copy_row, join_rows
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import Kept, RaggedKept

D = 12


def tokens(heads, n, seed):
    return torch.randn(1, heads, n, D, generator=torch.Generator().manual_seed(seed))


class Plain:
    """One list of keys and values per stored head."""

    def __init__(self, lengths, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.k = [torch.randn(n, D, generator=g) for n in lengths]
        self.v = [torch.randn(n, D, generator=g) for n in lengths]

    def append(self, k, v):
        copies = len(self.k) // k.shape[1]
        for h in range(len(self.k)):
            self.k[h] = torch.cat([self.k[h], k[0, h // copies]])
            self.v[h] = torch.cat([self.v[h], v[0, h // copies]])

    def attend(self, q, scale):
        """q (1, Hq, t, D) -> (1, t, Hq, D) in float64; the last t tokens of every head are q's own."""
        _, Hq, t, _ = q.shape
        out = torch.zeros(1, t, Hq, D, dtype=torch.float64)
        for h in range(Hq):
            k, v = (x[h // (Hq // len(self.k))].double() for x in (self.k, self.v))
            for r in range(t):
                n = len(k) - (t - 1 - r)
                out[0, r, h] = torch.softmax(k[:n] @ q[0, h, r].double() * scale, 0) @ v[:n]
        return out


def dense(plain, slack):
    return DenseStore(torch.stack(plain.k)[None], torch.stack(plain.v)[None], slack=slack)


def ragged(plain, slack):
    """Of a prompt whose one head has the tokens of all segments, one behind the other."""
    kept = RaggedKept(torch.arange(sum(map(len, plain.k))), torch.tensor([len(k) for k in plain.k]))
    return RaggedStore.build(torch.cat(plain.k)[None, None], torch.cat(plain.v)[None, None], kept, slack)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("stored, query", [(2, 6), (6, 6), (3, 9), (1, 5)])
@pytest.mark.parametrize("kind", ["dense", "ragged"])
@pytest.mark.parametrize("slack", [0, 1, 4])
def test_appends_and_reads(backend, stored, query, kind, slack):
    """Single tokens and groups, within the slack and beyond it; kv heads feed copies of query heads."""
    lengths = [17] * stored if kind == "dense" else [(5 * h) % 23 + 1 for h in range(stored)]
    plain = Plain(lengths)
    store = dense(plain, slack) if kind == "dense" else ragged(plain, slack)
    assert store.prompt_slots == lengths
    kv_heads = {2: 2, 6: 2, 3: 3, 1: 1}[stored]
    for i, t in enumerate((1, 1, 3, 1, 2)):
        k, v, q = tokens(kv_heads, t, 10 + i), tokens(kv_heads, t, 20 + i), tokens(query, t, 30 + i)
        plain.append(k, v)
        store.append(k, v)
        got = store.attend(q, scale=0.4, backend=get_backend(backend))
        # float32 against float64 over at most 31 tokens
        torch.testing.assert_close(got.double(), plain.attend(q, 0.4), rtol=1e-5, atol=1e-5)
    assert store.prompt_slots == lengths
    assert store.nbytes == sum(len(k) for k in plain.k) * 2 * D * 4 <= store.nbytes_alloc


@pytest.mark.parametrize("slack", [0, 7])
def test_buffers_are_exactly_kept_plus_slack_and_own_their_memory(slack):
    k = tokens(2, 50, 0)
    store = DenseStore(k[:, :, :9], k[:, :, :9], slack=slack)
    assert store.nbytes_alloc == 2 * 2 * (9 + slack) * D * 4 and store.nbytes == 2 * 2 * 9 * D * 4
    k.zero_()
    assert bool(store.view()[0].any())


@pytest.mark.parametrize("replaced", [(), ("keys",), ("values",), ("keys", "values")])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_a_store_holds_what_is_kept(kind, into, replaced):
    """Two rows, three stored heads on each kv head; replaced rows as they are, the others from the prompt.

    A span is filled from its beginning, its free slots keep what was there, and what lies behind it too.
    """
    (k, v), slack = (tokens(4, 23, seed).view(2, 2, 23, D) for seed in (0, 1)), 3
    lengths = [9] * 12 if kind == "dense" else [(5 * s) % 23 + 1 for s in range(12)]
    g = torch.Generator().manual_seed(2)
    positions = [torch.randperm(23, generator=g)[:n].sort().values for n in lengths]
    segments = {
        name: [x.flatten(0, 1)[s // 3][index] - (100 if name in replaced else 0) for s, index in enumerate(positions)]
        for name, x in (("keys", k), ("values", v))
    }
    size = sum(lengths) + 12 * slack
    span = [torch.full((size + 1, D), torch.nan) for _ in range(2)] if into else None
    if kind == "dense":
        new = {name: torch.stack(segments[name]).view(2, 6, 9, D) for name in replaced}
        store = DenseStore(k, v, slack, span, kept=Kept(torch.stack(positions).view(2, 6, 9), **new))
    else:
        new = {name: torch.cat(segments[name]) for name in replaced}
        store = RaggedStore.build(k, v, RaggedKept(torch.cat(positions), torch.tensor(lengths), **new), slack, span)
    assert store.rows == 2 and store.room == slack and store.nbytes_alloc == 2 * size * D * 4
    for buffer, parts, i in zip(store.buffers, segments.values(), (0, 1), strict=True):
        assert not into or buffer.data_ptr() == span[i].data_ptr()
        flat, slot = buffer.view(-1, D), 0
        for part in parts:
            assert torch.equal(flat[slot : slot + len(part)], part)
            slot += len(part) + slack
            assert not into or flat[slot - slack : slot].isnan().all()
        assert slot == size and (not into or span[i][size:].isnan().all())


def test_slots_that_are_not_attended_do_not_count():
    plain = Plain([17, 17])
    store = dense(plain, 2)
    q = tokens(6, 1, 3)
    visible = torch.zeros(1, 6, 1, 17, dtype=torch.bool)
    visible[..., 3:9] = True
    plain.k, plain.v = [x[3:9] for x in plain.k], [x[3:9] for x in plain.v]
    for name in ("eager", "sdpa"):
        got = store.attend(q, scale=0.4, backend=get_backend(name), visible=visible)
        torch.testing.assert_close(got.double(), plain.attend(q, 0.4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_rows_joined_from_different_stores(backend):
    """Dense kv-head rows, dense query-head rows and ragged rows in one store; then a row is taken out again."""
    plains = [Plain([17] * 2, 1), Plain([9] * 6, 2), Plain([3, 20, 1, 8, 8, 2], 3)]
    joined = join_rows([(dense(plains[0], 3), 0), (dense(plains[1], 0), 0), (ragged(plains[2], 2), 0)], slack=1)
    for i, t in enumerate((1, 1, 1)):
        k, v = (
            torch.cat([tokens(2, t, 10 * i + r) for r in range(3)]),
            torch.cat([tokens(2, t, 99 + i + r) for r in range(3)]),
        )
        q = torch.cat([tokens(6, t, 50 + i + r) for r in range(3)])
        joined.append(k, v)
        for r, plain in enumerate(plains):
            plain.append(k[r : r + 1], v[r : r + 1])
        got = joined.attend(q, scale=0.4, backend=get_backend(backend))
        want = torch.cat([p.attend(q[r : r + 1], 0.4) for r, p in enumerate(plains)])
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert joined.nbytes == sum(len(k) for p in plains for k in p.k) * 2 * D * 4
    for r, plain in enumerate(plains):
        alone = copy_row(joined, r)
        assert alone.prompt_slots == [n - 3 for n in (len(k) for k in plain.k)]
        assert alone.nbytes == sum(len(k) for k in plain.k) * 2 * D * 4
        q = tokens(6, 1, 7)
        got = alone.attend(q, scale=0.4, backend=get_backend(backend))
        torch.testing.assert_close(got.double(), plain.attend(q, 0.4), rtol=1e-5, atol=1e-5)
