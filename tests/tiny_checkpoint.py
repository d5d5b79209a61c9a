"""A tiny random Llama with a byte tokenizer, saved as a checkpoint, and LongBench records to run it on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "river stone lamp field north paper glass winter bridge music orange silver garden letter window".split()


def save_checkpoint(folder: Path, chat: bool = True, layers: int = 3, **changes: Any) -> Path:
    """Writes the checkpoint into `folder`: 4 query and 2 kv heads, window 2,048, no pad token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    # Written by hand, since each version of transformers puts its own class name here.
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    about |= {"chat_template": TEMPLATE} if chat else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    shape = dict(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=None,
        initializer_range=0.3,  # peaked enough that different caches give different tokens
    )
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**(shape | changes))).save_pretrained(folder)
    return folder


def make_record(dataset: str, number: int, length: int = 40) -> dict:
    """A record of about `length` words, different for every (dataset, number)."""
    draw = random.Random(f"{dataset}{number}")
    text = " ".join(draw.choice(WORDS) for _ in range(length))
    classes = ["stone", "lamp", "field"] if dataset.startswith("trec") else None
    special = {"passage_retrieval_en": "Paragraph 7", "passage_count": "7"}
    return {
        "input": f"Which word follows {draw.choice(WORDS)}?",
        "context": text,
        "answers": [special.get(dataset) or draw.choice(classes or WORDS)],
        "length": length,
        "dataset": dataset,
        "language": "en",
        "all_classes": classes,
        "_id": f"{dataset}-{number}",
    }


def write_records(folder: Path, dataset: str, records: list[dict]) -> Path:
    """Writes {dataset}.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{dataset}.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return file


def write_dataset(folder: Path, dataset: str, count: int = 4, length: int = 40) -> Path:
    """Writes {dataset}.jsonl with `count` records."""
    return write_records(folder, dataset, [make_record(dataset, i, length) for i in range(count)])
