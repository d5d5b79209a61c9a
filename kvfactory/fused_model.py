"""Puts the kernels of `kvfactory.kernels.model_ops` under a live model, one instance attribute per module, and off it.

No class and no function of transformers is replaced: a module whose own forward gives, on a small random input, the
bits of a kernel's torch definition gets a `forward` of its own. Others (Gemma's norms, experts, foreign kernels) are
left alone. A module that accelerate has hooked keeps its hooks: ours then stands where accelerate keeps the forward it
wraps, and if accelerate comes later it wraps ours.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfactory.kernels import model_reference
from kvfactory.kernels.dispatch import why_torch

KINDS = ("RMSNorm", "SwiGLU", "RoPE")
_HALF = (torch.float16, torch.bfloat16)
_ROTATION = "apply_rotary_pos_emb"
_CACHE_NAMES = {"cache", "past_key_values", "past_key_value"}


def obstacle(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why a model runs its own small operations on a device; None where fused ones pay and are right."""
    if (why := why_torch(device)) is not None:
        return why
    if model.dtype not in _HALF:
        return f"the fused operations are for half precision, the model is {model.dtype}"
    return None


class FusedForward:
    """The forward of one module, until it is removed.

    The module's own forward runs where gradients are recorded, which the kernels do not do, and on inputs of another
    kind, device or dtype than the module was fused for.

    Attributes:
        stock: the module's own forward.
        compute: (module, *args, **kwargs) -> output; no closure over the module, so that a deep copy computes with
            the copy's weights.
        active: whether calls reach the kernel. False once removed, so that whoever still holds this object, as a
            wrapper may, gets the stock forward.
    """

    __slots__ = ("module", "stock", "compute", "device", "dtype", "active", "_replaced")

    def __init__(self, module: nn.Module, compute: Callable[..., Any], device: torch.device, dtype: torch.dtype):
        self.module = module
        self.compute = compute
        self.device, self.dtype = device, dtype
        self.active = True
        place = _place(module)
        self.stock = getattr(module, place)
        self._replaced = module.__dict__.get(place)
        module.__dict__[place] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        if (
            not self.active
            or torch.is_grad_enabled()
            or type(x) is not torch.Tensor
            or x.dtype != self.dtype
            or x.device != self.device
        ):
            return self.stock(*args, **kwargs)
        return self.compute(self.module, *args, **kwargs)

    def remove(self) -> None:
        """Gives the module its own forward back, wherever accelerate has moved this one meanwhile."""
        self.active = False
        for place in ("forward", "_old_forward"):
            if self.module.__dict__.get(place) is not self:
                continue
            if place == "forward" and self._replaced is None:
                del self.module.__dict__[place]
            else:
                self.module.__dict__[place] = self.stock


class Fused:
    """The fused modules of one model.

    Attributes:
        counts: kind -> modules, for every one of `KINDS`.
    """

    def __init__(self, forwards: dict[str, list[FusedForward]]):
        self._forwards = forwards
        self.counts = {kind: len(forwards[kind]) for kind in KINDS}

    def __str__(self) -> str:
        return "fused: " + ", ".join(f"{count} {kind}" for kind, count in self.counts.items())

    def switch(self, active: bool) -> None:
        """Whether calls reach the kernels; the stock forwards run otherwise, and nothing is taken off."""
        for forwards in self._forwards.values():
            for forward in forwards:
                forward.active = active

    def remove(self) -> None:
        """Takes everything off; outputs are stock again, bit for bit. Later calls do nothing."""
        for forwards in self._forwards.values():
            for forward in forwards:
                forward.remove()
            forwards.clear()


@torch.no_grad()
def fuse(model: PreTrainedModel, kinds: tuple[str, ...] = KINDS) -> Fused:
    """Fuses what is recognised in a model.

    Args:
        kinds: which of `KINDS`.

    Raises:
        ValueError: an unknown kind, a device on which the kernels do not run, a model that is fused already.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds names {', '.join(sorted(unknown))}; fused operations are {', '.join(KINDS)}")
    if (why := why_torch(model.device)) is not None:
        raise ValueError(f"the model's operations cannot be fused: {why}")
    if any(isinstance(held, FusedForward) for module in model.modules() for held in _held(module)):
        raise ValueError("the model's operations are fused already; call remove() on what fuse() returned first")
    rotations = _Rotations()
    recognisers = {"RMSNorm": _norm, "SwiGLU": _swiglu, "RoPE": rotations.recognise}
    forwards: dict[str, list[FusedForward]] = {kind: [] for kind in KINDS}
    for module in model.modules():
        devices = {parameter.device for parameter in module.parameters()}
        if len(devices) != 1 or not _has_own_forward(module):
            continue
        device = devices.pop()
        if why_torch(device) is not None:  # another GPU than the first, or weights that accelerate keeps elsewhere
            continue
        for kind in kinds:
            if (compute := recognisers[kind](module, device, model.dtype)) is not None:
                forwards[kind].append(FusedForward(module, compute, device, model.dtype))
                break
    return Fused(forwards)


def _place(module: nn.Module) -> str:
    """The attribute that holds a module's own forward: accelerate moves it to `_old_forward`."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _held(module: nn.Module) -> Iterator[Any]:
    return (module.__dict__.get(place) for place in ("forward", "_old_forward"))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a call runs the forward of the module's class, perhaps inside accelerate's hooks.

    Accelerate leaves a bound method of the class behind, which is its own forward too; anything else is a stranger's.
    """
    held = module.__dict__.get(_place(module))
    return held is None or getattr(held, "__func__", None) is type(module).forward


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers, the same at every call; the global generators are not touched."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _compiled(compute: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
    """`compute` after one call, so that no prompt's time holds a compilation."""
    compute(*inputs)
    return compute


def _norm(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    from kvfactory.kernels.model_ops import MAX_NORM_SIZE

    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or weight.dtype != dtype or weight.numel() > MAX_NORM_SIZE:
        return None
    x = 3 * _random(device, dtype, 1, 2, weight.numel())
    same = torch.equal(getattr(module, _place(module))(x), model_reference.rms_norm(x, weight, eps))
    return _compiled(_fused_norm, module, x) if same else None


def _fused_norm(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    from kvfactory.kernels.model_ops import rms_norm

    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _swiglu(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Of a gate and an up projection, or of one that gives both (Phi-3)."""
    parts = {name: getattr(module, name, None) for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")}
    there = {name for name, part in parts.items() if isinstance(part, nn.Module)}
    if there == {"gate_proj", "up_proj", "down_proj"}:
        compute, size = _fused_mlp, getattr(module.gate_proj, "in_features", None)
    elif there == {"gate_up_proj", "down_proj"}:
        compute, size = _fused_chunked_mlp, getattr(module.gate_up_proj, "in_features", None)
    else:
        return None
    if size is None:
        return None
    x = _random(device, dtype, 1, 2, size)
    if compute is _fused_mlp:
        gate, up = module.gate_proj(x), module.up_proj(x)
    else:
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    if gate.shape != up.shape or gate.dtype != dtype or up.dtype != dtype:
        return None
    # A second call repeats the projections' bits: cuBLAS gives equal calls equal results.
    same = torch.equal(getattr(module, _place(module))(x), module.down_proj(model_reference.swiglu(gate, up)))
    return _compiled(compute, module, x) if same else None


def _fused_mlp(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    from kvfactory.kernels.model_ops import swiglu

    gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
    product = swiglu(gate, up, out=_reusable(module.gate_proj, gate))
    del gate, up  # not held while the product is projected
    return module.down_proj(product)


def _fused_chunked_mlp(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    from kvfactory.kernels.model_ops import swiglu

    gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return module.down_proj(swiglu(gate, up, out=_reusable(module.gate_up_proj, gate)))


def _reusable(projection: nn.Module, output: torch.Tensor) -> torch.Tensor | None:
    """A projection's output, to be written over, unless a hook may have kept it: at long prompts it is the peak."""
    return None if projection._forward_hooks else output


class _Rotations:
    """Attention forwards whose rotation is fused: the family's own code, which finds ours under the rotation's name.

    The code, its defaults and all other names are those of the installed transformers; only the function object that
    runs it is ours, so projections, norms, cache and attention stay what they are in any version and family.
    """

    def __init__(self) -> None:
        self._rebound: dict[Callable[..., Any], Callable[..., Any] | None] = {}

    def recognise(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
        head_dim = getattr(module, "head_dim", None)
        forward = type(module).forward
        own = inspect.unwrap(forward)  # what decorators wrap
        if not isinstance(head_dim, int) or head_dim % 2 or not isinstance(own, types.FunctionType):
            return None
        stock = own.__globals__.get(_ROTATION)
        if _ROTATION not in own.__code__.co_names or stock is None:
            return None
        if forward not in self._rebound:
            from kvfactory.kernels.model_ops import rotate_queries_and_keys

            shapes = ((1, 3, 5, head_dim), (1, 2, 5, head_dim), (1, 5, head_dim), (1, 5, head_dim))
            inputs = [_random(device, dtype, *shape) for shape in shapes]
            inputs[3] = inputs[3].flip(-1)
            pairs = zip(stock(*inputs), model_reference.rotate_queries_and_keys(*inputs), strict=True)
            same = all(torch.equal(theirs, ours) for theirs, ours in pairs)
            if same:
                _compiled(rotate_queries_and_keys, *inputs)
            self._rebound[forward] = _rebind(forward, own, stock) if same else None
        return self._rebound[forward]


def _rebind(forward: Callable[..., Any], own: types.FunctionType, stock: Callable[..., Any]) -> Callable[..., Any]:
    from kvfactory.kernels.model_ops import rotate_queries_and_keys

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any) -> Any:
        # Partial rotations, other layouts and unusual dtypes keep the family's function.
        fitting = not rest and not named and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
        if not fitting or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            return stock(q, k, cos, sin, *rest, **named)
        return rotate_queries_and_keys(q, k, cos, sin)

    names = {**own.__globals__, _ROTATION: rotate}
    fused = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    fused.__kwdefaults__ = own.__kwdefaults__
    foreign_names = _CACHE_NAMES - set(inspect.signature(own).parameters)

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Decorators of the forward, which the rebound code lacks, translate a cache's former names.
        return (forward if foreign_names & kwargs.keys() else fused)(module, *args, **kwargs)

    return attention
