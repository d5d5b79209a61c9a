"""Which wrap a model gets: decided from config and tokenizer."""

from __future__ import annotations

import pytest

from kvfactory.data.templates import LLAMA3, choose_wrap, model_family, parse_thinking, template_sha256

LLAMA3_TEXT = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nP <|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
QWEN_HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


def test_families(config, llama2_tokenizer, llama3_tokenizer, qwen_tokenizer, base_tokenizer, make_tokenizer):
    llama = config("llama")
    assert model_family(llama, llama3_tokenizer) == "llama3"
    assert model_family(llama, llama2_tokenizer) == "llama2"
    assert model_family(llama, qwen_tokenizer) == "llama"  # SmolLM2's case: Llama's architecture, another template
    assert model_family(llama, base_tokenizer) == "llama"  # BOS <s> alone says nothing
    assert model_family(llama, make_tokenizer(["<s>"], ["<0x0A>"], bos="<s>")) == "llama2"
    assert model_family(config("mistral"), llama2_tokenizer) == "mistral"
    assert model_family(config("qwen3"), qwen_tokenizer) == "qwen3"


def test_the_path_is_never_read(config, base_tokenizer, llama3_tokenizer):
    base_tokenizer.name_or_path = "models/llama3-instruct"
    assert choose_wrap(config("llama", _name_or_path="meta/llama-3"), base_tokenizer).kind == "bare"
    llama3_tokenizer.name_or_path = "models/mistral"
    assert choose_wrap(config("llama", _name_or_path="qwen"), llama3_tokenizer).kind == "llama3"


def test_longbench_wraps(config, llama2_tokenizer, llama3_tokenizer, qwen_tokenizer, base_tokenizer):
    wrap = choose_wrap(config("llama"), llama2_tokenizer)
    assert (wrap.render("P "), wrap.add_special_tokens) == ("[INST]P [/INST]", True)
    wrap = choose_wrap(config("llama"), llama3_tokenizer)
    assert (wrap.render("P "), wrap.add_special_tokens) == (LLAMA3_TEXT, False)
    assert choose_wrap(config("mistral"), llama2_tokenizer).render("P ") == "P "
    assert choose_wrap(config("llama"), base_tokenizer).render("P ") == "P "
    for model_type in ("qwen2", "llama", "granite"):  # every other instruct model: its own template
        wrap = choose_wrap(config(model_type), qwen_tokenizer)
        assert wrap.kind == "tokenizer"
        assert wrap.render("P ") == (QWEN_HEAD + "P <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert (wrap.head, wrap.add_special_tokens) == (QWEN_HEAD, False)
        assert wrap.tail == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_llama3_base_model_and_a_foreign_finetune(config, llama3_tokenizer, qwen_tokenizer):
    chatml = qwen_tokenizer.chat_template
    llama3_tokenizer.chat_template = None
    assert choose_wrap(config("llama"), llama3_tokenizer).kind == "bare"
    llama3_tokenizer.chat_template = chatml
    assert choose_wrap(config("llama"), llama3_tokenizer).kind == "tokenizer"


def test_tokenizer_and_none(config, llama2_tokenizer, llama3_tokenizer, base_tokenizer):
    wrap = choose_wrap(config("mistral"), llama2_tokenizer, chat_template="tokenizer")
    assert wrap.render("P ") == "<s>[INST] P [/INST]"
    assert "Today: 26 Jul 2024" in choose_wrap(config("llama"), llama3_tokenizer, chat_template="tokenizer").head
    assert choose_wrap(config("llama"), llama3_tokenizer, chat_template="none").kind == "bare"
    with pytest.raises(ValueError, match="--chat_template tokenizer: this tokenizer has no chat template"):
        choose_wrap(config("llama"), base_tokenizer, chat_template="tokenizer")
    llama3_tokenizer.chat_template = "nothing of the message"
    with pytest.raises(ValueError, match="drops the user message"):
        choose_wrap(config("llama"), llama3_tokenizer, chat_template="tokenizer")


def test_several_templates_by_name(config, qwen_tokenizer):
    qwen_tokenizer.chat_template = {"default": qwen_tokenizer.chat_template, "tool_use": "x"}
    assert choose_wrap(config("qwen2"), qwen_tokenizer).head == QWEN_HEAD
    assert template_sha256(qwen_tokenizer) is not None


def test_factory_wraps(config, llama2_tokenizer, llama3_tokenizer, qwen_tokenizer):
    wrap = choose_wrap(config("llama"), llama2_tokenizer, "factory")
    assert wrap.render("P ") == "[INST] P  [/INST]"
    assert (wrap.before_cut, wrap.every_dataset, wrap.add_special_tokens) == (True, True, True)
    llama3_tokenizer.chat_template = None  # the original did not tell base from instruct
    wrap = choose_wrap(config("llama"), llama3_tokenizer, "factory")
    assert (wrap.render("P "), wrap.head, wrap.tail) == (LLAMA3_TEXT, *LLAMA3)
    assert (wrap.before_cut, wrap.every_dataset, wrap.add_special_tokens) == (False, False, False)
    assert choose_wrap(config("mistral"), llama2_tokenizer, "factory").kind == "bare"
    assert choose_wrap(config("qwen3"), qwen_tokenizer, "factory").kind == "bare"
    for more, says in (
        ({"chat_template": "none"}, "--chat_template none"),
        ({"thinking": "on"}, "--thinking on"),
        ({"force_chat": True}, "--force_chat"),
    ):
        with pytest.raises(ValueError, match=f"^{says} cannot be combined with --protocol factory"):
            choose_wrap(config("llama"), llama3_tokenizer, "factory", **more)


def test_thinking(config, qwen_tokenizer, thinker_tokenizer, llama3_tokenizer, make_tokenizer):
    off = choose_wrap(config("qwen3"), qwen_tokenizer)
    on = choose_wrap(config("qwen3"), qwen_tokenizer, thinking="on")
    assert off.tail.endswith("<think>\n\n</think>\n\n")
    assert on.tail == "<|im_end|>\n<|im_start|>assistant\n"
    assert on.thinking and not on.opens_thinking
    always = choose_wrap(config("qwen3"), thinker_tokenizer, thinking="256")
    assert always.thinking and always.opens_thinking
    with pytest.raises(ValueError, match="--thinking off: .*always opens a thinking block"):
        choose_wrap(config("qwen3"), thinker_tokenizer)
    for tokenizer, more in (
        (llama3_tokenizer, {}),
        (llama3_tokenizer, {"chat_template": "tokenizer"}),
        (qwen_tokenizer, {"chat_template": "none"}),
        (make_tokenizer(["<|im_start|>"], template=qwen_tokenizer.chat_template), {}),  # no end mark to look for
    ):
        with pytest.raises(ValueError, match="--thinking on: the prompt form in use .* has no thinking block"):
            choose_wrap(config("llama"), tokenizer, thinking="on", **more)


def test_thinking_values():
    assert [parse_thinking(v) for v in ("off", "ON", 512, "512")] == [0, 4096, 512, 512]
    for bad in ("0", -1, "much", "1.5", "\u0665", ""):
        with pytest.raises(ValueError, match="--thinking .* off, on, or a positive number"):
            parse_thinking(bad)


def test_unknown_choices(config, base_tokenizer):
    with pytest.raises(ValueError, match="--protocol 'official' .*longbench, factory"):
        choose_wrap(config(), base_tokenizer, "official")
    with pytest.raises(ValueError, match="--chat_template 'own' .*longbench, tokenizer, none, auto"):
        choose_wrap(config(), base_tokenizer, chat_template="own")
