"""A finished row once more in the loop: what replayed steps must give."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfactory.loop_engine import choose, forward
from kvfactory.model_parts import input_device
from kvfactory.monkeypatch import get_attachment
from kvfactory.rows import NEAR_TIE, LiveRow, Request, RowOutput


class DecodeMismatch(RuntimeError):
    """Replayed steps and the loop part where their logits leave no doubt."""


def check_against_loop(model: PreTrainedModel, request: Request, output: RowOutput) -> str:
    """Compares a row's tokens with those of the loop, which decodes it alone.

    Returns:
        What was found, for the run record: equal tokens, or the first that differs and how far apart the two largest
        logits are there. In half precision, where batched and captured kernels round differently, such a difference
        is no fault.

    Raises:
        DecodeMismatch: in float32, a difference where the logits are not nearly tied.
    """
    step, gap = first_difference(model, request, output)
    what = f"--verify_decode: {output.plan.method}, {request.example_id}"
    if step is None:
        return f"{what}: all {len(output.tokens)} tokens are the loop's"
    found = f"{what}: token {step} is not the loop's, where the two largest logits are {gap:.3g} apart"
    if model.dtype == torch.float32 and gap >= NEAR_TIE:
        raise DecodeMismatch(f"{found}; use --decode loop, and report this")
    return found


@torch.no_grad()
def first_difference(model: PreTrainedModel, request: Request, output: RowOutput) -> tuple[int | None, float]:
    """(number of the first token that the loop chooses differently, or None; gap of its two largest logits there)."""
    cache = request.new_cache(get_attachment(model), output.plan)
    row = LiveRow(request, RowOutput(output.plan, cache), position=len(request.ids))
    ids, positions = request.ids.to(input_device(model))[None], None
    for step, token in enumerate(output.tokens):
        logits = forward(model, ids, cache, positions)
        [chosen] = choose(logits, [row])
        if chosen != token:
            best = logits[0].topk(2).values
            return step, float(best[0] - best[1])
        row.take(token)
        ids = torch.tensor([[token]], device=input_device(model))
        positions = torch.tensor([[row.position]], device=input_device(model))
        row.position += 1
    return None, 0.0
