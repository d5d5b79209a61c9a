"""Segments of unequal length: one per (row, stored head), in flat buffers with slack behind each.

Serves methods whose heads keep different numbers of tokens, and batches of rows that were prefilled one by one. Nothing
is padded in storage; a query_head store may let several segments share one slot range where the content is the same.
"""

from __future__ import annotations

from functools import cached_property

import torch

from kvfactory.backends import Backend
from kvfactory.cache.store import Store

SLACK_UNIT = 16
_SMALLEST_BUCKET = 32


class RaggedStore(Store):
    """Flat keys and values (slots, D) and, per segment, where it starts and how long it is.

    `starts` and `lengths` exist on the device, for kernels and appends, and lengths also on the host: every segment
    grows alike, so the host knows all lengths without asking the device.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        capacities: torch.Tensor,
        prompt_lengths: torch.Tensor | None = None,
    ):
        """Takes over the buffers k, v (slots, D).

        Args:
            starts, lengths, capacities: (rows, Hs) int64 on the host; equal starts mean shared slots.
            prompt_lengths: (rows, Hs) slots filled by the prompt; `lengths` when not given.
        """
        self._k, self._v = k, v
        self._host_starts, self._host_lengths, self._capacities = starts, lengths, capacities
        self._prompt_lengths = lengths.clone() if prompt_lengths is None else prompt_lengths
        self._buckets: list[tuple[torch.Tensor, torch.Tensor, int]] | None = None
        self._bucket_room = 0

    @cached_property
    def _starts(self) -> torch.Tensor:
        """(rows, Hs) on the device; made when a read or an append first needs it."""
        return self._host_starts.to(self._k.device)

    @cached_property
    def _lengths(self) -> torch.Tensor:
        # A copy: on the CPU `to` alone would make host and device lengths one tensor, advanced twice.
        return self._host_lengths.to(self._k.device, copy=True)

    @property
    def host_segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(starts, lengths, capacities), (rows, Hs) int64 each, on the host."""
        return self._host_starts, self._host_lengths, self._capacities

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """(rows, Hs) slots filled by the prompt."""
        return self._prompt_lengths

    @property
    def room(self) -> int:
        """Tokens that every segment can still take."""
        return int((self._capacities - self._host_lengths).min())

    def segment_lengths(self, row: int) -> list[int]:
        """Slots in use of a row's segments, shared ones counted once."""
        return self._unique(self._host_lengths, row)

    @classmethod
    def build(cls, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, slack: int) -> RaggedStore:
        """Copies back-to-back segments into buffers with `slack` free slots each.

        Args:
            k, v: (N, D), row-major segments; lengths: (rows, Hs) int64 on the host, summing to N.
        """
        capacities = lengths + slack
        starts = (capacities.flatten().cumsum(0) - capacities.flatten()).view_as(capacities)
        shift = torch.repeat_interleave(
            (starts.flatten() - (lengths.flatten().cumsum(0) - lengths.flatten())), lengths.flatten()
        ).to(k.device)
        slots = torch.arange(k.shape[0], device=k.device) + shift
        buffers = []
        for x in (k, v):
            buffer = x.new_zeros(int(capacities.sum()), x.shape[1])
            buffer[slots] = x
            buffers.append(buffer)
        return cls(*buffers, starts, lengths.clone(), capacities)

    @property
    def rows(self) -> int:
        return self._host_lengths.shape[0]

    @property
    def itemsize(self) -> int:
        return self._k.element_size()

    @property
    def stored_heads(self) -> int:
        return self._host_lengths.shape[1]

    @property
    def prompt_slots(self) -> list[int]:
        return [n for row in range(self.rows) for n in self._unique(self._prompt_lengths, row)]

    def _unique(self, lengths: torch.Tensor, row: int) -> list[int]:
        """Lengths of a row's segments, shared ones counted once."""
        seen: dict[int, int] = {}
        for start, n in zip(self._host_starts[row].tolist(), lengths[row].tolist(), strict=True):
            seen.setdefault(start, n)
        return list(seen.values())

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        t = k.shape[2]
        if bool((self._host_lengths + t > self._capacities).any()):
            self._grow(t)
        copies = self.stored_heads // k.shape[1]
        slots = (self._starts + self._lengths)[..., None]
        if t > 1:
            slots = slots + torch.arange(t, device=k.device)
        for buffer, x in ((self._k, k), (self._v, v)):
            # Segments that share slots write the same value twice.
            x = x.repeat_interleave(copies, dim=1) if copies > 1 else x
            buffer.index_copy_(0, slots.flatten(), x.reshape(-1, x.shape[-1]))
        self._lengths += t
        self._host_lengths += t
        self._bucket_room -= t  # counted here, since not every backend reads single tokens by buckets

    def _grow(self, t: int) -> None:
        """Makes room for at least `t` more tokens in every segment by copying the layer once."""
        slack = max(t, int((self._capacities - self._prompt_lengths).max()) * 2)
        rebuilt = join_rows([(self, row) for row in range(self.rows)], slack)
        rebuilt._prompt_lengths = self._prompt_lengths
        for name in ("_starts", "_lengths"):
            self.__dict__.pop(name, None)
        self.__dict__.update(rebuilt.__dict__)

    def take_row(self, row: int) -> RaggedStore:
        """The store of one row, copied out without slack; segments that share slots still do."""
        return join_rows([(self, row)], 0)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded copies (rows, Hs, longest, D), zeros behind each segment; for tests, not for decoding."""
        longest = int(self._host_lengths.max())
        offsets = torch.arange(longest, device=self._k.device)
        slots = (self._starts[..., None] + offsets).clamp_(max=self._k.shape[0] - 1)
        inside = (offsets < self._lengths[..., None])[..., None]
        return self._k[slots] * inside, self._v[slots] * inside

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(k, v, starts, lengths) as decode kernels take them: (slots, D) twice, (rows * Hs,) twice."""
        return self._k, self._v, self._starts.flatten(), self._lengths.flatten()

    def attend(
        self, q: torch.Tensor, *, scale: float, backend: Backend, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        R, Hq, t, D = q.shape
        G = Hq // self.stored_heads
        if backend.segments is not None and t == 1 and visible is None:
            out = backend.segments(q.reshape(-1, G, D), *self.segments(), scale=scale)
            return out.view(R, Hq, 1, D).transpose(1, 2)
        return self._attend_bucketed(q, scale, backend, visible)

    def _attend_bucketed(
        self, q: torch.Tensor, scale: float, backend: Backend, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """Segments of similar length share one masked call; a segment's queries are its G heads times t tokens."""
        R, Hq, t, D = q.shape
        G = Hq // self.stored_heads
        queries = q.reshape(R * self.stored_heads, 1, G * t, D)
        out = torch.empty_like(queries)
        lengths = self._lengths.flatten()
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
            lengths, starts = self._host_lengths.flatten(), self._host_starts.flatten()
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
        return sum(x.untyped_storage().nbytes() for x in (self._k, self._v))


def as_ragged(store: Store) -> RaggedStore:
    """A one-row store as segments; dense stores are viewed, ragged ones returned as they are."""
    if isinstance(store, RaggedStore):
        return store
    k, v = store.view()
    B, Hs, n, D = k.shape
    lengths = torch.full((B, Hs), n, dtype=torch.int64)
    starts = (torch.arange(B * Hs) * n).view(B, Hs)
    prompt = torch.tensor(store.prompt_slots).expand(B, Hs)
    return RaggedStore(k.reshape(-1, D), v.reshape(-1, v.shape[-1]), starts, lengths, lengths.clone(), prompt)


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
        for start, n in zip(part._host_starts[row].tolist(), part._host_lengths[row].tolist(), strict=True):
            if start not in placed:
                placed[start] = size
                sources.append((part, start, n, size))
                size += n + slack
            row_starts.append(placed[start])
        copies = heads // part.stored_heads
        starts.append(torch.tensor(row_starts).repeat_interleave(copies))
        lengths.append(part._host_lengths[row].repeat_interleave(copies))
        prompts.append(part._prompt_lengths[row].repeat_interleave(copies))
    first = parts[0][0]
    k, v = first._k.new_zeros(size, first._k.shape[1]), first._v.new_zeros(size, first._v.shape[1])
    for part, start, n, target in sources:
        k[target : target + n] = part._k[start : start + n]
        v[target : target + n] = part._v[start : start + n]
    stacked = torch.stack(lengths)
    return RaggedStore(k, v, torch.stack(starts), stacked, stacked + slack, torch.stack(prompts))
