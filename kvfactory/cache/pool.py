"""Keys and values of several rows at addresses that do not move, so that one captured step serves a whole run.

Every layer has one flat buffer, every row a region of it, every stored head of a row a segment in that region with room
for its new tokens. Rows are copied in after their prompt and leave as views; where segments start and how long they are
lies on the device, so that neither changes anything about the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvfactory.cache.kv_cache import AttachedCache, AttendedLayer, KVCache
from kvfactory.cache.ragged import RaggedStore, join_rows
from kvfactory.cache.store import DenseStore, Store
from kvfactory.kernels.dispatch import decode_kernels
from kvfactory.ops.select import to_device

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment, LayerSlot

GROWTH = 1.5
"""A pool that a row does not fit into is built anew with this many times the slots: few rebuilds in a run."""


@dataclass
class Placed:
    """One layer of a row in the pool: (1, Hs) each, Hs the row's own stored heads, on whichever side they are known."""

    starts: torch.Tensor
    lengths: torch.Tensor
    prompt: torch.Tensor
    positions: torch.Tensor | None


def region_size(store: Store, room: int) -> int:
    """Slots that a store takes in a pool with `room` free slots behind every segment."""
    if isinstance(store, DenseStore):
        return len(store.prompt_slots) * (store.length + room)
    if store.room >= room:
        return store.buffers[0].shape[0]
    lengths = store.segment_lengths(0)
    return sum(lengths) + room * len(lengths)


class DecodePool:
    """The storage of R rows that decode together.

    Attributes:
        keys, values: per layer (R * capacity, D).
        starts, lengths: (L, R * Hs) int64 on the device; lengths count what the step before has appended.
        alive: (R,) bool on the device; a row that is not alive appends nothing.
    """

    def __init__(self, rows: int, stored_heads: int, capacities: list[int], like: torch.Tensor):
        """`capacities`: slots of one row in each layer; `like`: a tensor (..., D) of the stored dtype and device."""
        self.rows, self.stored_heads, self.capacities = rows, stored_heads, capacities
        D = like.shape[-1]
        self.keys = [like.new_zeros(rows * capacity, D) for capacity in capacities]
        self.values = [like.new_zeros(rows * capacity, D) for capacity in capacities]
        shape = (len(capacities), rows * stored_heads)
        self.starts = torch.zeros(shape, dtype=torch.int64, device=like.device)
        self.lengths = torch.zeros(shape, dtype=torch.int64, device=like.device)
        self.alive = torch.zeros(rows, dtype=torch.bool, device=like.device)
        self._placed: dict[int, list[Placed]] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def fits(self, cache: KVCache, room: int) -> bool:
        """Whether a row with `room` more tokens to come fits into its place."""
        heads = max(layer.cluster.stored_heads for layer in cache.kv_layers)
        sizes = [region_size(layer.store, room) for layer in cache.kv_layers]
        return heads <= self.stored_heads and all(n <= c for n, c in zip(sizes, self.capacities, strict=True))

    def place(self, row: int, cache: KVCache, room: int) -> None:
        """Copies what a cache holds into place `row`; the cache's own stores are freed."""
        assert row not in self._placed
        placed = []
        for i, layer in enumerate(cache.kv_layers):
            placed.append(self._copy(layer.store, i, row * self.capacities[i], room))
            layer.store = None
        where = slice(row * self.stored_heads, (row + 1) * self.stored_heads)
        self.starts[:, where] = self._spread([part.starts for part in placed])
        self.lengths[:, where] = self._spread([part.lengths for part in placed])
        self._placed[row] = placed

    def _spread(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """(1, Hs) per layer -> (L, the pool's Hs): heads of a group share a segment where the row stores kv heads."""
        on_host = all(part.device.type == "cpu" for part in parts)
        if not on_host:
            parts = [to_device(part, self.alive.device) for part in parts]
        spread = [part.repeat_interleave(self.stored_heads // part.shape[1], dim=1) for part in parts]
        return to_device(torch.cat(spread), self.alive.device)

    def _copy(self, store: Store, i: int, base: int, room: int) -> Placed:
        if isinstance(store, DenseStore):
            k, v = (x[0] for x in store.view())
            heads, n, D = k.shape
            size = heads * (n + room)
            for pool, x in ((self.keys[i], k), (self.values[i], v)):
                pool[base : base + size].view(heads, n + room, D)[:, :n].copy_(x)
            starts = base + torch.arange(heads)[None] * (n + room)
            lengths = torch.full((1, heads), n, dtype=torch.int64)
            return Placed(starts, lengths, lengths, store.positions)
        if store.room < room:
            store = join_rows([(store, 0)], room)
        for pool, x in zip((self.keys[i], self.values[i]), store.buffers, strict=True):
            pool[base : base + x.shape[0]].copy_(x)
        # Whichever side knows the lengths: asking the device would make the host wait for the prompt.
        return Placed(
            store.starts.known + base, store.lengths.known.clone(), store.prompt_lengths.known, store.positions
        )

    def release(self, row: int, cache: KVCache, appended: int, keep: bool) -> None:
        """Gives a row's stores back to its cache, `appended` decoded tokens after it was placed.

        Args:
            keep: copy them out; otherwise they are views, right until another row takes the place.
        """
        for i, (layer, part) in enumerate(zip(cache.kv_layers, self._placed.pop(row), strict=True)):
            store = RaggedStore(self.keys[i], self.values[i], part.starts, part.lengths + appended, 0, part.prompt)
            layer.store = join_rows([(store, 0)], 0) if keep else store
            layer.store.positions = part.positions
            layer.seen += appended


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
        heads = attachment.heads[0]
        workspace = kernels.make_workspace(
            pool.rows * pool.stored_heads,
            heads // pool.stored_heads,
            pool.keys[0].shape[1],
            capacity=max(pool.capacities),
            device=pool.alive.device,
        )
        super().__init__(
            attachment,
            [PooledLayer(slot, pool, i, kernels, workspace) for i, slot in enumerate(attachment.slots)],
        )
