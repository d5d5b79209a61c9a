from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import KVCluster, PromptContext
from kvfactory.ops.scores import reduce_groups
from kvfactory.ops.select import top_positions

if TYPE_CHECKING:
    from kvfactory.cache.store import Store


@register("Oracle")
class Oracle(KVCluster):
    """Control: the whole cache is stored and each decode step attends to its own exact top tokens.

    The ceiling of any selection at the same number of attended tokens. At kv_head granularity the query heads of a
    group share one choice, made on their aggregated attention probabilities. No paper; our own control.
    """

    capability = Capability(
        stage="decode-select",
        budget_means="tokens attended",
        drops_tokens=False,
        reference="control, no paper",
    )

    def select(self, q: torch.Tensor, store: Store, ctx: PromptContext) -> torch.Tensor | None:
        B, Hq, rows, D = q.shape
        k, _ = store.view()
        if k.shape[2] <= ctx.budget or rows > 1:
            return None
        folded = q.float().view(B, k.shape[1], self.shape.group, D)
        logits = (folded @ k.float().transpose(2, 3)) * self.scale
        scores = torch.softmax(logits, dim=-1).view(B, Hq, -1)
        if self.granularity == "kv_head":
            scores = reduce_groups(scores, k.shape[1], self.gqa_score_agg)
        chosen = top_positions(scores, ctx.budget)
        visible = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        return visible.repeat_interleave(Hq // visible.shape[1], dim=1).unsqueeze(2)
