"""Which definition of a kernel runs on a device: Triton where it has been measured, plain torch elsewhere.

`KVFACTORY_KERNELS=torch` or `triton` overrides the choice, for debugging and for measuring on another GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

MEASURED = ("NVIDIA H200",)
"""GPU models, by the beginning of their name, on which the kernels were checked and timed (benchmarks/RESULTS.md)."""

VARIABLE = "KVFACTORY_KERNELS"


def why_torch(device: torch.device | str) -> str | None:
    """Why the kernels do not run on a device, for the caller to print once; None where they do.

    Raises:
        ValueError: KVFACTORY_KERNELS has another value than torch or triton, or asks for kernels that cannot run.
    """
    device = torch.device(device)
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "torch", "triton"):
        raise ValueError(f"{VARIABLE}={wish} is neither torch nor triton")
    if wish == "torch":
        return f"{VARIABLE}=torch"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    obstacle = None
    # Cheap questions first: layers ask anew at each prompt, and in the loop at each step.
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        obstacle = f"Triton kernels need CUDA, the device is {device.type}"
    elif not wish and device.type == "cpu":
        obstacle = "Triton's interpreter is for tests of the kernels"
    elif not wish and not (name := torch.cuda.get_device_name(device)).startswith(MEASURED):
        obstacle = f"the kernels have not been measured on {name} ({VARIABLE}=triton runs them all the same)"
    elif find_spec("triton") is None:
        obstacle = "triton is not installed"
    if wish and obstacle:
        raise ValueError(f"{VARIABLE}=triton cannot be followed: {obstacle}")
    return obstacle


def use_triton(device: torch.device | str) -> bool:
    """Whether the kernels run on a device; see `why_torch`."""
    return why_torch(device) is None


class DecodeKernels(NamedTuple):
    """The steps of a decode layer, with the signatures of `kvfactory.kernels.reference`.

    Attributes:
        make_workspace: (segments, group, head_dim, *, capacity, device) -> what to pass as `workspace`.
    """

    decode_attention: Callable[..., torch.Tensor]
    append_tokens: Callable[..., None]
    append_and_attend: Callable[..., torch.Tensor]
    make_workspace: Callable[..., Any]


def decode_kernels(device: torch.device | str) -> DecodeKernels:
    """The decode steps of a device; asked for once per run, since the answer depends on nothing else."""
    if use_triton(device):
        from kvfactory.kernels.append import append_tokens
        from kvfactory.kernels.decode_attention import append_and_attend, decode_attention
        from kvfactory.kernels.segments import make_workspace

        return DecodeKernels(decode_attention, append_tokens, append_and_attend, make_workspace)
    from kvfactory.kernels import reference

    return DecodeKernels(
        reference.decode_attention, reference.append_tokens, reference.append_and_attend, lambda *_, **__: None
    )


def gather_kernel(device: torch.device | str) -> Callable[..., None]:
    """`gather_kept` of a device, with the signature in `kvfactory.kernels.reference`."""
    if use_triton(device):
        from kvfactory.kernels.gather import gather_kept
    else:
        from kvfactory.kernels.reference import gather_kept
    return gather_kept
