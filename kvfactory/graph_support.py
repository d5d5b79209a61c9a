"""Whether a decode step can be captured as a CUDA graph, and if not, why: the reason is printed, the loop runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvfactory.kernels.dispatch import why_torch
from kvfactory.kernels.segments import DTYPES, MAX_GROUP, MAX_HEAD_DIM
from kvfactory.methods.base import KVCluster
from kvfactory.model_parts import lies_on_several_devices, rotary_frequencies

if TYPE_CHECKING:
    from kvfactory.monkeypatch import Attachment
    from kvfactory.plan import Plan


def graph_obstacle(attachment: Attachment, plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why rows of `plan` decode in the loop; None where their step can be captured.

    Args:
        attachment: of any plan on the model; its weights are not touched, so a model without weights will do.
    """
    return _of_model(attachment, device, dtype) or _of_method(attachment, plan)


def _of_method(attachment: Attachment, plan: Plan) -> str | None:
    clusters = attachment.clusters(plan)
    if any(cluster.evicts for cluster in clusters):
        return f"{plan.method} moves stored tokens at every step (--decode_evict on)"
    if any(type(cluster).select is not KVCluster.select for cluster in clusters):
        return f"{plan.method} chooses at every step what it reads"
    return None


def _of_model(attachment: Attachment, device: torch.device, dtype: torch.dtype) -> str | None:
    model, (heads, kv_heads) = attachment.model, attachment.heads
    if device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if (why := why_torch(device)) is not None:
        return why
    if lies_on_several_devices(model):
        return "the model lies on several devices"
    if len(attachment.slots) != len(attachment.all_slots):
        return "transformers keeps the model's sliding-window layers itself"
    if rotary_frequencies(model) is None:
        return "the model's rotary frequencies change with the length"
    if any("Experts" in type(module).__name__ or "SparseMoe" in type(module).__name__ for module in model.modules()):
        return "the model's experts are chosen with the host's help"
    if heads // kv_heads > MAX_GROUP or dtype not in DTYPES:
        return f"the decode kernel takes {MAX_GROUP} query heads per kv head and half or single precision"
    if any(slot.module.head_dim > MAX_HEAD_DIM for slot in attachment.slots):
        return f"the decode kernel takes a head_dim up to {MAX_HEAD_DIM}"
    return None
