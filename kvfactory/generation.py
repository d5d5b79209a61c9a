"""Greedy generation with an attached method: our own loop, and transformers' `generate` as its reference."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvfactory.cache.kv_cache import CacheBytes, KVCache
from kvfactory.monkeypatch import Attachment, cache_keyword, get_attachment

DECODE_PATHS = ("auto", "loop", "hf")


@dataclass
class Timing:
    """Seconds of one generation, device work included."""

    prefill_s: float | None = 0.0
    decode_s: float = 0.0


@dataclass
class RowOutput:
    """One prompt's generation.

    Attributes:
        tokens: new token ids, stop token included.
        finish: id of the stop token, or "length".
        prompt_bytes: bytes held right after the prompt; None on the `hf` path, where that moment is not seen.
    """

    tokens: list[int]
    finish: int | str
    cache: KVCache
    timing: Timing
    prompt_bytes: CacheBytes | None = None


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
        sequences: prompt and new tokens: (B, S + T) for tensor input, rows that stopped early padded with their stop
            token; a list of 1-D tensors for list input.
        cache: the KVCache of the row, or a CacheGroup of several rows.
        rows: per-row details.
    """

    sequences: torch.Tensor | list[torch.Tensor]
    rows: list[RowOutput]

    @property
    def cache(self) -> KVCache | CacheGroup:
        return self.rows[0].cache if len(self.rows) == 1 else CacheGroup([row.cache for row in self.rows])

    @property
    def timing(self) -> Timing:
        parts = [row.timing for row in self.rows]
        prefill = None if any(p.prefill_s is None for p in parts) else sum(p.prefill_s for p in parts)
        return Timing(prefill, sum(p.decode_s for p in parts))


@contextmanager
def _clock(device: torch.device) -> Iterator[list[float]]:
    """Wall seconds of a block with all device work done; the result is the list's only item afterwards."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    result, start = [0.0], time.perf_counter()
    yield result
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    result[0] = time.perf_counter() - start


def stop_ids(model: PreTrainedModel, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row: given ones, or the checkpoint's for None; an empty list never stops."""
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Runs a prompt ids (1, S), filling and compressing `cache` -> float32 logits (1, V) of the last token."""
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    return out.logits[:, -1].float()


@torch.no_grad()
def decode_step(model: PreTrainedModel, token: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """One token (1, 1) through the model -> float32 logits (1, V)."""
    return prefill(model, token, cache)


def _generate_loop(
    model: PreTrainedModel, ids: torch.Tensor, cache: KVCache, max_new: int, min_new: int, stops: list[int]
) -> RowOutput:
    """Our own greedy loop over one row: logits of the last position only, no bookkeeping of transformers."""
    device = ids.device
    banned = torch.tensor(stops, device=device) if stops else None
    tokens: list[int] = []
    finish: int | str = "length"
    with _clock(device) as prefill_s:
        logits = prefill(model, ids[None], cache)
    held = cache.bytes()
    with _clock(device) as decode_s:
        while True:
            if banned is not None and len(tokens) < min_new:
                logits.index_fill_(1, banned, -torch.inf)
            token = logits.argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
            if tokens[-1] in stops:
                finish = tokens[-1]
                break
            if len(tokens) == max_new:
                break
            logits = decode_step(model, token, cache)
    return RowOutput(tokens, finish, cache, Timing(prefill_s[0], decode_s[0]), held)


def _generate_hf(
    model: PreTrainedModel, ids: torch.Tensor, cache: KVCache, max_new: int, min_new: int, stops: list[int]
) -> RowOutput:
    """The same row through transformers' `generate`, every processor of the checkpoint neutralised."""
    never = model.config.get_text_config(decoder=True).vocab_size  # an id no model emits: unset ids would be inherited
    config = GenerationConfig(
        max_new_tokens=max_new,
        min_new_tokens=min_new or None,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stops or never,
        pad_token_id=stops[0] if stops else 0,
    )
    with _clock(ids.device) as seconds:
        out = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            generation_config=config,
            **{cache_keyword(model): cache},
        )
    tokens = out[0, ids.shape[0] :].tolist()
    finish = tokens[-1] if tokens and tokens[-1] in stops else "length"
    return RowOutput(tokens, finish, cache, Timing(None, seconds[0]))


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
    sampler: Any = None,
) -> GenerationOutput:
    """Greedy generation with the attached method.

    Args:
        input_ids: (S,), (B, S) without padding, or a list of 1-D tensors of any lengths.
        min_new_tokens: so many first tokens cannot be stops.
        eos_token_id: None takes the checkpoint's ids, an empty list never stops.
        decode: "loop" (our own), "hf" (transformers' generate), "auto" (the loop).
        example_id: what randomised methods derive their draws from, one per row.
        sampler: replaces the draw of a randomised method.

    Raises:
        ValueError: no method is attached, bad shapes or counts.
    """
    attachment: Attachment | None = get_attachment(model)
    if attachment is None:
        raise ValueError(
            "no method is attached to this model: call attach(model, method=...) first, e.g. method='fullkv'"
        )
    if decode not in DECODE_PATHS:
        raise ValueError(f"--decode {decode!r} is not one of {', '.join(DECODE_PATHS)}")
    if max_new_tokens < 1 or not 0 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}, min_new_tokens={min_new_tokens}: need 0 <= min <= max, max >= 1"
        )
    prompts = _as_rows(input_ids)
    names = [example_id or ""] * len(prompts) if example_id is None or isinstance(example_id, str) else list(example_id)
    if len(names) != len(prompts):
        raise ValueError(f"{len(names)} example ids for {len(prompts)} prompts")
    run = _generate_hf if decode == "hf" else _generate_loop
    stops = stop_ids(model, eos_token_id)
    rows = []
    for ids, name in zip(prompts, names, strict=True):
        cache = attachment.new_cache(example_id=name, max_new_tokens=max_new_tokens, sampler=sampler)
        rows.append(run(model, ids.to(model.device), cache, max_new_tokens, min_new_tokens, stops))
    sequences = [
        torch.cat([ids, torch.tensor(row.tokens, dtype=ids.dtype, device=ids.device)])
        for ids, row in zip(prompts, rows, strict=True)
    ]
    if isinstance(input_ids, torch.Tensor):
        width = max(len(s) for s in sequences)
        sequences = torch.stack([torch.cat([s, s[-1:].expand(width - len(s))]) for s in sequences])
    return GenerationOutput(sequences, rows)
