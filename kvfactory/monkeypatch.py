"""Puts a method on a model of transformers: two public registrations, one cache class, one attribute per layer.

Nothing of transformers is replaced. Attention modules of every family project, rotate, call `cache.update` and then the
attention function named in the config; `kv_attention` is that function while a method is attached.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvfactory import fused_model
from kvfactory.backends import Backend, get_backend
from kvfactory.cache.kv_cache import AttachedCache, AttendedLayer, KVCache
from kvfactory.capability import FAMILIES, check_combination, check_sliding
from kvfactory.methods.base import KVCluster, LayerShape, PromptContext
from kvfactory.model_parts import attention_modules, is_full_attention, refusing_chunks, rotary_frequencies
from kvfactory.plan import Plan, make_plan

ATTENTION_NAME = "kvfactory"
_ATTACHMENT = "_kvfactory_attachment"
_REPLACED_BY = "_kvfactory_cache"
_attached: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_wrapped_inits: dict[type, Callable[..., None]] = {}


@dataclass(eq=False)
class LayerSlot:
    """What one attention module needs to find its method: hung on the module as `kv_slot`.

    Attributes:
        model_layer: position among all layers.
        cluster: the attached method at this layer; None where transformers keeps the layer itself (sliding window).
        bound: the cache layer whose `update` has just run, taken by the attention call that follows.
    """

    backend: Backend
    model_layer: int
    module: nn.Module
    cluster: KVCluster | None = None
    bound: AttendedLayer | None = None


def kv_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of an attached model, for every method, family and backend.

    Without one of our cache layers (no cache, a sliding layer, a foreign cache inside the model) it is dense attention
    of the chosen backend under the mask the model built. With one, the prompt attends densely and is compressed
    afterwards; later tokens attend to what is stored.

    Parameters have the order of transformers' sdpa function: kvpress wraps all functions and passes dropout by place.

    Args:
        query: (B, Hq, t, D); key, value: (B, Hk, t, D) new tokens, or everything of a layer that is not ours.
    """
    slot: LayerSlot | None = getattr(module, "kv_slot", None)
    if slot is None:
        raise ValueError(
            "this model shares its config object with a model that has a method attached; build each model from a "
            "config of its own (copy.deepcopy(config))"
        )
    layer, slot.bound = slot.bound, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True is not available while a method is attached: no weights are built")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("this model caps or biases its attention logits, which kvfactory does not reproduce")
    if layer is not None:
        return layer.attend(query, key, value, attention_mask, scale), None
    causal = attention_mask is None and query.shape[2] > 1
    return slot.backend(query, key, value, scale=scale, causal=causal, mask=attention_mask), None


def padding_or_none(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of an attached model: None wherever causal attention suffices, else (B, 1, t, n) bool as sdpa has it."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, kv_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_or_none)


def cache_keyword(model: nn.Module) -> str:
    """How this version of transformers calls the cache argument: `cache` from 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Attachment:
    """One method on one model, until `detach`.

    Attributes:
        all_slots: one `LayerSlot` per attention layer, in model order; slots: those of compressible layers.
        heads: query heads and kv heads of a layer.
        graph_engines: rows in flight -> the captured step of so many, kept for the next run (`kvfactory.decoder`).
        record_positions: whether new caches keep the original positions of what they store, see `KVCache`.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan, backend_name: str, fuse: bool = True):
        if not hasattr(model, "generate"):
            raise ValueError(f"{type(model).__name__} does not generate text; attach to its ...ForCausalLM model")
        self.plan = plan
        self.backend_name = backend_name
        self.record_positions = False
        self._model = weakref.ref(model)
        self._stock_attention = model.config._attn_implementation
        self._parameters = list(inspect.signature(model.forward).parameters)
        self.cache_keyword = cache_keyword(model)
        config = model.config.get_text_config(decoder=True)
        backend = get_backend(backend_name)
        modules = attention_modules(model)
        native = self._native_layers(model)
        ours = [i for i in modules if is_full_attention(native, i)]
        check_sliding(plan.method, plan.cluster.capability, len(modules) - len(ours), len(modules))
        self.all_slots = [LayerSlot(backend, i, module) for i, module in modules.items()]
        self.slots = [slot for slot in self.all_slots if slot.model_layer in ours]
        kv_heads = getattr(config, "num_key_value_heads", None)
        if kv_heads is None:
            raise ValueError(
                f"{type(model).__name__} does not say how many key-value heads it has, so its layout is not known; "
                f"supported families: {', '.join(FAMILIES)}"
            )
        self.heads = (config.num_attention_heads, kv_heads)
        self._clusters: dict[int, tuple[Plan, list[KVCluster]]] = {}
        self.graph_engines: dict[int, Any] = {}
        self._wants_fusing = fuse
        self._fused: fused_model.Fused | None = None
        self._fusing = 0
        self.told_obstacle = False
        for slot, cluster in zip(self.slots, self.clusters(plan), strict=True):
            slot.cluster = cluster
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, so no "
                f"method can be attached; supported families: {', '.join(FAMILIES)}"
            )
        for slot in self.all_slots:
            slot.module.kv_slot = slot
        self._hook = model.register_forward_pre_hook(self._take_over_cache, with_kwargs=True)
        model.__dict__["generate"] = refusing_chunks(model)

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None
        return model

    @staticmethod
    def _native_layers(model: PreTrainedModel) -> list[Any]:
        return list(DynamicCache(config=model.config).layers)

    def clusters(self, plan: Plan) -> list[KVCluster]:
        """One cluster per compressible layer for `plan`, the attached one or another that shares the prompt pass."""
        if id(plan) not in self._clusters:
            shapes = [LayerShape(i, len(self.slots), *self.heads, s.module.head_dim) for i, s in enumerate(self.slots)]
            if shapes:
                plan.cluster.check_model(plan.settings, shapes[0], self.model.config._name_or_path or None)
            built = []
            for slot, shape in zip(self.slots, shapes, strict=True):
                cluster = plan.build(shape)
                cluster.scale = slot.module.scaling
                built.append(cluster)
            self._clusters[id(plan)] = (plan, built)
        return self._clusters[id(plan)][1]

    def new_cache(self, plan: Plan | None = None, **kwargs: Any) -> KVCache:
        """A fresh `KVCache` for one generation with `plan`, by default the attached one."""
        model, plan = self.model, plan or self.plan
        frequencies = rotary_frequencies(model)
        for cluster in self.clusters(plan):  # not when attaching: weights may come, or move, after that
            cluster.inv_freq = frequencies
        native = self._native_layers(model)
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        native += [DynamicLayer() for _ in range(count - len(native))]
        return KVCache(self, plan, native, **kwargs)

    def full_bytes(self, length: int, itemsize: int) -> int:
        """Bytes of `length` tokens of one row at kv heads, compressible layers only."""
        return sum(2 * self.heads[1] * slot.module.head_dim * length * itemsize for slot in self.slots)

    def resolve_budget(self, plan: Plan, prompt_len: int, template_tail: int = 0) -> int:
        """The budget of `plan` in tokens for a prompt of `prompt_len` tokens, checked against the method's settings."""

        def stored(tokens: int) -> int:
            ctx = PromptContext(prompt_len=prompt_len, budget=tokens, template_tail=template_tail)
            return sum(2 * sum(c.declared(ctx)) * c.shape.head_dim for c in self.clusters(plan))

        budget = plan.budget.resolve(prompt_len, stored, self.full_bytes(prompt_len, 1))
        plan.budget.check_resolved(budget, prompt_len, plan.settings.validate)
        return budget

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Within, the model's small operations run as fused kernels where that is possible and wanted.

        Only kvfactory's own decoding enters it: any other forward of the attached model stays stock.
        """
        model = self.model
        if self._wants_fusing and self._fused is None and fused_model.obstacle(model, model.device) is None:
            self._fused = fused_model.fuse(model)
        if self._fused is None:
            yield
            return
        self._fusing += 1  # one decoding may go on inside another
        self._fused.switch(True)
        try:
            yield
        finally:
            self._fusing -= 1
            self._fused.switch(self._fusing > 0)

    def _take_over_cache(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook: swaps an empty cache of transformers for ours and refuses what cannot work."""
        if len(args) > self._parameters.index(self.cache_keyword):
            kwargs = dict(zip(self._parameters, args, strict=False)) | kwargs
            args = ()
        for name in {self.cache_keyword, "past_key_values"}:
            cache = kwargs.get(name)
            if cache is None:
                continue
            if not isinstance(cache, AttachedCache):
                if kwargs.get("use_cache") is False:
                    continue
                # A caller that keeps the cache it passed in goes on with the one that took its place.
                if (ours := cache.__dict__.get(_REPLACED_BY)) is not None and ours.attachment is self:
                    kwargs[name] = ours
                    continue
                if cache.get_seq_length() > 0:
                    raise ValueError(
                        f"a {type(cache).__name__} with {cache.get_seq_length()} tokens was filled without "
                        f"{self.plan.method}; start from an empty cache while a method is attached"
                    )
                if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
                    raise ValueError(
                        f"a {type(cache).__name__} asks for a storage of its own, which {self.plan.method} replaces; "
                        "leave cache_implementation unset while a method is attached"
                    )
                ours = self.new_cache()
                cache.__dict__[_REPLACED_BY] = ours
                cache = kwargs[name] = ours
            elif cache.attachment is not self:
                raise ValueError("this cache was made by another attachment; start from an empty cache")
            self._refuse_padding(cache, kwargs.get("attention_mask"))
        return args, kwargs

    def _refuse_padding(self, cache: AttachedCache, mask: torch.Tensor | None) -> None:
        prompt = cache.get_seq_length() == 0
        if prompt and mask is not None and self.plan.cluster.capability.stage != "none" and not bool(mask.all()):
            raise ValueError(
                f"{self.plan.method} would score padding tokens: pass prompts one by one, or several of the same "
                "length, or use kvfactory.generate, which takes a list of prompts of any lengths"
            )

    def remove(self) -> None:
        """Takes the method off the model; its outputs are stock again, bit for bit."""
        self._hook.remove()
        self.graph_engines.clear()
        if self._fused is not None:
            self._fused.remove()
        del self.model.__dict__["generate"]
        for slot in self.all_slots:
            del slot.module.kv_slot
        self.model.set_attn_implementation(self._stock_attention)


def get_attachment(model: nn.Module) -> Attachment | None:
    """The method attached to `model`, if any."""
    return model.__dict__.get(_ATTACHMENT)


def attach(
    model: PreTrainedModel, method: str, *, attn_implementation: str | None = None, fuse: bool = True, **options: Any
) -> Attachment:
    """Attaches a method to a loaded model; `model.generate` and `kvfactory.generate` then use it.

    Args:
        method: name in any case, see `kvfactory.list_methods()`.
        attn_implementation: eager, sdpa, flash_attention_2 or flash_attention_3; default what the model was loaded
            with.
        fuse: in half precision on CUDA, kvfactory's own decoding runs the model's norms, activations and rotations
            as fused kernels, which may change the last bit of a result.
        options: `max_capacity_prompt`, `kv_cache_granularity`, `gqa_score_agg`, `preset`, `seed` and the method's own
            settings, as in `kvfactory.plan.make_plan`.

    Raises:
        ValueError: bad options, a combination that cannot work, a model off the attention interface, a model that
            already has a method.
    """
    if get_attachment(model) is not None:
        raise ValueError(
            f"{get_attachment(model).plan.method} is attached to this model already; call detach(model) first"
        )
    backend = attn_implementation or model.config._attn_implementation
    if backend == ATTENTION_NAME:
        raise ValueError(
            "this model shares its config object with a model that has a method attached; build each model from a "
            "config of its own (copy.deepcopy(config))"
        )
    return attach_plan(model, make_plan(method, attn_implementation=backend, **options), backend, fuse)


def attach_plan(model: PreTrainedModel, plan: Plan, backend: str, fuse: bool = True) -> Attachment:
    """Attaches a plan that is resolved already; see `attach`."""
    check_combination(
        plan.method,
        plan.cluster.capability,
        backend=backend,
        granularity=plan.granularity,
        gqa_score_agg=plan.gqa_score_agg,
    )
    attachment = Attachment(model, plan, backend, fuse)
    model.__dict__[_ATTACHMENT] = attachment
    _attached.add(model)
    return attachment


def detach(model: PreTrainedModel) -> None:
    """Takes the method off `model`.

    Raises:
        ValueError: no method is attached.
    """
    attachment = get_attachment(model)
    if attachment is None:
        raise ValueError("no method is attached to this model")
    attachment.remove()
    del model.__dict__[_ATTACHMENT]
    _attached.discard(model)


def _causal_lm(family: str) -> type[PreTrainedModel]:
    import transformers

    names = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "mixtral": "Mixtral",
        "phi3": "Phi3",
    }
    if family not in names:
        raise ValueError(f"unknown model family {family!r}; known: {', '.join(FAMILIES)}")
    return getattr(transformers, f"{names[family]}ForCausalLM")


def replace_model(method: str, families: list[str] | tuple[str, ...] | None = None, **options: Any) -> None:
    """Every model of `families` (default: all) built from now on carries `method`, until `restore()`.

    Takes the options of `attach`, which are checked at once.
    """
    make_plan(method, **{k: v for k, v in options.items() if k not in ("attn_implementation", "fuse")})
    for cls in [_causal_lm(family) for family in families or FAMILIES]:
        stock = _wrapped_inits.setdefault(cls, cls.__init__)

        @functools.wraps(stock)
        def init(self: PreTrainedModel, *args: Any, _stock: Callable[..., None] = stock, **kwargs: Any) -> None:
            _stock(self, *args, **kwargs)
            attach(self, method, **options)

        cls.__init__ = init


def replace_llama(method: str, **options: Any) -> None:
    """Llama models built from now on carry `method`; the original project's call, made before loading."""
    replace_model(method, ["llama"], **options)


def replace_mistral(method: str, **options: Any) -> None:
    """Mistral models built from now on carry `method`; the original project's call, made before loading."""
    replace_model(method, ["mistral"], **options)


def restore() -> None:
    """Undoes every `replace_*` and detaches every live model."""
    for cls, stock in _wrapped_inits.items():
        cls.__init__ = stock
    _wrapped_inits.clear()
    for model in list(_attached):
        detach(model)
