"""What the segment kernels share: which inputs they take, how segments are split, and the scratch of the split ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_GROUP = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

TOKENS_PER_SPLIT = 256
"""What one program should have at least: a join costs more than half of that takes to read (bench_kernels)."""
_MAX_SPLITS = 128
_PROGRAMS_PER_SM = 2
_BALANCING_SPLITS = 8


def choose_splits(segments: int, capacity: int, multiprocessors: int) -> int:
    """Programs per segment, from what the host knows; the kernel leaves idle those that a short segment does not need.

    As many as the device runs at once, and at least eight, so that segments of unequal length end at about one time.

    Args:
        capacity: slots of the longest segment.
    """
    most = min(_MAX_SPLITS, -(-capacity // TOKENS_PER_SPLIT))
    return max(1, min(most, max(_BALANCING_SPLITS, _PROGRAMS_PER_SM * multiprocessors // segments)))


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of `decode_attention`; one serves all layers of equal shape, on one stream at a time.

    Attributes:
        accumulators: (S, splits, G, D) float32; maxima, sums: (S, splits, G) float32.
        arrivals: (S,) int32, zero between calls: every call leaves it as it found it, replayed graphs too.
    """

    accumulators: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls, segments: int, group: int, head_dim: int, *, splits: int, device: torch.device | str
    ) -> DecodeWorkspace:
        shape = (segments, splits, group)
        return cls(
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.zeros(segments, dtype=torch.int32, device=device),
        )


def make_workspace(segments: int, group: int, head_dim: int, *, capacity: int, device: torch.device) -> DecodeWorkspace:
    """A workspace with the splits that suit the device; `capacity` is the number of slots of the longest segment."""
    on_cuda = device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
    splits = choose_splits(segments, capacity, multiprocessors)
    return DecodeWorkspace.allocate(segments, group, head_dim, splits=splits, device=device)


def check_segments(k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuses buffers that the kernels cannot address."""
    if k.ndim != 2 or k.shape != v.shape or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"k and v must be contiguous (slots, D) alike, not {tuple(k.shape)} and {tuple(v.shape)}")
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        raise ValueError(f"k and v must be float16, bfloat16 or float32 alike, not {k.dtype} and {v.dtype}")
    if k.shape[1] > MAX_HEAD_DIM:
        raise ValueError(f"the kernels take a head_dim up to {MAX_HEAD_DIM}, not {k.shape[1]}")
    for name, x in (("starts", starts), ("lengths", lengths)):
        if x.shape != starts.shape or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous (S,) int32 or int64, not {tuple(x.shape)} {x.dtype}")


def check_new_tokens(
    k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, alive: torch.Tensor, copies: int
) -> None:
    """Refuses new keys and values that do not fit the segments."""
    if k_new.ndim != 4 or k_new.shape[2:] != (1, k.shape[1]) or v_new.shape != k_new.shape:
        raise ValueError(
            f"k_new and v_new must be (R, Hk, 1, {k.shape[1]}) alike, not {tuple(k_new.shape)} and {tuple(v_new.shape)}"
        )
    if k_new.shape[0] * k_new.shape[1] * copies != starts.shape[0]:
        raise ValueError(f"{tuple(k_new.shape[:2])} new heads times {copies} copies are not {starts.shape[0]} segments")
    if k_new.dtype != k.dtype or v_new.dtype != k.dtype:
        raise ValueError(f"k_new and v_new must be {k.dtype} like the stored ones, not {k_new.dtype}")
    if k_new.stride(3) != 1 or v_new.stride(3) != 1:
        raise ValueError("k_new and v_new must be contiguous along D")
    if alive.shape != k_new.shape[:1] or not alive.is_contiguous():
        raise ValueError(f"alive must be contiguous ({k_new.shape[0]},), one per row, not {tuple(alive.shape)}")
