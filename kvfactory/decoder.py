"""Rows in flight: prompts are prefilled alone, what they leave decodes together, one forward a step for all.

Prefilling alone keeps the numerics of batch 1 and needs no padding. One prompt may leave several rows, when several
methods or budgets compress the same prompt pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from kvfactory.cache.batch import FanOutCache
from kvfactory.cache.kv_cache import KVCache
from kvfactory.graph_engine import GraphEngine
from kvfactory.graph_support import graph_obstacle
from kvfactory.loop_engine import LoopEngine, choose, forward
from kvfactory.model_parts import input_device
from kvfactory.monkeypatch import Attachment, get_attachment
from kvfactory.plan import Plan
from kvfactory.rows import Counters, Finished, LiveRow, Request, RowOutput, Timing


def device_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Decoder:
    """Keeps up to `batch_size` rows in flight: finished rows leave, prompts come in, one forward moves all rows on.

    A prompt that several methods compress leaves a row for each; with `batch_size` 1 they decode one after the other.
    A decoder runs once.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int = 1, graph: bool = False, keep_caches: bool = True):
        """Args:
        graph: replay a captured step for every method whose decode reads are plain attention.
        keep_caches: rows keep their keys and values after they are handed out; a caller that measures a row at once
            can do without.
        """
        attachment = get_attachment(model)
        assert attachment is not None
        self.model = model
        self.attachment: Attachment = attachment
        self.batch_size = batch_size
        self.counters = Counters()
        self._loop = LoopEngine(model, self.counters)
        self._graph = self._take_engine(keep_caches) if graph else None
        self._obstacles: dict[int, str | None] = {}

    def _take_engine(self, keep_caches: bool) -> GraphEngine:
        """The engine that the last decoder has left, if it had as many places.

        It is this decoder's alone until a run ends well: one that was abandoned, or failed, leaves nothing behind.
        """
        engine = self.attachment.graph_engines.pop(self.batch_size, None)
        self.attachment.graph_engines.clear()  # pools of other sizes would hold their memory for nothing
        if engine is None:
            engine = GraphEngine(self.model, self.batch_size)
        engine.start(self.counters, keep_caches)
        return engine

    @property
    def _engines(self) -> list[LoopEngine | GraphEngine]:
        return [self._loop] if self._graph is None else [self._graph, self._loop]

    @property
    def _in_flight(self) -> int:
        return sum(len(engine.live) for engine in self._engines)

    def run(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Rows as they finish, in no fixed order; an exception stands for a row that failed.

        Raises:
            ValueError: the method was detached while rows were being generated.
        """
        with self.attachment.fused():
            yield from self._run(requests)
        if self._graph is not None and self._is_attached:
            self.attachment.graph_engines = {self.batch_size: self._graph}

    @property
    def _is_attached(self) -> bool:
        return get_attachment(self.model) is self.attachment

    def _run(self, requests: Iterable[Request]) -> Iterator[Finished]:
        waiting = iter(requests)
        ready: deque[LiveRow] = deque()  # prefilled rows that have no place yet
        more = True
        while more or ready or self._in_flight:
            if not self._is_attached:
                raise ValueError(f"{self.attachment.plan.method} was detached while rows were being generated with it")
            looped: list[LiveRow] = []
            while self._in_flight + len(looped) < self.batch_size and (ready or more):
                if ready:
                    yield from self._admit(ready, looped)
                    continue
                request = next(waiting, None)
                if request is None:
                    more = False
                    continue
                yield from self._prefill(request, ready)
            yield from self._enter(looped)
            if self._graph is not None and self._graph.live:
                # Nothing enters behind a step under way, as where a looped row finishes and another comes in its place.
                full = self._in_flight == self.batch_size or not (more or ready)
                yield from self._graph.step(ahead=full and not self._loop.live)
            if self._loop.live:
                yield from self._loop.step()

    # No row stays in a variable of `_run`: its keys and values would be held while the next prompt runs.

    def _prefill(self, request: Request, ready: deque[LiveRow]) -> Iterator[Finished]:
        """Adds the rows of a prompt to `ready` -> those that are finished already."""
        for row in self._prompt(request):
            if isinstance(row, LiveRow):
                ready.append(row)
            else:
                yield row

    def _admit(self, ready: deque[LiveRow], looped: list[LiveRow]) -> Iterator[Finished]:
        """Moves as many rows as there is room for out of `ready`; looped ones gather, as each entry copies the batch.

        Replayed rows move into the pool at once: later prompts then fill their places there directly.
        """
        room = self.batch_size - self._in_flight - len(looped)
        group = [ready.popleft() for _ in range(min(room, len(ready)))]
        looped += [row for row in group if not self._replays(row.output.plan)]
        yield from self._enter([row for row in group if self._replays(row.output.plan)])

    def _enter(self, entering: list[LiveRow]) -> Iterator[Finished]:
        """Puts rows in flight -> rows that are lost because there is no memory to hold them together."""
        for engine in self._engines:
            rows = [row for row in entering if self._replays(row.output.plan) == (engine is self._graph)]
            if not rows:
                continue
            concerned = [*engine.live, *rows]
            try:
                engine.enter(rows)
            except Exception as error:  # handed to the caller, who knows what it costs
                yield from (row.result(error) for row in concerned)

    def _replays(self, plan: Plan) -> bool:
        if self._graph is None:
            return False
        if id(plan) not in self._obstacles:
            device = input_device(self.model)
            self._obstacles[id(plan)] = graph_obstacle(self.attachment, plan, device, self.model.dtype)
        return self._obstacles[id(plan)] is None

    def _prompt(self, request: Request) -> Iterator[LiveRow | Finished]:
        """Prefills one request -> live rows, or what is finished (or failed) after its first token already."""
        for plans in self._share_passes(request.plans):
            caches = [request.new_cache(self.attachment, plan) for plan in plans]
            fan = FanOutCache(self.attachment, caches) if len(caches) > 1 else None
            ids = request.ids.to(input_device(self.model))
            self._reserve(request, plans, caches)
            start = device_time(ids.device)
            try:
                logits = forward(self.model, ids[None], fan or caches[0])
            except Exception as error:  # handed to the caller, who knows what it costs
                for plan, cache in zip(plans, caches, strict=True):
                    yield self._without_row(request, error, plan, cache)
                continue
            seconds = device_time(ids.device) - start
            self.counters.prefills += 1
            if not self.attachment.slots:  # all layers slide: none has asked for the context
                for cache in caches:
                    cache.context(len(ids))
            if fan is not None:
                fan.share_native()
            for i, (plan, cache) in enumerate(zip(plans, caches, strict=True)):
                if fan is not None and i in fan.failures:
                    yield self._without_row(request, fan.failures[i], plan, cache)
                    continue
                output = RowOutput(plan, cache, prompt_bytes=cache.bytes(), timing=Timing(seconds, 0.0))
                live = LiveRow(request, output, position=len(ids))
                [token] = choose(logits.clone(), [live])
                yield self._without_row(request, output, plan, cache) if live.take(token) else live

    def _reserve(self, request: Request, plans: list[Plan], caches: list[KVCache]) -> None:
        """Lets prompts that will be replayed fill their places at once."""
        for plan, cache in zip(plans, caches, strict=True):
            if not self._replays(plan):
                continue
            try:
                self._graph.reserve(cache, len(request.ids), request.max_new)
            except ValueError:  # a budget that this prompt cannot have: the prompt itself says so, per plan
                continue

    def _without_row(self, request: Request, result: RowOutput | Exception, plan: Plan, cache: KVCache) -> Finished:
        """What a prompt comes to that leaves no row to decode."""
        if self._graph is not None:
            self._graph.give_up(cache, keep=self._graph.keep_caches and not isinstance(result, Exception))
        return request, result, plan

    def _share_passes(self, plans: list[Plan]) -> list[list[Plan]]:
        """Groups of plans that can compress one prompt pass; methods that change the pass have one of their own."""
        changing = [any(c.changes_prompt for c in self.attachment.clusters(p)) for p in plans]
        sharing = [p for p, changes in zip(plans, changing, strict=True) if not changes]
        alone = [[p] for p, changes in zip(plans, changing, strict=True) if changes]
        return ([sharing] if sharing else []) + alone
