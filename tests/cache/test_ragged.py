"""Ragged segments against one list of keys and values per segment, read by a softmax per head."""

from __future__ import annotations

import pytest
import torch

from kvfactory.backends import get_backend
from kvfactory.cache.ragged import RaggedStore, copy_row, join_rows
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import RaggedKept

EDGES = [1, 31, 32, 33, 63, 64, 65, 100]
"""Lengths of segments: the least, and around the widths that reads are bucketed by."""
SCALE = 0.3


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Lists:
    """Rows of lists: keys and values (n, D) of every stored head of every row."""

    def __init__(self, lengths, D, seed=0):
        """`lengths`: one list per row."""
        self.k, self.v = (
            [[draw(n, D, seed=seed + 100 * r + h + x) for h, n in enumerate(row)] for r, row in enumerate(lengths)]
            for x in (0, 10_000)
        )

    @property
    def lengths(self):
        return [[len(k) for k in row] for row in self.k]

    def append(self, k, v):
        """k, v (rows, Hk, t, D)."""
        for r, row in enumerate(self.k):
            copies = len(row) // k.shape[1]
            for h in range(len(row)):
                self.k[r][h] = torch.cat([self.k[r][h], k[r, h // copies]])
                self.v[r][h] = torch.cat([self.v[r][h], v[r, h // copies]])

    def attend(self, q, visible=None):
        """q (rows, Hq, t, D), the newest t tokens -> (rows, t, Hq, D) in float64."""
        R, Hq, t, D = q.shape
        out = torch.zeros(R, t, Hq, D, dtype=torch.float64)
        for r in range(R):
            for h in range(Hq):
                s = h // (Hq // len(self.k[r]))
                k, v = self.k[r][s].double(), self.v[r][s].double()
                for i in range(t):
                    seen = torch.arange(len(k)) < len(k) - (t - 1 - i)
                    if visible is not None:
                        seen &= visible[r, h, i, : len(k)]
                    logits = k[seen] @ q[r, h, i].double() * SCALE
                    out[r, i, h] = torch.softmax(logits, 0) @ v[seen]
        return out

    def ragged(self, slack):
        """Of a prompt whose rows have one head each, with the tokens of all segments one behind the other."""
        flat = (torch.cat([x for row in part for x in row]) for part in (self.k, self.v))
        k, v = (x.expand(len(self.k), 1, -1, -1) for x in flat)
        kept = RaggedKept(torch.arange(k.shape[2]), torch.tensor(self.lengths).flatten())
        return RaggedStore.build(k, v, kept, slack)

    def dense(self, slack):
        """The only row, whose heads are equally long."""
        return DenseStore(torch.stack(self.k[0])[None], torch.stack(self.v[0])[None], slack=slack)


def read(store, q, backend, visible=None):
    return store.attend(q, scale=SCALE, backend=get_backend(backend), visible=visible)


def ends(store):
    """Slots that each segment may use."""
    return (store.lengths.host + store.room).flatten().tolist()


def check_metadata(store, lists):
    """Segments lie apart inside the buffers, hold what they should, and both copies of the lengths agree."""
    k, v, starts, lengths = store.segments()
    assert lengths.tolist() == [n for row in lists.lengths for n in row] == store.lengths.host.flatten().tolist()
    assert starts.tolist() == store.starts.host.flatten().tolist()
    assert store.room >= 0
    spans = sorted(set(zip(starts.tolist(), ends(store), strict=True)))
    assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
    assert spans[0][0] >= 0 and sum(spans[-1]) <= len(k) == len(v)
    flat = [(a, b) for keys, values in zip(lists.k, lists.v, strict=True) for a, b in zip(keys, values, strict=True)]
    for start, n, (key, value) in zip(starts.tolist(), lengths.tolist(), flat, strict=True):
        assert torch.equal(k[start : start + n], key) and torch.equal(v[start : start + n], value)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("G", [1, 3, 4])
@pytest.mark.parametrize("D", [64, 80, 96])
def test_segment_and_bucketed_reads_equal_a_softmax_per_head(backend, G, D):
    """eager reads by segments, sdpa by buckets; after 0 and 1 tokens, at the end of the slack and beyond it."""
    lists, slack = Lists([EDGES[:4], EDGES[4:]], D), 2
    store = lists.ragged(slack)
    for i in range(slack + 2):
        q = draw(2, 4 * G, 1, D, seed=77 + i)
        # float32 sums of at most 104 products of magnitude 1 to 10.
        torch.testing.assert_close(read(store, q, backend).double(), lists.attend(q), rtol=1e-5, atol=1e-5)
        check_metadata(store, lists)
        new = draw(2, 4, 1, D, seed=50 + i), draw(2, 4, 1, D, seed=60 + i)
        lists.append(*new)
        store.append(*new)
    assert store.prompt_slots == EDGES
    assert store.nbytes == 2 * D * 4 * (sum(EDGES) + 8 * (slack + 2))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("read_every", [1, 7])
def test_segments_outgrow_their_buckets(backend, read_every):
    """40 tokens from 20, 30 and 32 slots on: buckets of 32 must become 64, whether or not every step was read."""
    lists = Lists([[20, 30, 32]], 16)
    store = lists.ragged(64)
    for i in range(40):
        new = draw(1, 3, 1, 16, seed=i), draw(1, 3, 1, 16, seed=99 + i)
        lists.append(*new)
        store.append(*new)
        if i % read_every == 0:
            q = draw(1, 6, 1, 16, seed=500 + i)
            torch.testing.assert_close(read(store, q, backend).double(), lists.attend(q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_turns_of_several_tokens_between_single_ones(backend):
    """Turns are read by buckets on every backend, single tokens on eager are not: neither may leave the other stale."""
    lists = Lists([[20, 9], [1, 31]], 16)
    store = lists.ragged(64)  # growing would make new buckets
    for i, t in enumerate((3, 1, 1, 1, 1, 1, 1, 1, 3, 4, 1, 2, 17, 1)):
        new = draw(2, 2, t, 16, seed=i), draw(2, 2, t, 16, seed=99 + i)
        lists.append(*new)
        store.append(*new)
        q = draw(2, 6, t, 16, seed=500 + i)
        torch.testing.assert_close(read(store, q, backend).double(), lists.attend(q), rtol=1e-5, atol=1e-5)
    check_metadata(store, lists)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("t", [1, 3])
def test_only_visible_slots_are_read(backend, t):
    lists = Lists([[7, 33], [40, 12]], 16)
    store = lists.ragged(0)
    q = draw(2, 6, t, 16, seed=3)
    visible = torch.rand(2, 6, t, 40, generator=torch.Generator().manual_seed(4)) < 0.5
    visible[..., 0] = True
    got = read(store, q, backend, visible)
    torch.testing.assert_close(got.double(), lists.attend(q, visible), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_equal_lengths_equal_the_dense_store(backend):
    lists = Lists([[17] * 3], 16)
    stores = [lists.ragged(2), lists.dense(2)]
    for i, t in enumerate((1, 1, 1, 3)):
        new = draw(1, 3, t, 16, seed=i), draw(1, 3, t, 16, seed=9 + i)
        for store in stores:
            store.append(*new)
        q = draw(1, 6, t, 16, seed=500 + i)
        torch.testing.assert_close(read(stores[0], q, backend), read(stores[1], q, backend), rtol=0, atol=1e-6)
        assert stores[0].nbytes == stores[1].nbytes and stores[0].prompt_slots == stores[1].prompt_slots
    for a, b in zip(stores[0].view(), stores[1].view(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("slack", [0, 1, 5])
def test_growth_keeps_everything_and_lets_the_old_buffers_go(slack):
    lists = Lists([[4, 1], [9, 2]], 16)
    store = lists.ragged(slack)
    prompt = store.prompt_slots
    first = store._k.untyped_storage().data_ptr()
    for i in range(slack + 3):
        new = draw(2, 2, 1, 16, seed=i), draw(2, 2, 1, 16, seed=9 + i)
        lists.append(*new)
        store.append(*new)
        check_metadata(store, lists)
        assert (store._k.untyped_storage().data_ptr() == first) == (i < slack)
    assert store.prompt_slots == prompt == [4, 1, 9, 2]
    held = {x.untyped_storage().data_ptr() for x in vars(store).values() if isinstance(x, torch.Tensor)}
    assert first not in held
    assert store.nbytes_alloc == 2 * 4 * 16 * sum(ends(store))


class TestSharedSlots:
    """A row stored at kv heads in a batch that stores query heads: its group reads the same slots."""

    def joined(self, slack=2):
        self.rows = [Lists([[11] * 2], 16, seed=1), Lists([[5, 40, 1, 8, 8, 33]], 16, seed=2)]
        return join_rows([(self.rows[0].dense(1), 0), (self.rows[1].ragged(3), 0)], slack)

    def step(self, store, i):
        new = draw(2, 2, 1, 16, seed=i), draw(2, 2, 1, 16, seed=99 + i)
        for r, lists in enumerate(self.rows):
            lists.append(*(x[r : r + 1] for x in new))
        store.append(*new)

    def test_slots_are_stored_and_counted_once(self):
        store = self.joined(slack=2)
        starts = store.starts.host
        assert starts[0].tolist() == [0, 0, 0, 13, 13, 13] and len(set(starts[1].tolist())) == 6
        for i in range(4):  # beyond the slack: growing must not part them
            assert store.prompt_slots == [11, 11, 5, 40, 1, 8, 8, 33]
            assert store.nbytes == 2 * 4 * 16 * (22 + 95 + 8 * i)
            assert store.nbytes_alloc == 2 * 4 * 16 * int(
                sum(
                    dict(
                        zip(
                            store.starts.host.flatten().tolist(),
                            (store.lengths.host + store.room).flatten().tolist(),
                            strict=True,
                        )
                    ).values()
                )
            )
            assert len(set(store.starts.host.flatten().tolist())) == 8
            self.step(store, i)

    @pytest.mark.parametrize("backend", ["eager", "sdpa"])
    def test_reads(self, backend):
        store = self.joined()
        for i in range(5):
            self.step(store, i)
            q = draw(2, 6, 1, 16, seed=500 + i)
            want = torch.cat([lists.attend(q[r : r + 1]) for r, lists in enumerate(self.rows)])
            torch.testing.assert_close(read(store, q, backend).double(), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("backend", ["eager", "sdpa"])
    def test_rows_leave_as_they_came(self, backend):
        """Without slack, with their own bytes, and in memory of their own."""
        store = self.joined()
        self.step(store, 0)
        alone = [copy_row(store, r) for r in range(2)]
        before = [row.view()[0].clone() for row in alone]
        store._k.zero_()
        for row, lists, copy, prompt in zip(alone, self.rows, before, ([11, 11], [5, 40, 1, 8, 8, 33]), strict=True):
            assert torch.equal(row.view()[0], copy) and row.prompt_slots == prompt and row.rows == 1
            slots = sum(n for n in lists.lengths[0])
            assert row.nbytes == row.nbytes_alloc == 2 * 4 * 16 * slots
            q = draw(1, 6, 1, 16, seed=8)
            torch.testing.assert_close(read(row, q, backend).double(), lists.attend(q), rtol=1e-5, atol=1e-5)
            new = draw(1, 2, 1, 16, seed=3), draw(1, 2, 1, 16, seed=4)
            lists.append(*new)
            row.append(*new)
            torch.testing.assert_close(read(row, q, backend).double(), lists.attend(q), rtol=1e-5, atol=1e-5)

    def test_rows_can_be_joined_again(self):
        store = self.joined()
        self.step(store, 0)
        again = join_rows([(store, 1), (store, 0)], 0)
        assert again.prompt_slots == [5, 40, 1, 8, 8, 33, 11, 11] and again.nbytes == store.nbytes == again.nbytes_alloc
        assert [copy_row(again, r).nbytes for r in (1, 0)] == [copy_row(store, r).nbytes for r in (0, 1)]


def test_rows_of_kv_heads_alone_stay_at_kv_heads():
    rows = [Lists([[11] * 2], 16), Lists([[3, 5]], 16)]
    store = join_rows([(rows[0].dense(0), 0), (rows[1].ragged(0), 0)], 0)
    assert store.stored_heads == 2 and store.nbytes == 2 * 4 * 16 * 30 == store.nbytes_alloc


@pytest.mark.parametrize("slack", [0, 3])
def test_buffers_are_exactly_the_slots_and_their_slack(slack):
    """Nothing of what they are built from stays: the sources are parts of larger tensors."""
    k, v = draw(200, 16, seed=0), draw(200, 16, seed=1)
    lengths = torch.tensor([3, 10])
    store = RaggedStore.build(k[None, None], v[None, None], RaggedKept(torch.arange(50, 63), lengths), slack)
    assert store.nbytes_alloc == 2 * 4 * 16 * (13 + 2 * slack) and store.nbytes == 2 * 4 * 16 * 13
    storages = {x.untyped_storage().data_ptr() for x in vars(store).values() if isinstance(x, torch.Tensor)}
    assert not storages & {x.untyped_storage().data_ptr() for x in (k, v, lengths)}
    joined = join_rows([(DenseStore(draw(1, 2, 5, 16, seed=2), draw(1, 2, 5, 16, seed=3), slack=90), 0)], slack)
    assert joined.nbytes_alloc == 2 * 4 * 16 * 2 * (5 + slack)


def test_half_precision_reads_agree():
    """bfloat16: both ways of reading round the result and, on the bucketed one, the weights (8 bits)."""
    lists = Lists([EDGES], 64)
    for part in (lists.k, lists.v):
        part[0] = [x.bfloat16() for x in part[0]]
    store = lists.ragged(0)
    q = draw(1, 16, 1, 64, seed=5).bfloat16()
    for backend in ("eager", "sdpa"):
        torch.testing.assert_close(read(store, q, backend).double(), lists.attend(q), rtol=0, atol=2e-2)
    assert store.nbytes == 2 * 2 * 64 * sum(EDGES)
