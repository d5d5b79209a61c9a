"""A dense store that forgets slots, against a list of (key, value, columns) per head."""

from __future__ import annotations

import pytest
import torch

from kvfactory.backends import get_backend
from kvfactory.cache.store import DenseStore

B, HEADS, D = 2, 3, 8


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Lists:
    """Per (row, head) a list of [key, value, position, score]."""

    def __init__(self, n):
        k, v = draw(B, HEADS, n, D, seed=0), draw(B, HEADS, n, D, seed=1)
        self.scores = draw(B, HEADS, n, seed=2)
        self.slots = [
            [[k[b, h, i], v[b, h, i], i, float(self.scores[b, h, i])] for i in range(n)]
            for b in range(B)
            for h in range(HEADS)
        ]
        self.k, self.v, self.n = k, v, n

    def store(self, slack):
        store = DenseStore(self.k, self.v, slack=slack)
        positions = torch.arange(self.n, dtype=torch.int32).expand(B, HEADS, self.n)
        store.add_columns({"position": positions, "score": self.scores}, {"query": torch.ones(B, 5)})
        return store


def append(lists, store, position):
    k, v = draw(B, HEADS, 1, D, seed=100 + position), draw(B, HEADS, 1, D, seed=200 + position)
    store.append(k, v)
    store.column("position")[..., -1] = position
    store.column("score")[..., -1] = -position
    for s, slots in enumerate(lists.slots):
        slots.append([k[s // HEADS, s % HEADS, 0], v[s // HEADS, s % HEADS, 0], position, float(-position)])


def check(lists, store, ordered=False):
    """Every slot still has its own key, value and columns, and nothing else is in use."""
    k, v = store.view()
    positions, scores = store.column("position"), store.column("score")
    for s, slots in enumerate(lists.slots):
        b, h = s // HEADS, s % HEADS
        assert store.length == len(slots) == k.shape[2] == positions.shape[2]
        got = [[k[b, h, i], v[b, h, i], int(positions[b, h, i]), float(scores[b, h, i])] for i in range(len(slots))]
        if not ordered:
            got, slots = sorted(got, key=lambda x: x[2]), sorted(slots, key=lambda x: x[2])
        for a, w in zip(got, slots, strict=True):
            assert a[2:] == w[2:] and torch.equal(a[0], w[0]) and torch.equal(a[1], w[1])


def drop(lists, store, slots):
    """`slots` (B, HEADS, m)."""
    positions = store.column("position").gather(-1, slots)
    store.drop(slots)
    for s, gone in enumerate(positions.flatten(0, 1).tolist()):
        lists.slots[s] = [slot for slot in lists.slots[s] if slot[2] not in gone]


def random_slots(length, m, seed):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length, generator=g)[:m] for _ in range(B * HEADS)]
    return torch.stack(rows).view(B, HEADS, m)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("slack", [0, 1, 40])
def test_drops_and_appends(m, slack):
    """Twelve times one in, and m out while enough are left; different victims in every head, growth in between."""
    lists = Lists(11)
    store = lists.store(slack)
    for position in range(11, 23):
        append(lists, store, position)
        check(lists, store)
        if store.length > m + 3:
            drop(lists, store, random_slots(store.length, m, position))
            check(lists, store)


def test_the_newest_slot_can_be_the_victim():
    lists = Lists(5)
    store = lists.store(3)
    append(lists, store, 5)
    drop(lists, store, torch.full((B, HEADS, 1), 5))
    check(lists, store, ordered=True)
    append(lists, store, 6)
    check(lists, store, ordered=True)


def test_one_victim_moves_one_slot_and_several_move_up_in_order():
    """First slots stay first unless they go: sinks are found by their place."""
    lists = Lists(9)
    store = lists.store(0)
    before = store.column("position").clone()
    drop(lists, store, torch.full((B, HEADS, 1), 2))
    assert store.column("position")[0, 0].tolist() == [0, 1, 8, 3, 4, 5, 6, 7]
    assert before[0, 0].tolist() == list(range(9))
    drop(lists, store, torch.tensor([5, 0, 3]).expand(B, HEADS, 3))
    assert store.column("position")[0, 0].tolist() == [1, 8, 4, 6, 7]
    check(lists, store)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_reads_see_what_is_left(backend):
    lists = Lists(9)
    store = lists.store(2)
    append(lists, store, 9)
    drop(lists, store, random_slots(10, 3, 0))
    append(lists, store, 10)
    q = draw(B, 2 * HEADS, 1, D, seed=5)
    got = store.attend(q, scale=0.5, backend=get_backend(backend))
    for s, slots in enumerate(lists.slots):
        b, h = s // HEADS, s % HEADS
        keys, values = (torch.stack([slot[x] for slot in slots]).double() for x in (0, 1))
        for g in range(2):
            want = torch.softmax(keys @ q[b, 2 * h + g, 0].double() * 0.5, 0) @ values
            # float32 against float64 over 8 slots
            torch.testing.assert_close(got[b, 0, 2 * h + g].double(), want, rtol=1e-5, atol=1e-5)


def test_dropping_within_the_slack_moves_no_buffer():
    """One in, one out for ever: the buffers are those of the start, so that a step can be replayed."""
    lists = Lists(6)
    store = lists.store(1)
    addresses = [x.data_ptr() for x in (store._k, store._v, store._next, *store.columns.values())]
    for position in range(6, 30):
        append(lists, store, position)
        drop(lists, store, random_slots(7, 1, position))
    assert [x.data_ptr() for x in (store._k, store._v, store._next, *store.columns.values())] == addresses
    assert int(store._next) == store.length == 6
    check(lists, store)


def test_columns_and_history_count_as_auxiliary_bytes():
    lists = Lists(6)
    store = lists.store(4)
    per_slot = B * HEADS * (4 + 4)
    assert store.nbytes_aux == 6 * per_slot + B * 5 * 4
    append(lists, store, 6)
    assert store.nbytes_aux == 7 * per_slot + B * 5 * 4
    drop(lists, store, random_slots(7, 3, 0))
    assert store.nbytes_aux == 4 * per_slot + B * 5 * 4
    assert store.nbytes == B * HEADS * 4 * 2 * D * 4
    store.positions = torch.zeros(B, HEADS, 6, dtype=torch.int32)
    assert store.nbytes_aux == 4 * per_slot + B * 5 * 4 + B * HEADS * 6 * 4
    assert DenseStore(lists.k, lists.v).nbytes_aux == 0


def test_columns_are_copies():
    lists = Lists(6)
    store = lists.store(2)
    lists.scores.zero_()
    assert bool(store.column("score").any())
