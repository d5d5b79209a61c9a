"""Caches of several rows in one forward: rows of different methods enter and leave, and give their memory back."""

from __future__ import annotations

import pytest
import torch
from storages import reachable_storages
from tiny import random_prompt, shared_model, step

from kvfactory import attach, detach
from kvfactory.cache.batch import BatchCache, FanOutCache, can_join
from kvfactory.loop_engine import forward
from kvfactory.monkeypatch import get_attachment
from kvfactory.plan import make_plan

KINDS = {
    "whole": ("FullKV", {}),
    "dense": ("SnapKV", {}),
    "ragged": ("AdaKV", {}),
    "kv-heads": ("StreamingLLM", {}),
    "selecting": ("Oracle", {}),
    "evicting": ("H2O", dict(preset="paper")),
}
NAMES = list(KINDS)
LENGTHS = dict(zip(NAMES, (41, 61, 37, 20, 50, 33), strict=True))
BUDGET = 16
CLOSE = dict(rtol=0, atol=2e-4)
"""Logits of magnitude 10 in float32: rows that share a matrix product are summed in another order."""


@pytest.fixture(params=["llama", "qwen2-mixed-sliding"])
def model(request):
    model = shared_model(request.param)
    attach(model, "FullKV")
    yield model
    detach(model)


@pytest.fixture
def attachment(model):
    return get_attachment(model)


def prompt_of(name):
    return random_prompt(LENGTHS[name], seed=LENGTHS[name])


def new_cache(attachment, name, granularity="query_head"):
    method, options = KINDS[name]
    plan = make_plan(method, max_capacity_prompt=BUDGET, kv_cache_granularity=granularity, **options)
    return attachment.new_cache(plan, example_id=name, max_new_tokens=9)


def token(name, i):
    return random_prompt(1, seed=LENGTHS[name] * 100 + i)


class Alone:
    """One row with a cache of its own, as the reference."""

    def __init__(self, model, attachment, name, granularity="query_head"):
        self.model, self.name, self.steps = model, name, 0
        self.cache = new_cache(attachment, name, granularity)
        step(model, prompt_of(name), self.cache)

    def step(self):
        self.steps += 1
        return step(self.model, token(self.name, self.steps), self.cache)[0]


class Together:
    """The same rows in one batch cache."""

    def __init__(self, model, attachment, granularity="query_head"):
        self.model, self.attachment, self.granularity = model, attachment, granularity
        self.batch = BatchCache(attachment)
        self.names, self.steps = [], {}

    def change(self, leaving, entering, slack=2):
        """Rows by name; returns the caches of those that leave."""
        staying = [i for i, name in enumerate(self.names) if name not in leaving]
        gone = [self.batch.rows[i] for i in range(len(self.names)) if i not in staying]
        caches = []
        for name in entering:
            cache = new_cache(self.attachment, name, self.granularity)
            step(self.model, prompt_of(name), cache)
            caches.append(cache)
            self.steps[name] = 0
        self.batch.regroup(staying, caches, slack)
        self.names = [self.names[i] for i in staying] + list(entering)
        return gone

    def step(self):
        for name in self.names:
            self.steps[name] += 1
        tokens = torch.stack([token(name, self.steps[name]) for name in self.names])
        positions = torch.tensor([[LENGTHS[name] + self.steps[name] - 1] for name in self.names])
        return dict(zip(self.names, forward(self.model, tokens, self.batch, positions), strict=True))


SCRIPT = [
    ([], ["whole", "dense"]),
    ([], ["ragged", "selecting", "evicting"]),
    (["dense"], ["kv-heads"]),  # from the middle
    (["whole", "evicting"], []),
    (["selecting", "ragged"], ["dense"]),
    (["kv-heads"], []),  # one row is left in the batch
    (["dense"], ["evicting", "selecting"]),  # nothing shared is left
]


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_rows_come_and_go(model, attachment, granularity):
    """Two steps between changes; every row's logits are those it has alone, and it leaves as it would be alone."""
    together, alone = Together(model, attachment, granularity), {}
    for leaving, entering in SCRIPT:
        for name, cache in zip(
            [n for n in together.names if n in leaving], together.change(leaving, entering), strict=True
        ):
            want = alone.pop(name).cache
            assert cache.nbytes == want.nbytes and cache.kept_tokens == want.kept_tokens
            assert cache.get_seq_length() == want.get_seq_length()
            for a, b in zip(cache.kv_layers, want.kv_layers, strict=True):
                for x, y in zip(a.store.view(), b.store.view(), strict=True):
                    every = x.shape[1] // y.shape[1]  # copies of kv heads, where others were stored per query head
                    torch.testing.assert_close(x[:, ::every], y, **CLOSE)
        alone |= {name: Alone(model, attachment, name, granularity) for name in entering}
        for _ in range(2):
            got = together.step()
            for name, logits in got.items():
                torch.testing.assert_close(logits, alone[name].step(), **CLOSE)
    assert set(together.names) == {"evicting", "selecting"}


def test_which_rows_share_a_store(model, attachment):
    together = Together(model, attachment)
    together.change([], NAMES)
    for layer in (x for x in together.batch.layers if hasattr(x, "joined")):
        held = [row.store is not None for row in layer.rows]
        assert held == [name in ("selecting", "evicting") for name in NAMES]
        assert [can_join(row) for row in layer.rows] == [not x for x in held]
        assert layer.joined.rows == 4


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_a_batch_holds_its_rows_and_nothing_more(model, attachment, granularity):
    """Every storage that the batch reaches: the rows' bytes and the slack asked for; rows that left are let go."""
    together = Together(model, attachment, granularity)

    def excess():
        layers = together.batch.layers
        native = sum(
            x.untyped_storage().nbytes()
            for layer in layers
            if not hasattr(layer, "joined")
            for row in layer.rows
            for x in (row.keys, row.values)
        )
        stores = [layer.joined for layer in layers if hasattr(layer, "joined")]
        own = [row.store for x in layers if hasattr(x, "joined") for row in x.rows if row.store is not None]
        alloc = sum(store.nbytes_alloc for store in (*stores, *own) if store is not None)
        joined = [store for store in stores if store is not None]
        slots = sum(len(set(store.starts.host.flatten().tolist())) for store in joined)
        assert sum(s.nbytes_alloc - s.nbytes for s in joined) == slots * 3 * 2 * 16 * 4
        return sum(reachable_storages(*layers).values()) - alloc - native

    # Lengths, starts, positions and accumulated attention of 16 slots: a few numbers per stored head and layer.
    book = 4 * (6 * len(NAMES) * 5 * 8 + 6 * 17 * 2 * 4 + 64)
    for leaving, entering in (([], NAMES), (["dense", "whole"], []), (["ragged", "selecting"], ["dense"])):
        together.change(leaving, entering, slack=3)
        assert 0 <= excess() <= book
    full = 61 * 2 * 16 * 4  # one layer's keys of the longest prompt: what a view would keep
    assert book < 3 * full


def test_a_row_that_left_shares_nothing_with_the_batch(model, attachment):
    together = Together(model, attachment)
    together.change([], ["whole", "dense", "ragged"])
    together.step()
    gone = together.change(["dense", "whole"], [])
    left = reachable_storages(*together.batch.layers)
    for cache in gone:
        assert not set(reachable_storages(*cache.kv_layers)) & set(left)


class TestFanOut:
    def fill(self, model, attachment, names):
        caches = [new_cache(attachment, name) for name in names]
        fan = FanOutCache(attachment, caches)
        step(model, prompt_of("dense"), fan)
        fan.share_native()
        return caches, fan

    def test_every_target_is_as_if_filled_alone(self, model, attachment):
        """Bit for bit: the keys and values are the same tensors. Then each goes on with tokens of its own."""
        caches, fan = self.fill(model, attachment, NAMES)
        assert not fan.failures and fan.get_seq_length() == LENGTHS["dense"]
        for name, cache in zip(NAMES, caches, strict=True):
            want = new_cache(attachment, name)
            step(model, prompt_of("dense"), want)
            assert cache.nbytes == want.nbytes and cache.kept_tokens == want.kept_tokens
            assert cache.get_seq_length() == want.get_seq_length()
            for a, b in zip(cache.kv_layers, want.kv_layers, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a.store.view(), b.store.view(), strict=True))
            for i in range(3):
                assert torch.equal(step(model, token(name, i), cache), step(model, token(name, i), want))

    def test_targets_share_no_memory_of_their_own_layers(self, model, attachment):
        caches, _ = self.fill(model, attachment, NAMES)
        seen = set()
        for cache in caches:
            held = set(reachable_storages(*[layer.store for layer in cache.kv_layers]))
            assert not held & seen
            seen |= held

    def test_the_prompt_is_not_kept_by_the_fan(self, model, attachment):
        caches, fan = self.fill(model, attachment, ["dense", "kv-heads"])
        ours = [layer for layer in fan.layers if hasattr(layer, "targets")]
        used = caches[0]._native_bytes()
        held = sum(cache.bytes().alloc - used for cache in caches)
        assert 0 <= sum(reachable_storages(*ours).values()) - held <= 8 * 2 * 4
