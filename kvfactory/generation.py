"""Greedy generation with an attached method: our own loop, and transformers' `generate` as its reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvfactory.cache.kv_cache import KVCache
from kvfactory.decoder import Decoder, device_time
from kvfactory.graph_support import graph_obstacle
from kvfactory.model_parts import input_device
from kvfactory.monkeypatch import Attachment, get_attachment
from kvfactory.rows import Finished, Request, RowOutput, Timing

DECODE_PATHS = ("auto", "loop", "graph", "hf")


@dataclass
class CacheGroup:
    """The caches of several rows, summed up."""

    caches: list[KVCache] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def kept_tokens(self) -> list[list[int]]:
        """Prompt slots per layer; the stored heads of all rows one after the other."""
        return [sum(layers, []) for layers in zip(*(c.kept_tokens for c in self.caches), strict=True)]


@dataclass
class GenerationOutput:
    """What `generate` returns.

    Attributes:
        sequences: prompt and new tokens: (B, S + T) for tensor input, rows that stopped early padded with their last
            token; a list of 1-D tensors for list input.
        rows: per-row details.
    """

    sequences: torch.Tensor | list[torch.Tensor]
    rows: list[RowOutput]

    @property
    def cache(self) -> KVCache | CacheGroup:
        """The KVCache of the row, or a CacheGroup of several rows."""
        return self.rows[0].cache if len(self.rows) == 1 else CacheGroup([row.cache for row in self.rows])

    @property
    def timing(self) -> Timing:
        """Seconds summed over rows; None when a part is not known for some row."""
        prefill = [row.timing.prefill_s for row in self.rows]
        decode = [row.timing.decode_s for row in self.rows]
        return Timing(*(None if None in part else sum(part) for part in (prefill, decode)))


def stop_ids(model: PreTrainedModel, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row: given ones, or the checkpoint's for None; an empty list never stops."""
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _generate_hf(model: PreTrainedModel, request: Request, attachment: Attachment) -> RowOutput:
    """One row through transformers' `generate`, every processor of the checkpoint neutralised."""
    config = GenerationConfig(
        max_new_tokens=request.max_new,
        min_new_tokens=request.min_new or None,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=request.stops or None,
        pad_token_id=request.stops[0] if request.stops else 0,
    )
    ids = request.ids.to(input_device(model))
    plan = request.plans[0]
    cache = request.new_cache(attachment, plan)
    start = device_time(ids.device)
    # Fields that `config` leaves unset would be inherited from the checkpoint's, e.g. suppressed tokens.
    checkpoints, model.generation_config = model.generation_config, config
    try:
        out = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            generation_config=config,
            **{attachment.cache_keyword: cache},
        )
    finally:
        model.generation_config = checkpoints
    cache.context(len(ids))
    tokens = out[0, len(ids) :].tolist()
    finish = tokens[-1] if tokens[-1] in request.stops else "length"
    return RowOutput(plan, cache, tokens, finish, Timing(None, device_time(ids.device) - start))


def generate_rows(
    model: PreTrainedModel,
    requests: Iterable[Request],
    *,
    batch_size: int = 1,
    decode: str = "loop",
    keep_caches: bool = True,
) -> Iterator[Finished]:
    """Rows of all requests as they finish; see `Decoder`. The `hf` path takes one row at a time."""
    attachment = get_attachment(model)
    if decode != "hf":
        yield from Decoder(model, batch_size, decode == "graph", keep_caches).run(requests)
        return
    for request in requests:
        for plan in request.plans:
            alone = Request(**{**request.__dict__, "plans": [plan]})
            try:
                yield request, _generate_hf(model, alone, attachment), plan
            except Exception as error:  # handed to the caller, as the loop does
                yield request, error, plan


def _resolve_decode(model: PreTrainedModel, attachment: Attachment, decode: str) -> str:
    """What "auto" means here; a graph that is not possible gives way to the loop, with its reason on standard error."""
    device = input_device(model)
    if decode not in ("auto", "graph") or (decode == "auto" and device.type != "cuda"):
        return "loop" if decode == "auto" else decode
    obstacle = graph_obstacle(attachment, attachment.plan, device, model.dtype)
    if obstacle is None:
        return "graph"
    if not attachment.told_obstacle:
        attachment.told_obstacle = True
        print(f"note: decoding in the loop instead of a graph: {obstacle}", file=sys.stderr, flush=True)
    return "loop"


def _as_rows(input_ids: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(input_ids, torch.Tensor):
        rows = [input_ids] if input_ids.ndim == 1 else list(input_ids)
    else:
        rows = [torch.as_tensor(row) for row in input_ids]
    if not rows or any(row.ndim != 1 or row.numel() == 0 for row in rows):
        raise ValueError("input_ids must be (S,), (B, S) or a list of 1-D tensors, with at least one token a row")
    return rows


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[torch.Tensor],
    max_new_tokens: int,
    min_new_tokens: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    decode: str = "auto",
    example_id: str | Sequence[str] | None = None,
    sampler: Callable[[torch.Tensor], torch.Tensor] | None = None,
    batch_size: int | None = None,
    template_tail: int | Sequence[int] = 0,
) -> GenerationOutput:
    """Greedy generation with the attached method.

    Args:
        input_ids: (S,), (B, S) without padding, or a list of 1-D tensors of any lengths.
        min_new_tokens: so many first tokens cannot be stops.
        eos_token_id: None takes the checkpoint's ids, an empty list never stops.
        decode: "loop" (our own, a forward a token), "graph" (the same step captured once and replayed; CUDA), "hf"
            (transformers' generate, one row at a time), "auto" (graph where it is possible, else loop).
        example_id: what randomised methods derive their draws from, one per row or one for all.
        sampler: replaces the draw of a randomised method.
        batch_size: rows that decode together; default all.
        template_tail: tokens of chat template at the end, one per row or one for all; the observation window moves in
            front of them.

    Raises:
        ValueError: no method is attached, bad shapes or counts, a template tail for a method without an observation
            window.
    """
    attachment = get_attachment(model)
    if attachment is None:
        raise ValueError(
            "no method is attached to this model: call attach(model, method=...) first, e.g. method='fullkv'"
        )
    if decode not in DECODE_PATHS:
        raise ValueError(f"--decode {decode!r} is not one of {', '.join(DECODE_PATHS)}")
    decode = _resolve_decode(model, attachment, decode)
    if max_new_tokens < 1 or not 0 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}, min_new_tokens={min_new_tokens}: need 0 <= min <= max, max >= 1"
        )
    prompts = _as_rows(input_ids)
    names = [example_id or ""] * len(prompts) if example_id is None or isinstance(example_id, str) else example_id
    if len(names) != len(prompts):
        raise ValueError(f"{len(names)} example ids for {len(prompts)} prompts")
    tails = [template_tail] * len(prompts) if isinstance(template_tail, int) else list(template_tail)
    if len(tails) != len(prompts):
        raise ValueError(f"{len(tails)} template tails for {len(prompts)} prompts")
    for ids, tail in zip(prompts, tails, strict=True):
        attachment.plan.check_template_tail(tail, len(ids))
    stops = stop_ids(model, eos_token_id)
    requests = [
        Request(ids, max_new_tokens, min_new_tokens, stops, [attachment.plan], name, sampler, i, tail)
        for i, (ids, name, tail) in enumerate(zip(prompts, names, tails, strict=True))
    ]
    rows: list[RowOutput | None] = [None] * len(prompts)
    for request, row, _ in generate_rows(model, requests, batch_size=batch_size or len(prompts), decode=decode):
        if isinstance(row, Exception):
            raise row
        rows[request.tag] = row
    sequences = [
        torch.cat([ids, torch.tensor(row.tokens, dtype=ids.dtype, device=ids.device)])
        for ids, row in zip(prompts, rows, strict=True)
    ]
    if isinstance(input_ids, torch.Tensor):
        width = max(len(s) for s in sequences)
        sequences = torch.stack([torch.cat([s, s[-1:].expand(width - len(s))]) for s in sequences])
    return GenerationOutput(sequences, rows)
