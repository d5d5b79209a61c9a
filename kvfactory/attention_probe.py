"""The attention of the newest token, per layer and query head, read while a model decodes with full attention.

Only one row per head and step is ever built: L x Hq x T float32, 41 MB for 32 x 32 heads at 10,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from kvfactory.budget import Budget
from kvfactory.capability import Capability
from kvfactory.methods.base import KVCluster, PromptContext
from kvfactory.monkeypatch import Attachment, attach_plan, detach, get_attachment
from kvfactory.plan import Plan
from kvfactory.settings import MethodSettings

if TYPE_CHECKING:
    from kvfactory.cache.kv_cache import KVCache
    from kvfactory.cache.store import Store


class AttentionProbe(KVCluster):
    """FullKV that looks: before each decode read it keeps the attention row of the newest token.

    Not in the registry of methods: it stores and attends to everything.

    Attributes:
        row: (Hq, T) float32 of the last decode step, T tokens stored, the newest included; None before the first.
    """

    name = "AttentionProbe"
    capability = Capability(
        stage="decode-select", budget_means="none", drops_tokens=False, reference="our own instrument, no paper"
    )
    row: torch.Tensor | None = None

    def select(self, q: torch.Tensor, store: Store, ctx: PromptContext) -> None:
        B, Hq, rows, D = q.shape
        if rows == 1:
            k, _ = store.view()
            folded = q.float().reshape(B, k.shape[1], -1, D)
            logits = (folded @ k.float().transpose(2, 3)) * self.scale
            self.row = torch.softmax(logits, dim=-1).view(B, Hq, -1)[0]


class LastRow:
    """The rows of all layers of one attached model."""

    def __init__(self, attachment: Attachment):
        self._attachment = attachment
        self._clusters: list[AttentionProbe] = attachment.clusters(attachment.plan)

    @property
    def shape(self) -> tuple[int, int]:
        """(L, Hq); L counts the full-attention layers."""
        return len(self._clusters), self._clusters[0].shape.num_heads

    def new_cache(self, max_new_tokens: int) -> KVCache:
        """A cache for one prompt."""
        return self._attachment.new_cache(max_new_tokens=max_new_tokens)

    def take(self, device: torch.device | None = None) -> torch.Tensor:
        """(L, Hq, T) float32 attention of the token decoded last, on `device`, by default the first layer's."""
        rows = [cluster.row for cluster in self._clusters]
        assert all(row is not None for row in rows), "no token was decoded since the last take"
        for cluster in self._clusters:
            cluster.row = None
        return torch.stack([row.to(device or rows[0].device) for row in rows])


def probe_plan() -> Plan:
    """The plan that puts an `AttentionProbe` on every layer."""
    return Plan(
        cluster=AttentionProbe,
        settings=MethodSettings(),
        budget=Budget.of(),
        granularity="kv_head",
        gqa_score_agg="mean",
        preset="factory",
        seed=0,
    )


@contextmanager
def last_row_attention(model: PreTrainedModel, backend: str = "sdpa") -> Iterator[LastRow]:
    """Attaches the probe to a model without a method for the duration of a `with` block.

    Raises:
        ValueError: the model carries a method already, or takes no method at all.
    """
    if (other := get_attachment(model)) is not None:
        raise ValueError(f"{other.plan.method} is attached to this model already; call detach(model) first")
    attachment = attach_plan(model, probe_plan(), backend)
    try:
        yield LastRow(attachment)
    finally:
        detach(model)
