from __future__ import annotations

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import KVCluster


@register("FullKV")
class FullKV(KVCluster):
    """The uncompressed cache: every prompt token of every kv head. What all other methods are compared with.

    Reference: transformers' own dynamic cache.
    """

    capability = Capability(
        stage="none",
        budget_means="none",
        same_for_all_heads=True,
        drops_tokens=False,
        reads_queries=False,
        reference="huggingface/transformers, cache_utils.py",
    )
