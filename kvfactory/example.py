"""One example from record to row: prompt, generation, proof of compression, score, measurements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfactory.cache.kv_cache import KVCache
from kvfactory.data.encode import EncodedPrompt
from kvfactory.generation import RowOutput, generate
from kvfactory.metrics import score_example
from kvfactory.monkeypatch import Attachment
from kvfactory.preparation import DatasetPart, Job

RECORD_FIELDS = ("answers", "length", "dataset", "language", "all_classes", "_id")


class NotCompressed(ValueError):
    """A layer does not hold what the method declares."""


def run_example(
    job: Job, attachment: Attachment, part: DatasetPart, record: dict, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The result row of one record.

    Args:
        tell: takes sentences the user should see once.

    Raises:
        ValueError: the prompt does not fit the model's window, a budget that cannot be kept, or `NotCompressed`.
        RuntimeError: from torch, out of memory among them.
    """
    encoder, model = job.encoder, attachment.model
    name = f"{part.name}/{record['_id']}"
    text = job.prompts.render(part.name, record)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompt = encoder.encode(part.task, text, part.max_new_tokens, record["input"])
    for warning in caught:
        tell(f"{part.name}: {warning.message}")
    _reset_peak(model)
    out = generate(
        model,
        prompt.input_ids,
        max_new_tokens=part.max_new_tokens + encoder.thinking_budget(part.task),
        min_new_tokens=encoder.min_new_tokens(part.task),
        eos_token_id=encoder.stop_ids(part.task),
        decode=job.computation.decode,
        example_id=name,
    ).rows[0]
    peak = _peak_bytes(model)
    check_compression(attachment, out.cache, name)
    pred, think_tokens = encoder.decode(out.tokens, part.task)
    try:
        score = score_example(part.name, pred, record["answers"], record["all_classes"])
    except ValueError as error:
        raise ValueError(f"{name} cannot be scored: {error}") from error
    row = {"input": record["input"], "pred": pred} | {field: record[field] for field in RECORD_FIELDS}
    row = {field: row[field] for field in ("input", "answers", "pred", *RECORD_FIELDS[1:])}
    if job.settings.save_prompts:
        row["prompt"] = text
    if job.settings.save_context:
        row["context"] = record["context"]
    row["score"] = score
    return row | prompt_fields(prompt) | output_fields(out, think_tokens) | {"peak_mem_bytes": peak} | cache_fields(out)


def prompt_fields(prompt: EncodedPrompt) -> dict[str, Any]:
    """What a row says about its prompt."""
    names = ("prompt_tokens", "prompt_tokens_raw", "truncated", "question_seen")
    return {name: getattr(prompt, name) for name in names}


def output_fields(out: RowOutput, think_tokens: int) -> dict[str, Any]:
    """What a row says about its answer and its time; `rows_in_flight` is null for a row that decoded alone."""
    return {
        "new_tokens": len(out.tokens),
        "think_tokens": think_tokens,
        "finish": out.finish,
        "prefill_s": out.timing.prefill_s,
        "decode_s": out.timing.decode_s,
        "rows_in_flight": None if out.rows_in_flight == 1 else out.rows_in_flight,
    }


def cache_fields(out: RowOutput) -> dict[str, Any]:
    """What a row says about its cache, measured on the tensors held."""
    cache, held = out.cache, out.cache.bytes()
    capability = cache.plan.cluster.capability
    kept = cache.kept_tokens
    per_layer = [_whole(sum(heads) / len(heads)) for heads in kept]
    mean = _whole(sum(per_layer) / len(per_layer))
    attended = _mean_slots(cache)
    if capability.stage == "decode-select":
        attended = min(cache.context(None).budget, attended)
    return {
        "bytes_prompt": None if out.prompt_bytes is None else out.prompt_bytes.used,
        "bytes_end": held.used,
        "bytes_aux": held.aux,
        "bytes_alloc": held.alloc,
        "bytes_full": cache.full_bytes(),
        "budget_means": capability.budget_means,
        "kept_tokens": {
            "min": min(map(min, kept)),
            "mean": mean,
            "max": max(map(max, kept)),
            "per_layer": per_layer,
        },
        "tokens_attended": attended,
        "compressed": cache.compressed,
    }


def _mean_slots(cache: KVCache) -> int | float:
    """Slots in use per stored head at the end, as mean over layers; stores of equal heads know theirs."""
    appended = cache.get_seq_length() - cache.prompt_len
    slots = []
    for layer in cache.kv_layers:
        heads = layer.store.prompt_slots
        slots.append(getattr(layer.store, "length", sum(heads) / len(heads) + appended))
    return _whole(sum(slots) / len(slots))


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def check_compression(attachment: Attachment, cache: KVCache, example: str) -> None:
    """Compares the prompt slots of every layer with what the method declares for this prompt.

    A method whose share per head depends on the scores declares bounds for the layer's total instead
    (`declared_bounds`).

    Raises:
        NotCompressed: names example and layer, both counts.
    """
    context = cache.context(None)
    for slot, layer in zip(attachment.slots, cache.kv_layers, strict=True):
        stored, declared = list(layer.store.prompt_slots), slot.cluster.declared(context)
        bounds = getattr(slot.cluster, "declared_bounds", None)
        if bounds is None:
            right = stored == declared
        else:
            least, most = bounds(context)
            right = len(stored) == len(declared) and least <= sum(stored) <= most
        if not right:
            raise NotCompressed(
                f"{example}, layer {slot.model_layer}: {attachment.plan.method} declares {_counts(declared)} prompt "
                f"tokens per stored head, the cache holds {_counts(stored)}"
            )


def _counts(heads: list[int]) -> str:
    """ "128 (x8)" for equal counts, else the list."""
    return f"{heads[0]} (x{len(heads)})" if len(set(heads)) == 1 else str(heads)


def _devices(model: PreTrainedModel) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


def _reset_peak(model: PreTrainedModel) -> None:
    for device in _devices(model):
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(model: PreTrainedModel) -> int | None:
    """Peak bytes allocated on all devices of the model together; None on the CPU."""
    devices = _devices(model)
    return sum(torch.cuda.max_memory_allocated(device) for device in devices) if devices else None
