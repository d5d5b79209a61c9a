"""The decode step captured once as a CUDA graph: model, attention, choice of the token, stop test and slot advance.

Everything that differs between steps and rows lies in tensors at fixed addresses, so rows come and go without a new
capture. The host reads one small report a step, and the next step is under way by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfactory.cache.kv_cache import KVCache
from kvfactory.cache.pool import DecodePool, PooledCache, declared_span, span_size
from kvfactory.cache.ragged import join_rows
from kvfactory.loop_engine import forward
from kvfactory.monkeypatch import get_attachment
from kvfactory.rows import NEAR_TIE, Counters, Finished, LiveRow

TOKEN, POSITION, ALIVE, REMAINING, BLOCKED = range(5)
"""Rows of the state: newest token, its position, whether the row goes on, tokens to come, tokens that cannot stop."""
_FIELDS = 5
_NO_STOP = -1
GROWTH = 1.5
"""A pool without room for a row is built anew with at least this many times the slots: few rebuilds in a run."""
_WARM_UPS = 2


@dataclass
class _Report:
    """What a launched step will have said: its tokens and near-ties on the host, once `ready` has happened."""

    tokens: torch.Tensor
    ready: torch.cuda.Event | None


class GraphEngine:
    """Rows in flight over one pool.

    Attributes:
        live: place in the pool -> row.
        keep_caches: rows leave with copies of their keys and values; otherwise with views of the pool, which are right
            until another row takes the place.
    """

    def __init__(self, model: PreTrainedModel, places: int, capture: bool = True):
        """`capture` False runs the same step uncaptured, on any device, for tests."""
        self.model = model
        self.places = places
        self.keep_caches = True
        self.live: dict[int, LiveRow] = {}
        self._held: dict[int, int] = {}  # place -> tokens that the row had when it was placed
        self._reserved: dict[int, int] = {}  # id of a cache whose prompt is to fill it -> place
        self.counters = Counters()
        self._capture_steps = capture
        self._pool: DecodePool | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pending: _Report | None = None
        self._mark = 0.0

    def start(self, counters: Counters, keep_caches: bool) -> None:
        """Forgets rows that an abandoned run left behind; the pool and the capture stay."""
        self.counters, self.keep_caches = counters, keep_caches
        self._pending = None
        for place in list(self.live):
            self._leave(place, keep=False)
        for place in self._reserved.values():
            self._pool.free(place)
        self._reserved.clear()
        if self._pool is not None:
            self._state[ALIVE] = 0

    def reserve(self, cache: KVCache, prompt_len: int, max_new: int) -> None:
        """Gives a prompt that is about to run its place in the pool, if there is one, so that nothing is copied."""
        if self._pool is None:
            return
        taken = {*self.live, *self._reserved.values()}
        free = next((place for place in range(self.places) if place not in taken), None)
        layers = cache.kv_layers
        sizes = [declared_span(layer, prompt_len, max_new) for layer in layers]
        if free is None or not self._pool.reserve(free, sizes):
            return
        self._reserved[id(cache)] = free
        for i, layer in enumerate(layers):
            layer.span = self._pool.span(free, i)

    def give_up(self, cache: KVCache) -> None:
        """Takes a place back from a prompt that leaves no row; what it stored is copied out when caches are kept."""
        place = self._reserved.pop(id(cache), None)
        if place is None:
            return
        for layer in cache.kv_layers:
            layer.span = None
            if self.keep_caches and layer.store is not None:
                layer.store = join_rows([(layer.store, 0)], 0)
        self._pool.free(place)

    def enter(self, entering: list[LiveRow]) -> None:
        """Takes rows in that have their first token; builds a larger pool when one does not fit."""
        if not entering:
            return
        assert self._pending is None and len(self.live) + len(entering) <= self.places
        for row in entering:
            if not self._enter(row):
                self._rebuild([r for r in entering if r not in self.live.values()])
                return

    def _enter(self, row: LiveRow) -> bool:
        """Puts a row into the pool; whether it fits."""
        request, cache = row.request, row.output.cache
        if self._pool is None or len(request.stops) > self._state.shape[0] - _FIELDS:
            return False
        if max(layer.cluster.stored_heads for layer in cache.kv_layers) > self._pool.stored_heads:
            return False
        place = self._reserved.pop(id(cache), None)
        if place is None:
            taken = {*self.live, *self._reserved.values()}
            place = next((place for place in range(self.places) if place not in taken), None)
            sizes = [span_size(layer.store, row.room) for layer in cache.kv_layers]
            if place is None or not self._pool.reserve(place, sizes):
                return False
        self._pool.place(place, cache, row.room)
        for layer in cache.kv_layers:
            layer.span = None
        self._held[place] = len(row.output.tokens)
        self.live[place] = row
        self._write(place, row)
        return True

    def _rebuild(self, entering: list[LiveRow]) -> None:
        """A pool and a capture for the rows that are there and those that come, with room for as many as may."""
        old = self._pool
        rows = [self._leave(place, keep=True) for place in list(self.live)] + entering
        self._reserved.clear()  # their stores stay where they are until they are copied
        layers = [row.output.cache.kv_layers for row in rows]
        heads = max(layer.cluster.stored_heads for each in layers for layer in each)
        stops = max(len(row.request.stops) for row in rows)
        sizes = [
            sum(span_size(each[i].store, row.room) for each, row in zip(layers, rows, strict=True))
            * self.places
            // len(rows)
            for i in range(len(layers[0]))
        ]
        if old is not None:
            heads = max(heads, old.stored_heads)
            stops = max(stops, self._state.shape[0] - _FIELDS)
            sizes = [max(n, int(c * GROWTH)) for n, c in zip(sizes, old.sizes, strict=True)]
        like = layers[0][0].store.buffers[0]
        self._pool = self._graph = self._cache = old = None  # freed before the new ones are made
        self._pool = DecodePool(self.places, heads, sizes, like)
        self._state = torch.zeros(_FIELDS + max(1, stops), self.places, dtype=torch.int64, device=like.device)
        self._state[_FIELDS:] = _NO_STOP
        self._pool.alive = self._state[ALIVE]
        self._report = torch.zeros(2, self.places, dtype=torch.int64, device=like.device)
        self._cache = PooledCache(get_attachment(self.model), self._pool)
        self._capture()
        for row in rows:
            entered = self._enter(row)
            assert entered, "a new pool has room for the rows that it was made for"

    def _write(self, place: int, row: LiveRow) -> None:
        request, produced = row.request, len(row.output.tokens)
        blocked = max(0, request.min_new - produced) if request.stops else 0
        column = [row.output.tokens[-1], row.position, 1, request.max_new - produced, blocked, *request.stops]
        # Unused stop fields repeat the first stop, so that blocking writes each logit once with one value.
        filler = request.stops[0] if request.stops else _NO_STOP
        column += [filler] * (self._state.shape[0] - len(column))
        self._state[:, place] = torch.tensor(column).to(self._state.device, non_blocking=True)

    def _leave(self, place: int, keep: bool) -> LiveRow:
        row = self.live.pop(place)
        self._pool.release(place, row.output.cache, len(row.output.tokens) - self._held.pop(place), keep)
        return row

    @torch.no_grad()
    def _body(self) -> None:
        """One step of all places; what is captured."""
        state, pool = self._state, self._pool
        stops = state[_FIELDS:]
        logits = forward(self.model, state[TOKEN][:, None], self._cache, state[POSITION][:, None])
        index = stops.clamp(min=0).T
        blocked = (state[BLOCKED] > 0)[:, None]
        logits.scatter_(1, index, logits.gather(1, index).masked_fill(blocked, -torch.inf))
        chosen = logits.argmax(dim=-1)
        self._report[0] = chosen
        if self.places > 1:
            best = logits.gather(1, chosen[:, None])
            gap = best - logits.scatter_(1, chosen[:, None], -torch.inf).amax(dim=-1, keepdim=True)
            self._report[1] = (gap < NEAR_TIE)[:, 0]
        alive = state[ALIVE].clone()
        finished = (stops == chosen).any(dim=0) | (state[REMAINING] <= 1)
        pool.lengths.view(-1, self.places, pool.stored_heads).add_(alive[None, :, None])
        state[TOKEN] = chosen
        state[POSITION] += alive
        state[REMAINING] -= alive
        state[BLOCKED] -= alive
        state[ALIVE] = alive * ~finished

    def _capture(self) -> None:
        """Captures the step while no row is alive, so that warming up changes nothing."""
        if not self._capture_steps:
            return
        # The model need not lie on the current device, and torch's own capture stream belongs to the first one used.
        with torch.cuda.device_of(self._state):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._body()
            current.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):
                self._body()
        self.counters.captures += 1
        self._hosts = [torch.zeros(self._report.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]

    def _launch(self) -> _Report:
        if self._graph is None:
            self._body()
            return _Report(self._report.clone(), None)
        self._graph.replay()
        self._hosts.reverse()  # two buffers: the one before is still to be read
        self._hosts[0].copy_(self._report, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._report.device))
        return _Report(self._hosts[0], ready)

    def step(self) -> Iterator[Finished]:
        """One token for every row in flight -> those that finished, or all with the error of a failed step."""
        try:
            finished = self._advance()
        except Exception as error:
            rows, self.live = list(self.live.values()), {}
            self._pool = self._graph = self._pending = None  # after a device error nothing of them can be trusted
            yield from ((row.request, error, row.output.plan) for row in rows)
            return
        for row in finished:
            yield row.request, row.output, row.output.plan

    def _advance(self) -> list[LiveRow]:
        if self._pending is None:
            self._mark = time.perf_counter()
            self._pending = self._launch()
        finished: list[LiveRow] = []
        while self._pending is not None:
            report = self._pending
            # Running ahead pays unless a row is known to end with the step that is under way.
            ahead = not finished and all(row.room > 1 for row in self.live.values())
            self._pending = self._launch() if ahead else None
            finished += self._read(report)
            if not finished:
                break
        return finished

    def _read(self, report: _Report) -> list[LiveRow]:
        """Hands a step's tokens to the rows -> those that finished with it; they give up their places."""
        if report.ready is not None:
            report.ready.synchronize()
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        tokens, ties = report.tokens.tolist()
        count = len(self.live)
        self.counters.count_step(count)
        finished = []
        for place, row in list(self.live.items()):
            row.output.near_ties += ties[place]
            if row.advance(tokens[place], count, seconds):
                finished.append(self._leave(place, self.keep_caches))
        return finished
