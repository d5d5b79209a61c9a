"""Segments of unequal length: one per (row, stored head), in flat buffers with slack behind each.

Serves methods whose heads keep different numbers of tokens, and batches of rows that were prefilled one by one. Nothing
is padded in storage; a query_head store may let several segments share one slot range where the content is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvfactory.backends import Backend
from kvfactory.cache.store import Store, write_kept
from kvfactory.ops.select import to_device

if TYPE_CHECKING:
    from kvfactory.methods.base import RaggedKept

SLACK_UNIT = 16
_SMALLEST_BUCKET = 32


class Mirrored:
    """A small whole-number tensor that host and device both need; copied across when the other side first asks."""

    def __init__(self, values: torch.Tensor, device: torch.device):
        self._sides = {values.device.type: values}
        self._device = device

    @property
    def host(self) -> torch.Tensor:
        """The values on the CPU; waits for the device when they are only there."""
        return self._on("cpu", torch.device("cpu"))

    @property
    def device(self) -> torch.Tensor:
        """The values where keys and values are."""
        return self._on(self._device.type, self._device)

    @property
    def known(self) -> torch.Tensor:
        """The values on a side where they are already."""
        return next(iter(self._sides.values()))

    def _on(self, kind: str, device: torch.device) -> torch.Tensor:
        if kind not in self._sides:
            self._sides[kind] = self.known.to(device)
        return self._sides[kind]

    def add(self, n: int) -> None:
        """Adds to all values, in place on every side there is."""
        for values in self._sides.values():
            values += n


class RaggedStore(Store):
    """Flat keys and values (slots, D) and, per segment, where it starts and how long it is.

    All segments grow alike, so one number of free slots holds for all, and after the prompt nobody has to ask the
    device for a length.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        room: int,
        prompt_lengths: torch.Tensor | None = None,
    ):
        """Takes over the buffers k, v (slots, D).

        Args:
            starts, lengths: (rows, Hs) int64, on the host or where the buffers are; equal starts mean shared slots.
            room: free slots behind every segment.
            prompt_lengths: (rows, Hs) slots filled by the prompt; `lengths` when not given.
        """
        self._k, self._v = k, v
        self._starts = Mirrored(starts, k.device)
        self._prompt = Mirrored(lengths.clone() if prompt_lengths is None else prompt_lengths, k.device)
        self._lengths = Mirrored(lengths, k.device)
        self._segments = tuple(lengths.shape)
        self._room = room
        self._buckets: list[tuple[torch.Tensor, torch.Tensor, int]] | None = None
        self._bucket_room = 0

    @property
    def starts(self) -> Mirrored:
        """(rows, Hs) first slots."""
        return self._starts

    @property
    def lengths(self) -> Mirrored:
        """(rows, Hs) slots in use."""
        return self._lengths

    @property
    def prompt_lengths(self) -> Mirrored:
        """(rows, Hs) slots filled by the prompt."""
        return self._prompt

    @property
    def room(self) -> int:
        """Tokens that every segment can still take."""
        return self._room

    def segment_lengths(self, row: int) -> list[int]:
        """Slots in use of a row's segments, shared ones counted once."""
        return self._unique(self._lengths.host, row)

    @classmethod
    def build(
        cls,
        k: torch.Tensor,
        v: torch.Tensor,
        kept: RaggedKept,
        slack: int,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> RaggedStore:
        """Copies what is kept of a prompt's k, v (B, Hk, S, D) into buffers with `slack` free slots per segment.

        The device is not waited for, wherever the lengths are.

        Args:
            into: buffers (slots, D) to fill the beginning of, taken when they have enough slots; else fresh ones.
        """
        lengths, count = to_device(kept.lengths, k.device), kept.lengths.numel()
        ends = lengths.cumsum(0)
        size = kept.indices.numel() + slack * count
        if into is None or size > into[0].shape[0]:
            into = k.new_zeros(size, k.shape[-1]), v.new_zeros(size, v.shape[-1])
        buffers = [buffer[:size] for buffer in into]
        write_kept(k, v, kept, buffers, slack, ends)
        starts = ends - lengths + slack * torch.arange(count, device=k.device)
        return cls(*buffers, *(x.view(k.shape[0], -1) for x in (starts, kept.lengths.clone())), slack)

    @property
    def rows(self) -> int:
        return self._segments[0]

    @property
    def itemsize(self) -> int:
        return self._k.element_size()

    @property
    def stored_heads(self) -> int:
        return self._segments[1]

    @property
    def prompt_slots(self) -> list[int]:
        return [n for row in range(self.rows) for n in self._unique(self._prompt.host, row)]

    def _unique(self, lengths: torch.Tensor, row: int) -> list[int]:
        """Lengths of a row's segments, shared ones counted once."""
        seen: dict[int, int] = {}
        for start, n in zip(self._starts.host[row].tolist(), lengths[row].tolist(), strict=True):
            seen.setdefault(start, n)
        return list(seen.values())

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        t = k.shape[2]
        if t > self._room:
            self._grow(t)
        copies = self.stored_heads // k.shape[1]
        slots = (self._starts.device + self._lengths.device)[..., None]
        if t > 1:
            slots = slots + torch.arange(t, device=k.device)
        for buffer, x in ((self._k, k), (self._v, v)):
            # Segments that share slots write the same value twice.
            x = x.repeat_interleave(copies, dim=1) if copies > 1 else x
            buffer.index_copy_(0, slots.flatten(), x.reshape(-1, x.shape[-1]))
        self._lengths.add(t)
        self._room -= t
        self._bucket_room -= t  # counted here, since not every backend reads single tokens by buckets

    def _grow(self, t: int) -> None:
        """Makes room for at least `t` more tokens in every segment by copying the layer once."""
        grown = int((self._lengths.host - self._prompt.host).max())
        rebuilt = join_rows([(self, row) for row in range(self.rows)], max(t, SLACK_UNIT, 2 * grown))
        self.__dict__.update(rebuilt.__dict__)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded copies (rows, Hs, longest, D), zeros behind each segment; for tests, not for decoding."""
        longest = int(self._lengths.host.max())
        offsets = torch.arange(longest, device=self._k.device)
        slots = (self._starts.device[..., None] + offsets).clamp_(max=self._k.shape[0] - 1)
        inside = (offsets < self._lengths.device[..., None])[..., None]
        return self._k[slots] * inside, self._v[slots] * inside

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(k, v, starts, lengths) as decode kernels take them: (slots, D) twice, (rows * Hs,) twice."""
        return self._k, self._v, self._starts.device.flatten(), self._lengths.device.flatten()

    def attend(
        self, q: torch.Tensor, *, scale: float, backend: Backend, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        R, Hq, t, D = q.shape
        G = Hq // self.stored_heads
        if t == 1 and visible is None:
            queries = q.reshape(-1, G, D)
            if (read := backend.segments_for(queries)) is not None:
                return read(queries, *self.segments(), scale=scale).view(R, Hq, 1, D).transpose(1, 2)
        return self._attend_bucketed(q, scale, backend, visible)

    def _attend_bucketed(
        self, q: torch.Tensor, scale: float, backend: Backend, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """Segments of similar length share one masked call; a segment's queries are its G heads times t tokens."""
        R, Hq, t, D = q.shape
        G = Hq // self.stored_heads
        queries = q.reshape(R * self.stored_heads, 1, G * t, D)
        out = torch.empty_like(queries)
        lengths = self._lengths.device.flatten()
        for members, slots, width in self._bucketed():
            n, offsets = len(members), torch.arange(width, device=q.device)
            # Token r of t sees everything but the t - 1 - r tokens after it.
            last = lengths[members][:, None] - torch.arange(t - 1, -1, -1, device=q.device)
            mask = offsets < last[..., None]  # (n, t, width)
            mask = mask.repeat(1, G, 1)
            if visible is not None:  # as wide as the longest segment, which may be less than a bucket
                seen = visible.reshape(R * self.stored_heads, G * t, -1)[members, :, :width]
                mask &= torch.nn.functional.pad(seen, (0, width - seen.shape[-1]))
            k, v = self._k[slots][:, None], self._v[slots][:, None]
            part = backend(queries[members], k, v, scale=scale, causal=False, mask=mask[:, None])
            out[members] = part.transpose(1, 2).view(n, 1, G * t, D)
        return out.view(R, Hq, t, D).transpose(1, 2)

    def _bucketed(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """(segments, slots (n, width), width) per power-of-two length; rebuilt only when one outgrows its bucket."""
        if self._buckets is None or self._bucket_room < 0:
            lengths, starts = self._lengths.host.flatten(), self._starts.host.flatten()
            widths = torch.tensor([max(_SMALLEST_BUCKET, 1 << (int(n) - 1).bit_length()) for n in lengths.tolist()])
            self._buckets = []
            for width in sorted(set(widths.tolist())):
                members = (widths == width).nonzero().flatten()
                slots = (starts[members, None] + torch.arange(width)).clamp_(max=self._k.shape[0] - 1)
                device = self._k.device
                self._buckets.append((members.to(device), slots.to(device), width))
            self._bucket_room = int((widths - lengths).min())
        return self._buckets

    @property
    def nbytes(self) -> int:
        slots = sum(sum(self.segment_lengths(row)) for row in range(self.rows))
        return slots * (self._k.shape[1] + self._v.shape[1]) * self.itemsize

    @property
    def nbytes_alloc(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self._k, self._v))


def as_ragged(store: Store) -> RaggedStore:
    """A one-row store as segments; dense stores are viewed, ragged ones returned as they are."""
    if isinstance(store, RaggedStore):
        return store
    k, v = store.view()
    B, Hs, n, D = k.shape
    lengths = torch.full((B, Hs), n, dtype=torch.int64)
    starts = (torch.arange(B * Hs) * n).view(B, Hs)
    prompt = torch.tensor(store.prompt_slots).expand(B, Hs)
    return RaggedStore(k.reshape(-1, D), v.reshape(-1, v.shape[-1]), starts, lengths, 0, prompt)


def copy_row(store: Store, row: int = 0, slack: int = 0) -> RaggedStore:
    """The store of one row, copied out; segments that share slots still do."""
    copied = join_rows([(store, row)], slack)
    copied.positions = store.positions
    return copied


def join_rows(members: list[tuple[Store, int]], slack: int) -> RaggedStore:
    """One store with a row of each (store, row), `slack` free slots behind every segment.

    Rows stored at kv heads in a batch that stores query heads let the group's segments share slots, so that the group
    size is one constant for all rows.
    """
    parts = [(as_ragged(store), row) for store, row in members]
    heads = max(part.stored_heads for part, _ in parts)
    starts, lengths, prompts, sources = [], [], [], []
    size = 0
    for part, row in parts:
        placed: dict[int, int] = {}
        row_starts = []
        for start, n in zip(part.starts.host[row].tolist(), part.lengths.host[row].tolist(), strict=True):
            if start not in placed:
                placed[start] = size
                sources.append((part, start, n, size))
                size += n + slack
            row_starts.append(placed[start])
        copies = heads // part.stored_heads
        starts.append(torch.tensor(row_starts).repeat_interleave(copies))
        lengths.append(part.lengths.host[row].repeat_interleave(copies))
        prompts.append(part.prompt_lengths.host[row].repeat_interleave(copies))
    first = parts[0][0]
    k, v = first._k.new_zeros(size, first._k.shape[1]), first._v.new_zeros(size, first._v.shape[1])
    for part, start, n, target in sources:
        k[target : target + n] = part._k[start : start + n]
        v[target : target + n] = part._v[start : start + n]
    stacked = torch.stack(lengths)
    return RaggedStore(k, v, torch.stack(starts), stacked, slack, torch.stack(prompts))
