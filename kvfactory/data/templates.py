"""Chat wrapping, decided once per run from the model's config and its tokenizer, never from a path.

Sources: THUDM/LongBench, LongBench/pred.py (Llama-2 string, no-chat list); KVCache-Factory @c97f9d7, run_longbench.py
(Llama-3 string, and everything of protocol factory). Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

PROTOCOLS = ("longbench", "factory")
CHAT_TEMPLATES = ("longbench", "tokenizer", "none")  # LongBench's choices
OWN_CHAT_TEMPLATES = ("auto", "tokenizer", "none")  # those of benchmarks that know no strings of their own
DEFAULT_THINKING_TOKENS = 4096

LLAMA2 = ("[INST]", "[/INST]")
LLAMA2_FACTORY = ("[INST] ", " [/INST]")
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
)
_HEADER_TOKEN = "<|start_header_id|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROBE = "kvfactory-probe-text"


@dataclass(frozen=True)
class ChatWrap:
    """How prompts of one run are wrapped.

    Attributes:
        kind: "bare", "llama2", "llama3" or "tokenizer" (the tokenizer's own template).
        render: text -> wrapped text.
        head, tail: what stands before and after the prompt, as rendered around a probe text.
        add_special_tokens: whether the tokenizer adds its BOS to the wrapped text (false where the wrap brings one).
        before_cut: wrapped before the prompt is cut in the middle (protocol factory, Llama-2).
        every_dataset: the no-chat list is ignored.
        thinking: the template has a thinking block, which `decode` separates from the answer.
        opens_thinking: the wrapped prompt ends inside a thinking block.
    """

    kind: str
    render: Callable[[str], str]
    head: str = ""
    tail: str = ""
    add_special_tokens: bool = True
    before_cut: bool = False
    every_dataset: bool = False
    thinking: bool = False
    opens_thinking: bool = False


BARE = ChatWrap("bare", lambda text: text)


def parse_thinking(value: str | int) -> int:
    """Extra tokens for the thinking block: "off" 0, "on" `DEFAULT_THINKING_TOKENS`, a number that many."""
    text = str(value).strip().lower()
    if text in ("off", "on"):
        return 0 if text == "off" else DEFAULT_THINKING_TOKENS
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ValueError(f"--thinking {value!r} is unknown; accepted: off, on, or a positive number of tokens.")


def chat_template_text(tokenizer) -> str | None:
    """The tokenizer's chat template ("default" where it has several by name); None for a base model."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def template_sha256(tokenizer) -> str | None:
    """SHA-256 of the chat template's text; None without one."""
    template = chat_template_text(tokenizer)
    return None if template is None else hashlib.sha256(template.encode("utf-8")).hexdigest()


def model_family(model_config, tokenizer) -> str:
    """ "llama2", "llama3", "mistral", or the config's model_type for all others.

    Many models share Llama's model_type (SmolLM2, Vicuna, Yi ...), so the tokenizer decides: Llama-3's header token
    makes it "llama3"; a template that uses `[INST]`, or no template with BOS `<s>` and SentencePiece's byte tokens
    (a base model), makes it "llama2".
    """
    model_type = str(getattr(model_config, "model_type", "") or "unknown")
    if model_type != "llama":
        return model_type
    vocabulary = tokenizer.get_vocab()
    if _HEADER_TOKEN in vocabulary:
        return "llama3"
    template = chat_template_text(tokenizer)
    if template is None:
        return "llama2" if tokenizer.bos_token == "<s>" and "<0x0A>" in vocabulary else model_type
    return "llama2" if "[INST]" in template else model_type


def choose_wrap(
    model_config,
    tokenizer,
    protocol: str = "longbench",
    chat_template: str = "longbench",
    thinking: str | int = "off",
    force_chat: bool = False,
) -> ChatWrap:
    """The wrap of a run; what it does to single datasets follows from `Task.chat` and `ChatWrap.every_dataset`.

    Args:
        protocol: "factory" is the original's behaviour: Llama-2 and Llama-3 wrapped whether or not the checkpoint is
            an instruct model, everything else bare.
        chat_template: "longbench": the benchmark's strings (Llama-2, Llama-3), Mistral bare, every other instruct
            model through its tokenizer's template; "tokenizer": the tokenizer's template for all; "none": bare.
            "auto": "tokenizer" where the tokenizer has a template. A checkpoint without one is a base model and stays
            bare under "longbench" and "auto".
        force_chat: wrap the few-shot and code sets too.

    Raises:
        ValueError: unknown or contradicting choices, a template asked for that is not there, or a thinking mode that
            the template does not have.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"--protocol {protocol!r} is unknown; accepted: {', '.join(PROTOCOLS)}.")
    known = tuple(dict.fromkeys((*CHAT_TEMPLATES, *OWN_CHAT_TEMPLATES)))
    if chat_template not in known:
        raise ValueError(f"--chat_template {chat_template!r} is unknown; accepted: {', '.join(known)}.")
    budget = parse_thinking(thinking)
    if protocol == "factory":
        _refuse_with_factory(chat_template, thinking, budget, force_chat)
        return _factory_wrap(model_family(model_config, tokenizer))
    template = chat_template_text(tokenizer)
    if chat_template == "tokenizer" and template is None:
        raise ValueError("--chat_template tokenizer: this tokenizer has no chat template; leave it out, or use none.")
    wrap = BARE
    if template is not None and chat_template != "none":
        family = model_family(model_config, tokenizer)
        if chat_template == "longbench" and family == "mistral":
            pass
        elif chat_template == "longbench" and family == "llama2":
            wrap = _fixed("llama2", LLAMA2, force_chat=force_chat)
        elif chat_template == "longbench" and family == "llama3" and _HEADER_TOKEN in template:
            wrap = _fixed("llama3", LLAMA3, add_special_tokens=False, force_chat=force_chat)
        else:
            wrap = _from_tokenizer(tokenizer, template, thinking, budget, force_chat)
    if budget and not wrap.thinking:
        raise ValueError(
            f"--thinking {thinking}: the prompt form in use ({wrap.kind}) has no thinking block; use --thinking off "
            "or a model whose chat template has one."
        )
    return wrap


def _refuse_with_factory(chat_template: str, thinking: str | int, budget: int, force_chat: bool) -> None:
    given = (
        f"--chat_template {chat_template}" * (chat_template != "longbench")
        or f"--thinking {thinking}" * bool(budget)
        or "--force_chat" * force_chat
    )
    if given:
        raise ValueError(f"{given} cannot be combined with --protocol factory, which sets the wrap itself.")


def _factory_wrap(family: str) -> ChatWrap:
    if family == "llama2":
        return _fixed("llama2", LLAMA2_FACTORY, before_cut=True, force_chat=True)
    if family == "llama3":
        return _fixed("llama3", LLAMA3, add_special_tokens=False)
    return BARE


def _fixed(
    kind: str,
    strings: tuple[str, str],
    add_special_tokens: bool = True,
    before_cut: bool = False,
    force_chat: bool = False,
) -> ChatWrap:
    head, tail = strings
    return ChatWrap(
        kind, lambda text: head + text + tail, head, tail, add_special_tokens, before_cut, every_dataset=force_chat
    )


def _from_tokenizer(tokenizer, template: str, thinking: str | int, budget: int, force_chat: bool) -> ChatWrap:
    has_switch = "enable_thinking" in template
    extra = {"enable_thinking": budget > 0} if has_switch else {}

    def render(text: str) -> str:
        # tokenize=False gives a string in transformers 4 and 5 alike; with True, 5 returns a dict by default.
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, **extra
        )

    head, found, tail = render(_PROBE).partition(_PROBE)
    if not found:
        raise ValueError("the tokenizer's chat template drops the user message; use --chat_template none.")
    opens = THINK_OPEN in tail and THINK_CLOSE not in tail
    if opens and not budget:
        raise ValueError(
            f"--thinking {thinking}: this model's chat template always opens a thinking block; use --thinking on or a "
            "number of tokens."
        )
    # Models that think bring the end mark as one token; without it the answer cannot be told from the block.
    has_block = (has_switch or opens) and THINK_CLOSE in tokenizer.get_vocab()
    return ChatWrap(
        "tokenizer",
        render,
        head,
        tail,
        add_special_tokens=False,
        every_dataset=force_chat,
        thinking=has_block,
        opens_thinking=opens,
    )
