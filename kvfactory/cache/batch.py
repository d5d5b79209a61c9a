"""Caches of several rows in one forward: a batch that decodes together, a prompt that is compressed several ways."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from kvfactory.cache.kv_cache import AttachedCache, AttendedLayer, KVCache, KVLayer
from kvfactory.cache.ragged import RaggedStore, copy_row, join_rows
from kvfactory.methods.base import KVCluster

if TYPE_CHECKING:
    from transformers.cache_utils import CacheLayerMixin

    from kvfactory.monkeypatch import Attachment, LayerSlot


def can_join(layer: KVLayer) -> bool:
    """Whether a row's decode reads are plain attention over its store, so that rows can share one store."""
    return type(layer.cluster).select is KVCluster.select and not layer.cluster.evicts


class BatchLayer(AttendedLayer):
    """One full-attention layer of several rows.

    Rows whose reads are plain attention live in one ragged store; the others keep their own and are read one by one.
    """

    def __init__(self, slot: LayerSlot):
        super().__init__(slot)
        self.rows: list[KVLayer] = []
        self.joined: RaggedStore | None = None
        self._joined_rows: list[int] = []
        self._positions: dict[KVLayer, torch.Tensor | None] = {}  # of joined rows: a shared store has none

    def regroup(self, staying: list[int], entering: list[KVLayer], slack: int) -> None:
        """Keeps the rows at indices `staying`, hands the others their store back, and takes new rows in."""
        places = {row: place for place, row in enumerate(self._joined_rows)}
        members, rows = [], [self.rows[i] for i in staying]
        for i, row in enumerate(self.rows):
            if i in places and i not in staying:
                row.store = copy_row(self.joined, places[i])
                row.store.positions = self._positions.pop(row)
        for i in staying:
            if i in places:
                members.append((self.joined, places[i]))
        joined_rows = [new for new, old in enumerate(staying) if old in places]
        for row in entering:
            if can_join(row):
                joined_rows.append(len(rows))
                members.append((row.store, 0))
                self._positions[row] = row.store.positions
            rows.append(row)
        self.joined = join_rows(members, slack) if members else None
        self.rows, self._joined_rows = rows, joined_rows
        for i in joined_rows:
            rows[i].store = None  # held by the joined store

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for row in self.rows:
            row.seen += k.shape[2]
        if self.joined is not None:
            whole = len(self._joined_rows) == len(self.rows)
            self.joined.append(*((k, v) if whole else (k[self._joined_rows], v[self._joined_rows])))
        for i, row in enumerate(self.rows):
            if row.store is not None:
                row.store.append(k[i : i + 1], v[i : i + 1])

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        if len(self._joined_rows) == len(self.rows):
            return self.joined.attend(q, scale=scale, backend=self.slot.backend)
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        if self.joined is not None:
            out[self._joined_rows] = self.joined.attend(q[self._joined_rows], scale=scale, backend=self.slot.backend)
        for i, row in enumerate(self.rows):
            if row.store is not None:
                out[i] = row.read(q[i : i + 1], scale)[0]
        return out

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """One token a row, everything stored is visible: no mask is ever needed."""
        return 1, 0


class BatchNativeLayer(AttendedLayer):
    """A sliding-window layer of several rows: each row's own transformers layer, read one by one."""

    def __init__(self, slot: LayerSlot):
        super().__init__(slot)
        self.rows: list[CacheLayerMixin] = []
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._read = [row.update(k[i : i + 1], v[i : i + 1]) for i, row in enumerate(self.rows)]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        reads, self._read = self._read, []
        parts = [
            self.slot.backend(q[i : i + 1], *read, scale=scale, causal=False, mask=None) for i, read in enumerate(reads)
        ]
        return torch.cat(parts)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return 1, 0


class BatchCache(AttachedCache):
    """Several finished prompts that decode one token each per forward. Rows enter and leave between forwards."""

    def __init__(self, attachment: Attachment):
        ours = {slot.model_layer for slot in attachment.slots}
        layers = [
            BatchLayer(slot) if slot.model_layer in ours else BatchNativeLayer(slot) for slot in attachment.all_slots
        ]
        super().__init__(attachment, layers)
        self.rows: list[KVCache] = []

    def regroup(self, staying: list[int], entering: list[KVCache], slack: int) -> None:
        """Keeps rows `staying` (indices), gives the others their stores back, adds `entering` with room for `slack`."""
        for i, layer in enumerate(self.layers):
            new = [cache.layers[i] for cache in entering]
            if isinstance(layer, BatchLayer):
                layer.regroup(staying, new, slack)
            else:
                layer.rows = [layer.rows[j] for j in staying] + new
        self.rows = [self.rows[i] for i in staying] + entering


class FanOutLayer(AttendedLayer):
    """One layer of a prompt that several methods or budgets compress from the same keys and values."""

    def __init__(self, slot: LayerSlot, targets: list[KVLayer], failures: dict[int, Exception]):
        super().__init__(slot)
        self.targets = targets
        self.failures = failures

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The prompt passes through; each target stores its own selection afterwards."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        clusters = [target.cluster for i, target in enumerate(self.targets) if i not in self.failures]
        out, left = self.attend_prompt(q, k, v, mask, scale, clusters)
        for i, target in enumerate(self.targets):
            if i in self.failures:
                continue
            try:
                target.finish_prompt(q, k, v, **left)
            except ValueError as error:  # e.g. a ratio budget smaller than the window: the other methods go on
                self.failures[i] = error
        return out

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return (query if isinstance(query, int) else query.shape[0]), 0


class FanOutCache(AttachedCache):
    """Fills several caches from one prompt pass.

    Attributes:
        failures: by index of the target, why it could not be compressed.
    """

    def __init__(self, attachment: Attachment, targets: list[KVCache]):
        self.targets = targets
        self.failures: dict[int, Exception] = {}
        layers = list(targets[0].layers)
        for slot in attachment.slots:
            layers[slot.model_layer] = FanOutLayer(
                slot, [cache.layers[slot.model_layer] for cache in targets], self.failures
            )
        super().__init__(attachment, layers)

    def share_native(self) -> None:
        """Gives every target the sliding-window layers that the prompt filled; their updates never write in place."""
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, FanOutLayer):
                for cache in self.targets[1:]:
                    cache.layers[i] = copy.copy(layer)
