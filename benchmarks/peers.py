"""The same measurements for other software in the same process: stock transformers, and kvpress where it is installed.

Both decode in their usual way, without a graph: transformers in `generate`, kvpress in the loop of its own pipeline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.timing import gib, peak_memory, repeat_within, steady_ms, synchronize, wall_seconds
from kvfactory.monkeypatch import cache_keyword

PEERS = ("transformers", "kvpress")
KVPRESS_METHODS = ("SnapKV", "PyramidKV", "AdaKV", "StreamingLLM", "L2Norm")


class _Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(self.device)
        self.marks.append((time.perf_counter(), input_ids.shape[0]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _prefill(
    model: PreTrainedModel, run: Callable[[], Any], repeats: int, seconds: float
) -> tuple[dict[str, Any], Any]:
    """The figures of `run`, and what its last call returned."""
    peaks: list[int | None] = []
    held: list[Any] = []

    @torch.no_grad()
    def once() -> float:
        held.clear()
        with peak_memory(model.device) as peak:
            took = wall_seconds(lambda: held.append(run()), model.device)
        peaks.append(peak.extra)
        return took

    times = repeat_within(once, repeats, seconds)
    facts = {
        "prefill_s": round(statistics.median(times), 5),
        "prefill_all_s": [round(t, 5) for t in times],
        "peak_extra_gib": gib(peaks[-1]),
    }
    return facts, held[0]


def measure_transformers(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """FullKV of a model that carries no method: prompt passes, then one `generate`."""
    ids = ids.to(model.device)[None]
    name = cache_keyword(model)
    facts, _ = _prefill(
        model,
        lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: DynamicCache(config=model.config)}),
        repeats,
        seconds,
    )
    clock = _Clock(model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        ),
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return facts | {"decode_ms": steady_ms(clock.marks, 1)}


def _press(method: str, ratio: float) -> Any:
    """kvpress's own defaults, except for the window of 8 and the 4 sinks that all systems here share."""
    import kvpress

    window = {"compression_ratio": ratio, "window_size": 8, "kernel_size": 7}
    return {
        "SnapKV": lambda: kvpress.SnapKVPress(**window),
        "PyramidKV": lambda: kvpress.PyramidKVPress(**window),
        "AdaKV": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(**window)),
        "StreamingLLM": lambda: kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
        "L2Norm": lambda: kvpress.KnormPress(compression_ratio=ratio),
    }[method]()


@torch.no_grad()
def measure_kvpress(
    model: PreTrainedModel, ids: torch.Tensor, method: str, budget: int, new_tokens: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """One press under the same budget, with the passes of kvpress's pipeline.

    Raises:
        ImportError: kvpress is not installed.
        ValueError: this version of transformers does not pass the cache under the name that the presses look for.
    """
    if (name := cache_keyword(model)) != "past_key_values":
        raise ValueError(
            f"kvpress looks for past_key_values, which transformers calls {name} from 5.24 on: install an older one"
        )
    press = _press(method, 1 - budget / len(ids))
    ids = ids.to(model.device)[None]

    def forward(tokens: torch.Tensor, cache: DynamicCache, first: int) -> torch.Tensor:
        # The presses read `cache_position`, which newer versions of transformers no longer pass on by themselves.
        where = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        out = model(
            input_ids=tokens,
            position_ids=where[None],
            cache_position=where,
            use_cache=True,
            logits_to_keep=1,
            **{name: cache},
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def prompt() -> tuple[DynamicCache, torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with press(model):
            return cache, forward(ids, cache, 0)

    facts, (cache, token) = _prefill(model, prompt, repeats, seconds)
    marks = []
    for i in range(new_tokens - 1):
        token = forward(token, cache, ids.shape[1] + i)
        token.tolist()
        marks.append((time.perf_counter(), 1))
    kept = cache.layers[0].keys.shape[2] - (new_tokens - 1)
    return facts | {"decode_ms": steady_ms(marks, 1), "kept_mean": kept}
