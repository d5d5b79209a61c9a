"""Where kept keys and values live: a store holds tensors and counts their bytes. Of methods it knows what they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvfactory.backends import Backend
from kvfactory.kernels.dispatch import gather_kernel

if TYPE_CHECKING:
    from kvfactory.methods.base import Kept, RaggedKept

DECODE_SLACK = 128
"""Free slots behind a prompt when the number of new tokens is not known beforehand."""


class Store(ABC):
    """Keys and values of one layer after its prompt.

    Attributes:
        prompt_slots: slots per stored head filled by the prompt, one entry per head.
        positions: (B, Hs, n) int32 original positions of the prompt's slots, when they are recorded.
    """

    prompt_slots: list[int]
    positions: torch.Tensor | None = None

    @abstractmethod
    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Adds new tokens; k, v (B, Hk, t, D), Hk the model's kv heads."""

    @abstractmethod
    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in use, (B, Hs, N, D) each."""

    @abstractmethod
    def attend(
        self, q: torch.Tensor, *, scale: float, backend: Backend, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of the newest queries q (B, Hq, t, D), whose keys are already appended -> (B, t, Hq, D)."""

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that keys and values are held in, (..., D) each."""
        return self._k, self._v

    @property
    @abstractmethod
    def rows(self) -> int:
        """Sequences held."""

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of one stored number."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the slots in use."""

    @property
    @abstractmethod
    def nbytes_alloc(self) -> int:
        """Bytes of the storage held, slack included."""

    @property
    def nbytes_aux(self) -> int:
        """Bytes of what is held besides keys and values."""
        return 0 if self.positions is None else self.positions.numel() * self.positions.element_size()


def write_kept(
    k: torch.Tensor,
    v: torch.Tensor,
    kept: Kept | RaggedKept,
    buffers: Sequence[torch.Tensor],
    slack: int,
    ends: torch.Tensor | None = None,
) -> None:
    """Writes what is kept of k, v (B, Hk, S, D) into two buffers (slots, D), `slack` free slots behind each segment.

    Tokens are read where the prompt left them, keys and values by one kernel on devices that have it.

    Args:
        ends: (B * Hs,) int64 where segments end in `kept.indices`; not given when all are equally long.
    """
    gather = gather_kernel(k.device)
    parts = list(zip((k, v), (kept.keys, kept.values), buffers, strict=True))
    unchanged = [(x, buffer) for x, replaced, buffer in parts if replaced is None]
    if unchanged:
        sources, targets = zip(*unchanged, strict=True)
        gather(sources, kept.indices, targets, slack=slack, ends=ends)
    for _, replaced, buffer in parts:
        if replaced is not None:  # one head, whose tokens are the segments in order
            rows = replaced.reshape(1, 1, -1, replaced.shape[-1])
            order = torch.arange(rows.shape[2], device=k.device).view(replaced.shape[:-1])
            gather([rows], order, [buffer], slack=slack, ends=ends)


class DenseStore(Store):
    """(B, Hs, capacity, D) buffers, the same number of slots for every head.

    The buffers are allocated once; the next free slot lives on the device, so that appending one token needs no host
    decision and a decode step can be captured in a CUDA graph as long as no growth is due.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slack: int = DECODE_SLACK,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
        kept: Kept | None = None,
    ):
        """Copies what is kept of k, v (B, Hk, S, D) into buffers of n + slack slots per stored head.

        Args:
            into: buffers (slots, D) to fill the beginning of, taken when they have enough slots; else fresh ones.
            kept: n tokens of every stored head; without it all S tokens of every kv head.
        """
        B, Hs, n = k.shape[:3] if kept is None else kept.indices.shape
        size = B * Hs * (n + slack)
        if into is None or size > into[0].shape[0]:
            into = k.new_empty(size, k.shape[-1]), v.new_empty(size, v.shape[-1])
        flat = [buffer[:size] for buffer in into]
        self._k, self._v = (x.view(B, Hs, n + slack, x.shape[-1]) for x in flat)
        if kept is None:
            self._k[:, :, :n] = k
            self._v[:, :, :n] = v
        else:
            write_kept(k, v, kept, flat, slack)
        self.length = n
        self._next = torch.full((1,), n, device=k.device)
        self.prompt_slots = [n] * Hs
        self.columns: dict[str, torch.Tensor] = {}
        self.history: dict[str, torch.Tensor] = {}

    @property
    def capacity(self) -> int:
        """Slots per stored head."""
        return self._k.shape[2]

    @property
    def room(self) -> int:
        """Tokens that every stored head can take without growing."""
        return self.capacity - self.length

    def add_columns(self, columns: dict[str, torch.Tensor], history: dict[str, torch.Tensor]) -> None:
        """Gives every slot numbers of its own, (B, Hs, n) each, and the store other tensors to carry along."""
        for name, values in columns.items():
            held = values.new_zeros(*values.shape[:2], self._k.shape[2])
            held[..., : self.length] = values
            self.columns[name] = held
        self.history = history

    def column(self, name: str) -> torch.Tensor:
        """(B, Hs, length) view of a column."""
        return self.columns[name][..., : self.length]

    def drop(self, slots: torch.Tensor) -> None:
        """Forgets slots (B, Hs, m); what is behind them moves up, so that the first length - m slots stay in use."""
        B, Hs, m = slots.shape
        if m == 1:  # the last slot takes the victim's place: one row is copied
            self.length -= 1
            for x in (self._k, self._v):
                last = x[:, :, self.length : self.length + 1].clone()
                x.scatter_(2, slots[..., None].expand_as(last), last)
            for x in self.columns.values():
                x.scatter_(2, slots, x[:, :, self.length : self.length + 1].clone())
        else:
            staying = torch.ones(B, Hs, self.length, dtype=torch.bool, device=slots.device).scatter_(2, slots, False)
            order = staying.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., : self.length - m]
            self.length -= m
            for x in (self._k, self._v):
                x[:, :, : self.length] = x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[3]))
            for x in self.columns.values():
                x[:, :, : self.length] = x.gather(2, order)
        self._next -= m

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        t = k.shape[2]
        if self.length + t > self._k.shape[2]:
            self._grow(self.length + t)
        copies = self._k.shape[1] // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        slots = self._next if t == 1 else self._next + torch.arange(t, device=k.device)
        self._k.index_copy_(2, slots, k)
        self._v.index_copy_(2, slots, v)
        self._next += t
        self.length += t

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self._k.shape[2] + self._k.shape[2] // 2)
        for name, old in self.columns.items():
            self.columns[name] = torch.nn.functional.pad(old, (0, capacity - old.shape[2]))
        for name in ("_k", "_v"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def attend(
        self, q: torch.Tensor, *, scale: float, backend: Backend, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        k, v = self.view()
        t = q.shape[2]
        if t > 1 and visible is None:
            # A later turn: every stored token is in the past, the new ones are causal among themselves.
            visible = torch.ones(t, self.length, dtype=torch.bool, device=q.device).tril(self.length - t)[None, None]
        return backend(q, k, v, scale=scale, causal=False, mask=visible)

    @property
    def rows(self) -> int:
        return self._k.shape[0]

    @property
    def itemsize(self) -> int:
        return self._k.element_size()

    @property
    def nbytes_aux(self) -> int:
        columns = (self.column(name) for name in self.columns)
        return super().nbytes_aux + sum(x.numel() * x.element_size() for x in (*columns, *self.history.values()))

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.view())

    @property
    def nbytes_alloc(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self._k, self._v))
