"""What is generated and what comes out: one request per prompt, one row per request and method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvfactory.cache.kv_cache import CacheBytes, KVCache
from kvfactory.plan import Plan

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment

NEAR_TIE = 1e-3
"""Logits closer than this may swap places when rows share a batch: batched matrix products differ in the last bits."""


@dataclass
class Request:
    """One prompt to generate from.

    Attributes:
        ids: (S,) token ids.
        stops: ids that end a row; min_new: so many first tokens cannot be stops.
        plans: the methods that compress this prompt, one row each.
        tag: anything the caller wants back with the rows.
        template_tail: tokens of chat template at the end, in front of which observation windows lie; 0 for windows
            at the very end. Methods without such a window do not read it.
    """

    ids: torch.Tensor
    max_new: int
    min_new: int
    stops: list[int]
    plans: list[Plan]
    example_id: str = ""
    sampler: Callable[[torch.Tensor], torch.Tensor] | None = None
    tag: object = None
    template_tail: int = 0

    def new_cache(self, attachment: Attachment, plan: Plan) -> KVCache:
        """An empty cache for the row of one of the plans."""
        return attachment.new_cache(
            plan,
            example_id=self.example_id,
            max_new_tokens=self.max_new,
            sampler=self.sampler,
            template_tail=self.template_tail,
        )


@dataclass
class Timing:
    """Seconds of one generation, device work included; None where the moment is not seen or shared."""

    prefill_s: float | None = 0.0
    decode_s: float | None = 0.0


@dataclass
class RowOutput:
    """One row's generation.

    Attributes:
        tokens: new token ids, stop token included.
        finish: id of the stop token, or "length".
        prompt_bytes: bytes held right after the prompt; None on the `hf` path, where that moment is not seen.
        rows_in_flight: mean rows that decoded together while this one did.
        near_ties: steps of a shared batch whose two largest logits were closer than `NEAR_TIE`.
    """

    plan: Plan
    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    finish: int | str | None = None
    timing: Timing = field(default_factory=Timing)
    prompt_bytes: CacheBytes | None = None
    rows_in_flight: float = 1.0
    near_ties: int = 0


Finished = tuple[Request, "RowOutput | Exception", Plan]
"""A row that left, or the error that stands for it."""


@dataclass
class Counters:
    """What a run did, counted rather than timed."""

    prefills: int = 0
    decode_forwards: int = 0
    decoded_rows: int = 0
    captures: int = 0

    def count_step(self, rows: int) -> None:
        self.decode_forwards += 1
        self.decoded_rows += rows

    @property
    def mean_rows_in_flight(self) -> float:
        return self.decoded_rows / self.decode_forwards if self.decode_forwards else 0.0


@dataclass(eq=False)
class LiveRow:
    """A row between its prompt and its last token."""

    request: Request
    output: RowOutput
    position: int
    shared: int = 0
    steps: int = 0

    def take(self, token: int) -> bool:
        """Adds a token; whether the row is finished."""
        out = self.output
        out.tokens.append(token)
        if token in self.request.stops:
            out.finish = token
        elif len(out.tokens) == self.request.max_new:
            out.finish = "length"
        return out.finish is not None

    def advance(self, token: int, rows: int, seconds: float) -> bool:
        """Adds the token of a step that `rows` rows shared; whether the row is finished."""
        self.position += 1
        self.steps += 1
        self.shared += rows
        timing = self.output.timing
        timing.decode_s = None if rows > 1 or timing.decode_s is None else timing.decode_s + seconds
        finished = self.take(token)
        if finished:
            self.output.rows_in_flight = self.shared / self.steps
        return finished

    def result(self, error: Exception | None = None) -> Finished:
        """What the row came to, as it is handed out: its output, or the error it is lost by."""
        return self.request, self.output if error is None else error, self.output.plan

    @property
    def room(self) -> int:
        """Slots per stored head for the tokens to come; the last one is not fed back."""
        return self.request.max_new - len(self.output.tokens)

    @property
    def cannot_stop(self) -> bool:
        return bool(self.request.stops) and len(self.output.tokens) < self.request.min_new

    def stops_below(self, vocabulary: int) -> list[int]:
        """Stops that the model can choose; a checkpoint may name others, -1 or ids beyond its logits."""
        return [stop for stop in self.request.stops if 0 <= stop < vocabulary]
