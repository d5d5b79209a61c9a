"""The caches that transformers carries through a model: one layer object per attention layer.

Two lengths never mix: `get_seq_length` is the logical length, tokens seen, from which the model derives positions; a
store's length is what is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfactory.cache.ragged import RaggedStore
from kvfactory.cache.store import DECODE_SLACK, DenseStore, Store
from kvfactory.methods.base import Kept, KVCluster, PromptContext, RaggedKept
from kvfactory.ops.merge import merge_dropped

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment, LayerSlot
    from kvfactory.plan import Plan


class AttendedLayer(CacheLayerMixin):
    """A cache layer that answers the attention call following its `update`, through the slot of its module."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, slot: LayerSlot):
        super().__init__()
        self.slot = slot
        self.seen = 0

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new keys and values (B, Hk, t, D) and binds this layer to the attention call that follows.

        Raises:
            ValueError: the method that made this cache is no longer attached.
        """
        if self.slot.module.__dict__.get("kv_slot") is not self.slot:
            raise ValueError("this cache belongs to a method that is no longer attached; start from an empty cache")
        self.append(k, v)
        self.seen += k.shape[2]
        self.is_initialized = True
        self.slot.bound = self
        return k, v

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores new tokens, if they are to be stored before the attention."""
        raise NotImplementedError

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """The attention of q (B, Hq, t, D), whose own keys and values are k and v -> (B, t, Hq, D)."""
        raise NotImplementedError

    def attend_prompt(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        clusters: Iterable[KVCluster],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The prompt's attention (B, S, Hq, D), and what it leaves for `finish_prompt`: `lse`, if one wants it."""
        backend, causal = self.slot.backend, mask is None and q.shape[2] > 1
        if causal and any(cluster.wants_lse(q, k) for cluster in clusters) and backend.attend_with_lse is not None:
            found = backend.attend_with_lse(q, k, v, scale=scale)
            if found is not None:
                return found[0], {"lse": found[1]}
        return backend(q, k, v, scale=scale, causal=causal, mask=mask), {}

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing to prepare: stores are made when a prompt is finished."""

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{what} moves cached tokens around, which an attached kvfactory cache cannot follow; use greedy decoding"
        )

    def reorder_cache(self, *args: Any) -> None:
        self._refuse("beam search")

    def crop(self, *args: Any) -> None:
        self._refuse("assisted decoding")


class KVLayer(AttendedLayer):
    """One full-attention layer of one generation: passes the prompt through, then holds what the method kept.

    Attributes:
        span: where the store is to lie, (slots, D) for keys and for values, when it has a place in a pool already.
    """

    def __init__(self, slot: LayerSlot, cluster: KVCluster, cache: KVCache):
        super().__init__(slot)
        self.cluster = cluster
        # The cache holds its layers: a cycle would keep keys and values until the next garbage collection.
        self._cache = weakref.ref(cache)
        self.store: Store | None = None
        self.span: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def cache(self) -> KVCache:
        """The cache that this layer is part of."""
        cache = self._cache()
        assert cache is not None, "a layer outlives its cache"
        return cache

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.store is None:
            return
        if self.cluster.evicts and k.shape[2] > 1:
            raise ValueError("a later turn of several tokens is not possible with --decode_evict on: pass them singly")
        self.store.append(k, v)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        if self.store is not None:
            # The model's own mask fits what is stored only while nothing was dropped; it matters for padded prompts.
            return self.read(q, scale, mask if self.cluster.capability.stage == "none" else None)
        ctx = self.cache.context(k.shape[2])
        k, v = self.cluster.before_attend(q, k, v, ctx)
        out, left = self.attend_prompt(q, k, v, mask, scale, [self.cluster])
        self.finish_prompt(q, k, v, **left)
        return out

    def read(self, q: torch.Tensor, scale: float, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of q (B, Hq, t, D) over what is stored, its own keys appended already."""
        ctx = self.cache.context(None)
        visible = self.cluster.select(q, self.store, ctx) if mask is None else mask
        if not self.cluster.evicts:
            return self.store.attend(q, scale=scale, backend=self.slot.backend, visible=visible)
        out = self.store.attend(q, scale=scale, backend=self.slot.backend, visible=visible)
        self.cluster.evict(q, self.store, self.seen - 1, ctx)
        return out

    def finish_prompt(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lse: torch.Tensor | None = None
    ) -> None:
        """Compresses and stores the prompt once its attention is computed; nothing refers to k and v afterwards."""
        self.seen = k.shape[2]
        kept = self.cluster.compress(q, k, v, replace(self.cache.context(k.shape[2]), lse=lse))
        if kept is not None and self.cache.plan.merge is not None:
            kept = merge_dropped(k, v, kept, self.cache.plan.merge, self.cache.plan.merge_target)
        slack = self.cache.slack
        if isinstance(kept, RaggedKept):
            self.store = RaggedStore.build(k, v, kept, slack, self.span)
        else:
            if self.cluster.evicts and kept is not None:  # one slot beyond the budget, for the token being attended
                slack = min(slack, max(0, self.cache.context(None).budget - kept.indices.shape[2]) + 1)
            self.store = DenseStore(k, v, slack, self.span, kept=kept)
            if kept is not None:
                self.store.add_columns(kept.columns, kept.history)
        if self.cache.record_positions and isinstance(kept, Kept):
            self.store.positions = kept.indices.to(torch.int32)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(kv length, kv offset) of the mask the model would build for a query of so many tokens.

        Reads of a store build their own masks, so only the prompt's and a padded FullKV's matter.
        """
        t = query if isinstance(query, int) else query.shape[0]
        stored = self.seen if not isinstance(self.store, DenseStore) else self.store.length
        return stored + t, self.seen - stored

    def reset(self) -> None:
        self.seen, self.store, self.is_initialized = 0, None, False


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache: slots in use, auxiliary data, storage held with slack."""

    used: int
    aux: int
    alloc: int


class AttachedCache(Cache):
    """Base of every cache that an attached model accepts."""

    def __init__(self, attachment: Attachment, layers: list[CacheLayerMixin]):
        self.attachment = attachment
        super().__init__(layers=layers)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen. Sliding layers count the same, so any layer may be asked."""
        return self.layers[layer_idx or 0].get_seq_length()


class KVCache(AttachedCache):
    """What one generation holds. Made by `Attachment.new_cache`.

    Attributes:
        record_positions: keep the original position of every stored prompt token; off, since it costs memory.
    """

    def __init__(
        self,
        attachment: Attachment,
        plan: Plan,
        native_layers: list[CacheLayerMixin],
        *,
        example_id: str = "",
        max_new_tokens: int | None = None,
        sampler: Callable[[torch.Tensor], torch.Tensor] | None = None,
        template_tail: int = 0,
    ):
        """`native_layers` are transformers' own, one per model layer; full-attention ones are replaced by ours."""
        self.plan = plan
        self.example_id = example_id
        self.sampler = sampler
        self.template_tail = template_tail
        self.slack = DECODE_SLACK if max_new_tokens is None else max_new_tokens
        self.record_positions = attachment.record_positions
        self._context: PromptContext | None = None
        layers = list(native_layers)
        for slot, cluster in zip(attachment.slots, attachment.clusters(plan), strict=True):
            layers[slot.model_layer] = KVLayer(slot, cluster, self)
        super().__init__(attachment, layers)

    def reset(self) -> None:
        """Empties the cache, so that it can take another prompt."""
        super().reset()
        self._context = None

    def context(self, prompt_len: int | None) -> PromptContext:
        """Facts of this example; made at the first layer of the prompt, with its length."""
        if self._context is None:
            assert prompt_len is not None, "decode before any prompt"
            budget = prompt_len
            if self.plan.uses_budget:
                budget = self.attachment.resolve_budget(self.plan, prompt_len, self.template_tail)
            self._context = PromptContext(
                prompt_len=prompt_len,
                budget=budget,
                seed=self.plan.seed,
                example_id=self.example_id,
                sampler=self.sampler,
                template_tail=self.template_tail,
            )
        return self._context

    @property
    def kv_layers(self) -> list[KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def native_layers(self) -> list[CacheLayerMixin]:
        """Sliding-window and other layers that transformers keeps itself."""
        return [layer for layer in self.layers if not isinstance(layer, KVLayer)]

    @property
    def prompt_len(self) -> int:
        return self.context(None).prompt_len

    @property
    def kept_tokens(self) -> list[list[int]]:
        """Prompt slots per layer and stored head (compressible layers only)."""
        return [layer.store.prompt_slots for layer in self.kv_layers]

    @property
    def compressed(self) -> bool:
        """Whether any layer holds fewer tokens than the prompt had."""
        return any(min(heads) < self.prompt_len for heads in self.kept_tokens)

    def _native_bytes(self) -> int:
        tensors = [t for layer in self.native_layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def bytes(self) -> CacheBytes:
        """Measured on the tensors held."""
        stores, native = [layer.store for layer in self.kv_layers], self._native_bytes()
        return CacheBytes(
            used=sum(s.nbytes for s in stores) + native,
            aux=sum(s.nbytes_aux for s in stores),
            alloc=sum(s.nbytes_alloc for s in stores) + native,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots in use plus auxiliary data."""
        held = self.bytes()
        return held.used + held.aux

    def full_bytes(self, length: int | None = None) -> int:
        """What FullKV would hold after `length` tokens (default: all tokens seen), at kv heads and the same dtype."""
        length = self.get_seq_length() if length is None else length
        if not self.kv_layers:
            return self._native_bytes()
        store = self.kv_layers[0].store
        return self.attachment.full_bytes(length, store.itemsize) * store.rows + self._native_bytes()
