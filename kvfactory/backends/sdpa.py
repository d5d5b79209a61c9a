"""torch's scaled_dot_product_attention, called through transformers' own wrapper.

The wrapper decides per version and device whether heads are grouped inside the kernel or repeated before it; calling it
keeps FullKV bit-equal to a stock model on every supported version. It reads the group size from a module attribute, so
it gets a stand-in that carries the group size of the stored heads.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kvfactory.backends`."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=causal)
    return sdpa_attention_forward(module, q, k, v, mask, scaling=scale)[0]
