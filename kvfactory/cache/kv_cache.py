"""The cache that transformers carries through a model: one layer object per attention layer.

Two lengths never mix: `get_seq_length` is the logical length, tokens seen, from which the model derives positions; a
store's length is what is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfactory.cache.store import DECODE_SLACK, DenseStore, Store
from kvfactory.methods.base import PromptContext
from kvfactory.ops.select import gather_tokens

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment, LayerSlot


class KVLayer(CacheLayerMixin):
    """One full-attention layer: passes the prompt's keys and values through, then holds what the method kept."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, slot: LayerSlot, cache: KVCache):
        super().__init__()
        self.slot = slot
        self.cache = cache
        self.seen = 0
        self.store: Store | None = None

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new keys and values (B, Hk, t, D) and binds this layer to the attention call that follows."""
        self.seen += k.shape[2]
        self.is_initialized = True
        if self.store is not None:
            self.store.append(k, v)
        self.slot.bound = self
        return k, v

    def finish_prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Compresses and stores the prompt once its attention is computed; nothing refers to k and v afterwards."""
        kept = self.slot.cluster.compress(q, k, v, self.cache.context(k.shape[2]))
        if kept is not None:
            k = gather_tokens(k, kept.indices) if kept.keys is None else kept.keys
            v = gather_tokens(v, kept.indices) if kept.values is None else kept.values
        self.store = DenseStore(k, v, slack=self.cache.slack)
        if self.cache.record_positions and kept is not None:
            self.store.positions = kept.indices.to(torch.int32)

    def attend(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Decode read of q (B, Hq, t, D) over what is stored -> (B, t, Hq, D)."""
        visible = self.slot.cluster.select(q, self.store, self.cache.context(None))
        return self.store.attend(q, scale=scale, backend=self.slot.backend, visible=visible)

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(kv length, kv offset) of the mask the model would build for a query of so many tokens."""
        t = query if isinstance(query, int) else query.shape[0]
        stored = self.seen if self.store is None else self.store.view()[0].shape[2]
        return stored + t, self.seen - stored

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing to prepare: the store is made when the prompt is finished."""

    def reset(self) -> None:
        self.seen, self.store, self.is_initialized = 0, None, False

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{what} moves cached tokens around, which an attached kvfactory cache cannot follow; use greedy decoding"
        )

    def reorder_cache(self, *args: Any) -> None:
        self._refuse("beam search")

    def crop(self, *args: Any) -> None:
        self._refuse("assisted decoding")


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache: slots in use, auxiliary data, storage held with slack."""

    used: int
    aux: int
    alloc: int


class KVCache(Cache):
    """What one generation holds. Made by `Attachment.new_cache`.

    Attributes:
        record_positions: keep the original position of every stored prompt token; off, since it costs memory.
    """

    def __init__(
        self,
        attachment: Attachment,
        native_layers: list[CacheLayerMixin],
        *,
        example_id: str = "",
        max_new_tokens: int | None = None,
        sampler: Any = None,
    ):
        """`native_layers` are transformers' own, one per model layer; full-attention ones are replaced by ours."""
        self.attachment = attachment
        self.example_id = example_id
        self.sampler = sampler
        self.slack = DECODE_SLACK if max_new_tokens is None else max_new_tokens
        self.record_positions = False
        self._context: PromptContext | None = None
        layers = list(native_layers)
        for slot in attachment.slots:
            layers[slot.model_layer] = KVLayer(slot, self)
        super().__init__(layers=layers)

    def context(self, prompt_len: int | None) -> PromptContext:
        """Facts of this example; made at the first layer of the prompt, with its length."""
        if self._context is None:
            assert prompt_len is not None, "decode before any prompt"
            plan = self.attachment.plan
            self._context = PromptContext(
                prompt_len=prompt_len,
                budget=self.attachment.resolve_budget(prompt_len) if plan.uses_budget else prompt_len,
                seed=plan.seed,
                example_id=self.example_id,
                sampler=self.sampler,
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
        length = self.get_seq_length(self.attachment.slots[0].model_layer) if length is None else length
        layer = self.kv_layers[0]
        k, v = layer.store.view()
        return self.attachment.full_bytes(length, k.element_size()) * k.shape[0] + self._native_bytes()

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen. Sliding layers count the same, so any layer may be asked."""
        return self.layers[self.attachment.slots[0].model_layer if layer_idx is None else layer_idx].get_seq_length()
