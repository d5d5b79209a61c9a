"""What memory an object keeps alive."""

from __future__ import annotations

from typing import Any

import torch


def reachable_storages(*roots: Any) -> dict[int, int]:
    """{address: bytes} of every tensor storage reachable from `roots`, the model's own and its modules excluded."""
    stack, seen, found = list(roots), set(), {}
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (torch.nn.Module, type)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            # `slot` leads to the model, `attachment` to what all caches share.
            stack.extend(v for k, v in item.items() if k not in ("slot", "attachment", "inv_freq"))
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.append(item.__dict__)
    return found
