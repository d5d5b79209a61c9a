"""Keys and values of several rows at addresses that do not move, so that one captured step serves a whole run.

Every layer has one flat buffer. A row has a span of it in each layer, and in that span a segment per stored head with
room for its new tokens. Where segments start and how long they are lies on the device, so rows of any size come and go
without changing anything about the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvfactory.cache.kv_cache import AttachedCache, AttendedLayer, KVCache, KVLayer
from kvfactory.cache.ragged import RaggedStore, copy_row
from kvfactory.cache.store import DenseStore, Store
from kvfactory.kernels.dispatch import decode_kernels
from kvfactory.ops.select import to_device

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment, LayerSlot


class Arena:
    """Spans of one buffer, first fit."""

    def __init__(self, size: int):
        self.size = size
        self._free = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        """Start of a free span of `size` slots, which is taken; None when there is none."""
        for i, (start, free) in enumerate(self._free):
            if size <= free:
                self._free[i : i + 1] = [(start + size, free - size)] if size < free else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Frees a span, joining it with free neighbours."""
        spans = sorted([*self._free, (start, size)])
        self._free = []
        for begin, n in spans:
            if self._free and sum(self._free[-1]) == begin:
                begin, n = self._free[-1][0], self._free.pop()[1] + n
            self._free.append((begin, n))


@dataclass
class Placed:
    """One layer of a row in the pool: (1, Hs) each, Hs the row's own stored heads, on whichever side they are known."""

    starts: torch.Tensor
    lengths: torch.Tensor
    prompt: torch.Tensor
    positions: torch.Tensor | None


def span_size(store: Store, room: int) -> int:
    """Slots that a store takes in a pool with `room` free slots behind every segment."""
    if store.room >= room:
        return store.buffers[0].numel() // store.buffers[0].shape[-1]
    assert isinstance(store, RaggedStore), "dense stores are made with room for all new tokens"
    lengths = store.segment_lengths(0)
    return sum(lengths) + room * len(lengths)


class DecodePool:
    """The storage of up to R rows that decode together.

    Attributes:
        keys, values: per layer (slots, D).
        starts, lengths: (L, R * Hs) int64 on the device; lengths count what the step before has appended.
        alive: (R,) on the device; a row that is not alive appends nothing.
    """

    def __init__(self, rows: int, stored_heads: int, sizes: list[int], like: torch.Tensor):
        """`sizes`: slots per layer; `like`: a tensor (..., D) of the stored dtype and device."""
        self.rows, self.stored_heads, self.sizes = rows, stored_heads, sizes
        D = like.shape[-1]
        self.keys = [like.new_zeros(size, D) for size in sizes]
        self.values = [like.new_zeros(size, D) for size in sizes]
        shape = (len(sizes), rows * stored_heads)
        self.starts, self.lengths = (torch.zeros(shape, dtype=torch.int64, device=like.device) for _ in range(2))
        self.alive = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._arenas = [Arena(size) for size in sizes]
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._placed: dict[int, list[Placed]] = {}

    def reserve(self, row: int, sizes: list[int]) -> bool:
        """Takes a span in every layer for `row`; whether there was room for it."""
        assert row not in self._spans
        taken: list[tuple[int, int]] = []
        for arena, size in zip(self._arenas, sizes, strict=True):
            start = arena.take(size)
            if start is None:
                for other, span in zip(self._arenas, taken, strict=False):
                    other.give(*span)
                return False
            taken.append((start, size))
        self._spans[row] = taken
        return True

    def free(self, row: int) -> None:
        """Gives up the spans of a row."""
        for arena, span in zip(self._arenas, self._spans.pop(row), strict=True):
            arena.give(*span)

    def span(self, row: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (slots, D) of a row's span, to be filled in place."""
        start, size = self._spans[row][layer]
        return self.keys[layer][start : start + size], self.values[layer][start : start + size]

    def place(self, row: int, cache: KVCache, room: int) -> None:
        """Takes over what a cache holds, copying what does not lie in the row's spans yet; its stores are given up."""
        assert row not in self._placed
        placed = []
        for i, layer in enumerate(cache.kv_layers):
            placed.append(self._take_over(layer.store, i, row, room))
            layer.store = None
        self.starts[:, self._heads_of(row)] = self._spread([part.starts for part in placed])
        self.lengths[:, self._heads_of(row)] = self._spread([part.lengths for part in placed])
        self._placed[row] = placed

    def _spread(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """(1, Hs) per layer -> (L, the pool's Hs): heads of a group share a segment where the row stores kv heads."""
        if any(part.device.type != "cpu" for part in parts):
            parts = [to_device(part, self.alive.device) for part in parts]
        spread = [part.repeat_interleave(self.stored_heads // part.shape[1], dim=1) for part in parts]
        return to_device(torch.cat(spread), self.alive.device)

    def _take_over(self, store: Store, i: int, row: int, room: int) -> Placed:
        base = self._spans[row][i][0]
        if store.room < room:
            store = copy_row(store, slack=room)
        buffers = [x.view(-1, x.shape[-1]) for x in store.buffers]
        for target, x in zip(self.span(row, i), buffers, strict=True):
            if target.data_ptr() != x.data_ptr():
                target[: x.shape[0]].copy_(x)
        if isinstance(store, DenseStore):
            heads = len(store.prompt_slots)
            starts = base + torch.arange(heads)[None] * store.capacity
            prompt = torch.full((1, heads), store.length, dtype=torch.int64)
            return Placed(starts, prompt, prompt, store.positions)
        # Whichever side knows the lengths: asking the device would make the host wait for the prompt.
        starts, lengths = store.starts.known + base, store.lengths.known.clone()
        return Placed(starts, lengths, store.prompt_lengths.known, store.positions)

    def release(self, row: int, cache: KVCache, seen: int, keep: bool) -> None:
        """Gives a row's stores back to its cache, which has seen `seen` tokens by now, and frees its spans.

        Args:
            keep: copy them out; otherwise they are views, right until another row takes the spans.
        """
        for i, (layer, part) in enumerate(zip(cache.kv_layers, self._placed.pop(row), strict=True)):
            starts = part.starts - self._spans[row][i][0]
            lengths = part.lengths + (seen - layer.seen)
            store = RaggedStore(*self.span(row, i), starts, lengths, 0, part.prompt)
            store.positions = part.positions
            layer.store = copy_row(store) if keep else store
            layer.seen = seen
        self.lengths[:, self._heads_of(row)] = 0  # later steps read nothing for it
        self.free(row)

    def _heads_of(self, row: int) -> slice:
        return slice(row * self.stored_heads, (row + 1) * self.stored_heads)


class PooledLayer(AttendedLayer):
    """One layer of the step: appends each row's new token and attends to its segments, in one kernel."""

    def __init__(self, slot: LayerSlot, pool: DecodePool, index: int, kernels: Any, workspace: Any):
        super().__init__(slot)
        self._pool, self._index, self._kernels, self._workspace = pool, index, kernels, workspace

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The attention appends."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        pool, i = self._pool, self._index
        R, Hq, _, D = q.shape
        out = self._kernels.append_and_attend(
            q.reshape(R * pool.stored_heads, Hq // pool.stored_heads, D),
            k,
            v,
            pool.keys[i],
            pool.values[i],
            pool.starts[i],
            pool.lengths[i],
            pool.alive,
            copies=pool.stored_heads // k.shape[1],
            scale=scale,
            workspace=self._workspace,
        )
        return out.view(R, 1, Hq, D)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """One token a row, everything stored is visible: no mask is ever needed."""
        return 1, 0


class PooledCache(AttachedCache):
    """What the model gets in a step over a pool."""

    def __init__(self, attachment: Attachment, pool: DecodePool):
        kernels = decode_kernels(pool.alive.device)
        workspace = kernels.make_workspace(
            pool.rows * pool.stored_heads,
            attachment.heads[0] // pool.stored_heads,
            pool.keys[0].shape[1],
            capacity=max(pool.sizes),
            device=pool.alive.device,
        )
        super().__init__(
            attachment,
            [PooledLayer(slot, pool, i, kernels, workspace) for i, slot in enumerate(attachment.slots)],
        )


def declared_span(layer: KVLayer, prompt_len: int, room: int) -> int:
    """Slots that a prompt of so many tokens will take at most in a layer, known before it runs."""
    ctx = layer.cache.context(prompt_len)
    return layer.cluster.declared_bounds(ctx)[1] + room * len(layer.cluster.declared(ctx))
