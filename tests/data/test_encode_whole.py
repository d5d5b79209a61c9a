"""Prompts that are never cut, with the first words of the answer behind the chat wrap."""

from __future__ import annotations

import pytest

from kvfactory.data.encode import PromptEncoder
from kvfactory.data.tasks import Task

TASK = Task("vt", "recall", "en", 30, "vt")
HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def ids(tokenizer, text, special=False):
    return list(tokenizer(text, add_special_tokens=special).input_ids)


def test_the_answer_prefix_follows_the_assistant_header(qwen_tokenizer, config):
    encoder = PromptEncoder(qwen_tokenizer, config("qwen2"), chat_template="auto")
    prompt = encoder.encode_whole(TASK, "Who?", 30, " Answer: It is")
    assert prompt.input_ids.tolist() == ids(qwen_tokenizer, f"{HEAD}Who?{TAIL} Answer: It is")
    assert prompt.prompt_tokens == prompt.prompt_tokens_raw == len(prompt.input_ids)
    assert not prompt.truncated and prompt.question_seen
    assert prompt.head_text.startswith(HEAD) and prompt.tail_text.endswith("</think>\n\n Answer: It is")


def test_a_prompt_without_chat_keeps_its_prefix_and_its_one_bos(llama3_tokenizer, config):
    for choice in ("none", "tokenizer"):
        encoder = PromptEncoder(llama3_tokenizer, config(), chat_template=choice)
        prompt = encoder.encode_whole(TASK, "Who?", 30, " It")
        assert prompt.input_ids.tolist().count(llama3_tokenizer.bos_token_id) == 1
    bare = PromptEncoder(llama3_tokenizer, config(), chat_template="none").encode_whole(TASK, "Who?", 30, " It")
    assert bare.input_ids.tolist() == ids(llama3_tokenizer, "Who? It", special=True)


def test_auto_is_bare_without_a_template(base_tokenizer, config):
    auto, none = (
        PromptEncoder(base_tokenizer, config(), chat_template=choice).encode_whole(TASK, "Who?", 30).input_ids.tolist()
        for choice in ("auto", "none")
    )
    assert auto == none == ids(base_tokenizer, "Who?", special=True)


def test_what_is_counted_is_what_is_encoded(qwen_tokenizer, llama3_tokenizer, base_tokenizer, make_tokenizer, config):
    # a merge over the joint of template and prefix, so that counting the pieces would give one more
    merging = make_tokenizer(["<e>"], eos="<e>", merges=[(":", "Ġ")], template="{{ messages[0]['content'] }}:")
    for tokenizer in (qwen_tokenizer, llama3_tokenizer, base_tokenizer, merging):
        for text, prefix in (("Who was it?\n", " It"), ("a \ud800 ü", ""), ("x", " It was: ")):
            counting = PromptEncoder(tokenizer, None, chat_template="auto")  # no config: nothing is generated
            running = PromptEncoder(tokenizer, config(), chat_template="auto")
            assert counting.count_whole(TASK, text, prefix) == running.encode_whole(TASK, text, 9, prefix).prompt_tokens
    counted = PromptEncoder(merging, None, chat_template="auto").count_whole(TASK, "x", " It")
    assert counted == len("x: It") - 1


def test_a_prompt_is_refused_and_never_cut(base_tokenizer, config):
    encoder = PromptEncoder(base_tokenizer, config(window=50), chat_template="none")
    text = "a" * 35  # and BOS
    assert encoder.encode_whole(TASK, text, 10, "bcde").prompt_tokens == 40
    for new, prefix in ((11, "bcde"), (10, "bcdef")):
        with pytest.raises(ValueError, match=rf"a prompt of {36 + len(prefix)} tokens and {new} new .* window of 50"):
            encoder.encode_whole(TASK, text, new, prefix)
    assert encoder.count_whole(TASK, text, "b" * 100) == 136  # counting refuses nothing
    limited = PromptEncoder(base_tokenizer, config(), chat_template="none", max_input_length=10)
    assert limited.encode_whole(TASK, text, 10).prompt_tokens == 36


def test_a_thinking_block_has_to_fit_as_well(qwen_tokenizer, config):
    encoder = PromptEncoder(qwen_tokenizer, config("qwen2", window=200), chat_template="auto", thinking=100)
    assert encoder.encode_whole(TASK, "", 20).prompt_tokens <= 80
    with pytest.raises(ValueError, match="and 120 new ones do not fit the model's window of 200"):
        encoder.encode_whole(TASK, "a" * 60, 20)


def test_template_at_the_end_ends_where_an_answer_begins(qwen_tokenizer, config):
    encoder = PromptEncoder(qwen_tokenizer, config("qwen2"), chat_template="auto")
    assert encoder.encode_whole(TASK, "Who?", 30).template_tail_tokens == len(ids(qwen_tokenizer, TAIL))
    assert encoder.encode_whole(TASK, "Who?", 30, " It").template_tail_tokens == 0
    bare = PromptEncoder(qwen_tokenizer, config("qwen2"), chat_template="none")
    assert bare.encode_whole(TASK, "Who?", 30).template_tail_tokens == 0
