"""kvfactory: every published KV-cache reduction method on the same model, prompts, budget and byte count.

from kvfactory import attach, detach, generate
attach(model, method="snapkv", max_capacity_prompt=256, kv_cache_granularity="kv_head")
out = generate(model, input_ids, max_new_tokens=64)
print(out.cache.nbytes, out.cache.kept_tokens)
detach(model)
"""

from __future__ import annotations

import importlib
from typing import Any

from kvfactory.version import __version__

# Looked up on first use, so that the scorer and the data tools work without torch.
_LAZY = {
    "attach": "kvfactory.monkeypatch",
    "detach": "kvfactory.monkeypatch",
    "generate": "kvfactory.generation",
    "compress_prompt": "kvfactory.compress",
    "list_methods": "kvfactory.listing",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvfactory' has no attribute {name!r}")
