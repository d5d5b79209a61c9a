"""The decode step captured once as a CUDA graph: model, attention, choice of the token, stop test and slot advance.

Everything that differs between steps and rows lies in tensors at fixed addresses, so rows come and go without a new
capture. The host reads one small report a step, and the next step is under way by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from kvfactory.cache.kv_cache import KVCache
from kvfactory.cache.pool import DecodePool, PooledCache, declared_span, span_size
from kvfactory.cache.ragged import copy_row
from kvfactory.loop_engine import forward
from kvfactory.monkeypatch import get_attachment
from kvfactory.ops.select import to_device
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
    """Rows in flight over one pool. Pool and capture outlive a run; only one decoder uses them at a time.

    Attributes:
        keep_caches: rows leave with copies of their keys and values; otherwise with views of the pool, which are right
            until another row takes the place.
    """

    def __init__(self, model: PreTrainedModel, places: int, capture: bool = True):
        """`capture` False runs the same step uncaptured, on any device, for tests."""
        self.model = model
        self.places = places
        self.keep_caches = True
        self.counters = Counters()
        self._live: dict[int, LiveRow] = {}  # by place in the pool
        self._reserved: dict[KVCache, int] = {}  # places that wait for a prompt
        self._capture_steps = capture
        self._pool: DecodePool | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pending: _Report | None = None
        self._mark = 0.0

    @property
    def live(self) -> list[LiveRow]:
        """The rows in flight."""
        return list(self._live.values())

    def start(self, counters: Counters, keep_caches: bool) -> None:
        """Before the rows of another decoder; a step that was captured when weights lay elsewhere is dropped."""
        assert not self._live and not self._reserved and self._pending is None
        self.counters, self.keep_caches = counters, keep_caches
        if self._pool is not None and self._weights != _addresses(self.model):
            self._drop()

    def reserve(self, cache: KVCache, prompt_len: int, max_new: int) -> None:
        """Gives a prompt that is about to run its place in the pool, if there is one, so that nothing is copied."""
        if self._pool is None:
            return
        layers, place = cache.kv_layers, self._free_place()
        sizes = [declared_span(layer, prompt_len, max_new) for layer in layers]
        if place is None or not self._pool.reserve(place, sizes):
            return
        self._reserved[cache] = place
        for i, layer in enumerate(layers):
            layer.span = self._pool.span(place, i)

    def give_up(self, cache: KVCache, keep: bool) -> None:
        """Takes a place back from a cache that is not in flight; with `keep`, what it stored there is copied out."""
        place = self._reserved.pop(cache, None)
        if place is None:
            return
        for layer in cache.kv_layers:
            layer.span = None
            if keep:
                layer.store = copy_row(layer.store)
        self._pool.free(place)

    def enter(self, entering: list[LiveRow]) -> None:
        """Takes rows in that have their first token; builds a larger pool when they do not all fit.

        Raises:
            Exception: no memory for such a pool, or a capture that failed; all rows are lost then, those in flight too.
        """
        try:
            assert self._pending is None and len(self._live) + len(entering) <= self.places
            waiting = [row for row in entering if not self._enter(row)]
            if waiting:
                self._rebuild(waiting)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        """Lets go of everything, rows included: after an error nothing of it can be trusted."""
        self._live.clear()
        self._reserved.clear()
        self._pool = self._graph = self._cache = self._pending = None

    def _free_place(self) -> int | None:
        taken = {*self._live, *self._reserved.values()}
        return next((place for place in range(self.places) if place not in taken), None)

    def _enter(self, row: LiveRow) -> bool:
        """Puts a row into the pool; whether it fits."""
        cache = row.output.cache
        if self._pool is None or len(row.request.stops) > self._state.shape[0] - _FIELDS:
            return False
        if _stored_heads(row) > self._pool.stored_heads:
            return False
        place = self._reserved.pop(cache, None)
        if place is None:
            place = self._free_place()
            if place is None or not self._pool.reserve(place, _spans(row)):
                return False
        self._pool.place(place, cache, row.room)
        for layer in cache.kv_layers:
            layer.span = None
        self._live[place] = row
        self._write(place, row)
        return True

    @torch.inference_mode(False)  # what a caller's inference mode allocates could not be written outside of it
    def _rebuild(self, entering: list[LiveRow]) -> None:
        """A pool and a capture for the rows that are there and those that come, with room for as many as may."""
        rows = [self._leave(place, keep=True) for place in list(self._live)] + entering
        for cache in list(self._reserved):
            self.give_up(cache, keep=True)
        heads = max(map(_stored_heads, rows))
        stops = max(1, *(len(row.request.stops) for row in rows))
        tight = [sum(spans) for spans in zip(*map(_spans, rows), strict=True)]
        roomy = [size * self.places // len(rows) for size in tight]
        if self._pool is not None:
            heads = max(heads, self._pool.stored_heads)
            stops = max(stops, self._state.shape[0] - _FIELDS)
            roomy = [max(size, int(old * GROWTH)) for size, old in zip(roomy, self._pool.sizes, strict=True)]
        like = rows[0].output.cache.kv_layers[0].store.buffers[0]
        self._pool = self._graph = self._cache = None  # freed before the new ones are made
        self._pool = self._allocate(heads, [roomy, tight], like)
        self._state = torch.zeros(_FIELDS + stops, self.places, dtype=torch.int64, device=like.device)
        self._state[_FIELDS:] = _NO_STOP
        self._pool.alive = self._state[ALIVE]
        self._report = torch.zeros(2, self.places, dtype=torch.int64, device=like.device)
        self._cache = PooledCache(get_attachment(self.model), self._pool)
        self._weights = _addresses(self.model)
        self._capture()
        for row in rows:
            entered = self._enter(row)
            assert entered, "a new pool has room for the rows that it was made for"

    def _allocate(self, heads: int, choices: list[list[int]], like: torch.Tensor) -> DecodePool:
        """A pool with the first of several lists of sizes that there is memory for."""
        for sizes in choices:
            try:
                return DecodePool(self.places, heads, sizes, like)
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # whose frames hold what was allocated so far
        raise failure

    def _write(self, place: int, row: LiveRow) -> None:
        stops = row.stops_below(self.model.config.get_text_config(decoder=True).vocab_size)
        blocked = max(0, row.request.min_new - len(row.output.tokens)) if stops else 0
        column = [row.output.tokens[-1], row.position, 1, row.room, blocked, *stops]
        # Unused stop fields repeat the first stop, so that blocking writes each logit once with one value.
        filler = stops[0] if stops else _NO_STOP
        column += [filler] * (self._state.shape[0] - len(column))
        self._state[:, place] = to_device(torch.tensor(column), self._state.device)

    def _leave(self, place: int, keep: bool) -> LiveRow:
        row = self._live.pop(place)
        self._pool.release(place, row.output.cache, row.position, keep)
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

    def step(self, ahead: bool = True) -> Iterator[Finished]:
        """One token for every row in flight -> those that finished; when a step fails, the others with its error.

        Args:
            ahead: launch the next step before this one is read. Not where rows may enter in between.
        """
        rows, finished, failure = self.live, [], None
        try:
            self._advance(ahead, finished)
        except Exception as error:
            failure = error
            self._drop()
        yield from (row.result() for row in finished)
        if failure is not None:
            yield from (row.result(failure) for row in rows if row not in finished)

    def _advance(self, ahead: bool, finished: list[LiveRow]) -> None:
        if self._pending is None:
            self._mark = time.perf_counter()
            self._pending = self._launch()
        while self._pending is not None:
            report = self._pending
            # Running ahead pays unless a row is known to end with the step that is under way.
            go_on = ahead and not finished and all(row.room > 1 for row in self.live)
            self._pending = self._launch() if go_on else None
            self._read(report, finished)
            if not finished:
                break

    def _read(self, report: _Report, finished: list[LiveRow]) -> None:
        """Hands a step's tokens to the rows; those that finish with it give up their places."""
        if report.ready is not None:
            report.ready.synchronize()
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        tokens, ties = report.tokens.tolist()
        count = len(self._live)
        self.counters.count_step(count)
        for place, row in list(self._live.items()):
            row.output.near_ties += ties[place]
            if row.advance(tokens[place], count, seconds):
                finished.append(self._leave(place, self.keep_caches))


def _stored_heads(row: LiveRow) -> int:
    return max(layer.cluster.stored_heads for layer in row.output.cache.kv_layers)


def _spans(row: LiveRow) -> list[int]:
    """Slots per layer that a row takes in a pool."""
    return [span_size(layer.store, row.room) for layer in row.output.cache.kv_layers]


def _addresses(model: PreTrainedModel) -> list[tuple[int, torch.dtype]]:
    """Where a captured step reads its weights."""
    return [(x.data_ptr(), x.dtype) for x in chain(model.parameters(), model.buffers())]
