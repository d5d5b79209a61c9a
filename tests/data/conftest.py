"""Small real tokenizers (built here, nothing downloaded) and a LongBench record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LLAMA3_TEMPLATE = (  # like the 3.1 checkpoints': a header block of its own, and the content trimmed
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2_TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
QWEN_TEMPLATE = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS_THINKS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


def byte_tokenizer(
    specials=(), plain=(), bos=None, eos=None, template=None, merges=(), add_bos=True, **more
) -> PreTrainedTokenizerFast:
    """One token per byte, plus `merges`, `specials` and unspecial added tokens; BOS in front when there is one."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    if bos and add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, **more)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def base_tokenizer():
    """A base model's tokenizer: BOS, no chat template."""
    return byte_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>")


@pytest.fixture
def llama2_tokenizer():
    return byte_tokenizer(["<s>", "</s>"], ["<0x0A>"], bos="<s>", eos="</s>", template=LLAMA2_TEMPLATE)


@pytest.fixture
def llama3_tokenizer():
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_tokenizer(names, bos=names[0], eos="<|eot_id|>", template=LLAMA3_TEMPLATE)


@pytest.fixture
def qwen_tokenizer():
    """No BOS is added, thinking marks are ordinary tokens, and the template can switch thinking off."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return byte_tokenizer(names, ["<think>", "</think>"], eos="<|im_end|>", template=QWEN_TEMPLATE)


@pytest.fixture
def thinker_tokenizer():
    """A model that always thinks: its template ends inside the block and has no switch."""
    names = ["<|im_start|>", "<|im_end|>"]
    return byte_tokenizer(names, ["<think>", "</think>"], eos="<|im_end|>", template=ALWAYS_THINKS_TEMPLATE)


@pytest.fixture
def make_tokenizer():
    return byte_tokenizer


@pytest.fixture
def config():
    """config(model_type, window, **more) -> the attributes that are read of a model's config."""

    def build(model_type="llama", window=8192, **more):
        return SimpleNamespace(model_type=model_type, max_position_embeddings=window, **more)

    return build


@pytest.fixture
def record():
    return {
        "input": "Who wrote it?",
        "context": "A text with {braces} and {input}.",
        "answers": ["Ann"],
        "length": 9,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    }
