"""One example from record to row: prompt, generation, proof of compression, score, measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfactory.cache.kv_cache import KVCache
from kvfactory.data.encode import EncodedPrompt
from kvfactory.plan import Plan
from kvfactory.preparation import DatasetPart, Job, skipped_template
from kvfactory.rows import Request, RowOutput


class NotCompressed(ValueError):
    """A layer does not hold what the method declares."""


@dataclass(frozen=True)
class Example:
    """One record on its way to a row.

    Attributes:
        prompt: None when it could not be encoded.
    """

    record: dict
    text: str = ""
    prompt: EncodedPrompt | None = None

    @classmethod
    def of(cls, job: Job, part: DatasetPart, record: dict) -> Example:
        """Fills the prompt in and encodes it.

        Raises:
            ValueError: the prompt does not fit the model's window.
        """
        return cls(record, *job.suite.encode(job.encoder, part.dataset, record))

    def request(self, job: Job, part: DatasetPart, plans: list[Plan]) -> Request:
        """What to generate, once per plan."""
        encoder, task = job.encoder, part.dataset.task
        return Request(
            ids=self.prompt.input_ids,
            max_new=part.dataset.max_new_tokens + encoder.thinking_budget(task),
            min_new=encoder.min_new_tokens(task),
            stops=encoder.stop_ids(task),
            plans=plans,
            example_id=f"{part.name}/{self.record['_id']}",
            tag=self,
            template_tail=skipped_template(job.settings, self.prompt),
        )


def example_row(job: Job, part: DatasetPart, example: Example, out: RowOutput, peak: int | None) -> dict[str, Any]:
    """The result row of a finished generation.

    Args:
        peak: peak device bytes of this row; None on the CPU, or where rows share the device.

    Raises:
        ValueError: the answer cannot be scored; `NotCompressed`.
    """
    record = example.record
    name = f"{part.name}/{record['_id']}"
    check_compression(out.cache, name)
    pred, think_tokens = job.encoder.decode(out.tokens, part.dataset.task)
    row = job.suite.fields(part.dataset, record, pred)
    if job.settings.save_prompts:
        row["prompt"] = example.text
    try:
        row |= job.suite.scores(part.dataset, record, pred)
    except ValueError as error:
        raise ValueError(f"{name} cannot be scored: {error}") from error
    row |= prompt_fields(example.prompt) | output_fields(out, think_tokens) | {"peak_mem_bytes": peak}
    return row | cache_fields(out)


def prompt_fields(prompt: EncodedPrompt) -> dict[str, Any]:
    """What a row says about its prompt."""
    names = ("prompt_tokens", "prompt_tokens_raw", "truncated", "question_seen")
    return {name: getattr(prompt, name) for name in names}


def output_fields(out: RowOutput, think_tokens: int) -> dict[str, Any]:
    """What a row says about its answer and its time; `rows_in_flight` is null for a row that decoded alone.

    `near_ties` counts steps of a shared batch at which the two largest logits were so close that batch 1 may differ.
    """
    return {
        "new_tokens": len(out.tokens),
        "think_tokens": think_tokens,
        "finish": out.finish,
        "prefill_s": out.timing.prefill_s,
        "decode_s": out.timing.decode_s,
        "rows_in_flight": None if out.rows_in_flight == 1 else out.rows_in_flight,
        "near_ties": out.near_ties,
    }


def cache_fields(out: RowOutput) -> dict[str, Any]:
    """What a row says about its cache, measured on the tensors held."""
    cache, held = out.cache, out.cache.bytes()
    capability = cache.plan.cluster.capability
    kept = cache.kept_tokens or [[cache.prompt_len]]  # a model whose layers all slide has no other count
    per_layer = [_whole(sum(heads) / len(heads)) for heads in kept]
    mean = _whole(sum(per_layer) / len(per_layer))
    attended = _mean_slots(cache)
    if capability.stage == "decode-select":
        attended = min(cache.context(None).budget, attended)
    return {
        "bytes_prompt": None if out.prompt_bytes is None else out.prompt_bytes.used,
        "bytes_end": held.used,
        "bytes_aux": held.aux,
        "bytes_alloc": (out.prompt_bytes or held).alloc,
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
    if not slots:
        return cache.get_seq_length()
    return _whole(sum(slots) / len(slots))


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def check_compression(cache: KVCache, example: str) -> None:
    """Compares the prompt slots of every layer with what the method declares for this prompt.

    Raises:
        NotCompressed: names example and layer, and both counts.
    """
    context = cache.context(None)
    for layer in cache.kv_layers:
        wrong = layer.cluster.mismatch(list(layer.store.prompt_slots), context)
        if wrong is not None:
            raise NotCompressed(f"{example}, layer {layer.slot.model_layer}: {cache.plan.method}: {wrong}")


def _devices(model: PreTrainedModel) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


def reset_peak(model: PreTrainedModel) -> None:
    for device in _devices(model):
        torch.cuda.reset_peak_memory_stats(device)


def peaks_by_device(model: PreTrainedModel) -> dict[str, int]:
    """Peak bytes allocated on each CUDA device of the model, by its name; empty on the CPU."""
    return {str(device): torch.cuda.max_memory_allocated(device) for device in _devices(model)}
