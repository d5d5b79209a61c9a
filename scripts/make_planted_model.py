"""Write the planted-retrieval model: `python scripts/make_planted_model.py [--out tests/data_planted] [--check]`.

A Llama of two layers, 4 query heads and 2 kv heads whose weights are set by hand, so that it is known which head
retrieves. Layer 0, head 1 attends to the previous token and writes that token's code beside the current one. Layer 1,
head 2 looks for the token whose predecessor carries the code of the current one and copies it into the output, so the
model goes on as the text did after the same symbol: `k a b ... ? k` is continued with `a b`. A symbol that has not
occurred sends the head to the first token, and the model ends the text. All other heads are noise.

The output depends on nothing but this file: weights are drawn by Python's own generator and stored as float16, whose
values the model computes with in float32. `--check` writes nothing and ends with 1 when the folder differs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "data_planted"
SEED = 20_240_817

BEGIN, END, QUERY = 0, 1, 2
FILLERS = range(3, 16)
SYMBOLS = range(16, 80)  # tokens with a code: what keys and values are made of
VOCABULARY = 80

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 64
ROPE_THETA = 1e8
PREVIOUS_TOKEN_HEAD = (0, 1)
PLANTED_HEAD = (1, 2)

# Channels of the residual stream.
CONSTANT, FIRST, ENDING = 0, 1, 98
CODE, PREVIOUS, OUTPUT = range(2, 34), range(34, 66), range(66, 98)
OTHER = range(99, 128)  # one channel for each token without a code
CODE_SIZE = 32

# The same large constant in every token keeps RMSNorm's divisor within 6 % whatever the heads write.
CONSTANT_VALUE = 16.0
TOKEN_NORM = math.sqrt(CONSTANT_VALUE**2 + CODE_SIZE)
RMS = TOKEN_NORM / math.sqrt(HIDDEN)

# Logits after scaling: a match beats the first token by 12, and the first token beats 500 others by a factor of 300.
MATCH_LOGIT, FIRST_LOGIT = 24.0, 12.0
# Rotary pairs that turn by less than 0.05 rad in 500 tokens carry content; the 12 fastest carry the distance.
SLOW_PAIRS, SINK_PAIR = range(16, 32), 15
FAST_PAIRS = range(12)
PAIR_LOGIT = 20.0  # of each fast pair at distance 1; distances 0 and 2 lose 13.8, all others more than 45
ENDING_WEIGHT = 0.4
NOISE = 0.088  # gives logits of about unit spread
QUIET = 0.02  # what noise heads read and write


def codes() -> torch.Tensor:
    """(64, 32) codes of +-1: any two are orthogonal or opposite (Hadamard, and its negative)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < CODE_SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.cat([matrix, -matrix])


def _noise(draw: random.Random, rows: int, columns: int, spread: float) -> torch.Tensor:
    return torch.tensor([[draw.gauss(0.0, spread) for _ in range(columns)] for _ in range(rows)])


def _head(index: int) -> slice:
    return slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)


def _slow_channels() -> list[int]:
    """The 32 channels of a head that hardly rotate: both members of each slow pair."""
    return [*SLOW_PAIRS, *(i + HEAD_DIM // 2 for i in SLOW_PAIRS)]


def embeddings() -> torch.Tensor:
    """(80, 128): the constant, and the token's code or a channel of its own, all of the same norm."""
    table = torch.zeros(VOCABULARY, HIDDEN)
    table[:, CONSTANT] = CONSTANT_VALUE
    table[BEGIN, FIRST] = math.sqrt(CODE_SIZE)
    for channel, token in zip(OTHER, (END, QUERY, *FILLERS), strict=False):
        table[token, channel] = math.sqrt(CODE_SIZE)
    table[SYMBOLS.start :, CODE.start : CODE.stop] = codes()
    return table


def _plant_previous_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, head: int) -> None:
    """Keys are a constant vector; the query is the same vector turned so that it meets the key one step back."""
    kv = head // (HEADS // KV_HEADS)
    q[_head(head)], k[_head(kv)], v[_head(kv)], o[:, _head(head)] = 0, 0, 0, 0
    size = math.sqrt(PAIR_LOGIT * math.sqrt(HEAD_DIM)) * RMS / CONSTANT_VALUE
    for pair in FAST_PAIRS:
        frequency = ROPE_THETA ** (-2 * pair / HEAD_DIM)
        k[kv * HEAD_DIM + pair, CONSTANT] = size
        q[head * HEAD_DIM + pair, CONSTANT] = size * math.cos(frequency)
        q[head * HEAD_DIM + pair + HEAD_DIM // 2, CONSTANT] = -size * math.sin(frequency)
    for i in range(CODE_SIZE):
        v[kv * HEAD_DIM + i, CODE[i]] = 1
        o[PREVIOUS[i], head * HEAD_DIM + i] = RMS


def _plant_retrieval(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, head: int) -> None:
    """The query is the current token's code, the key the predecessor's; the value is the token itself."""
    kv = head // (HEADS // KV_HEADS)
    q[_head(head)], k[_head(kv)], v[_head(kv)], o[:, _head(head)] = 0, 0, 0, 0
    size = math.sqrt(MATCH_LOGIT * math.sqrt(HEAD_DIM) / CODE_SIZE) * RMS
    for i, channel in enumerate(_slow_channels()):
        q[head * HEAD_DIM + channel, CODE[i]] = size
        k[kv * HEAD_DIM + channel, PREVIOUS[i]] = size
    sink = FIRST_LOGIT * math.sqrt(HEAD_DIM) * RMS**2 / (CONSTANT_VALUE * math.sqrt(CODE_SIZE))
    q[head * HEAD_DIM + SINK_PAIR, CONSTANT] = sink / 4
    k[kv * HEAD_DIM + SINK_PAIR, FIRST] = 4
    for i in range(CODE_SIZE):
        v[kv * HEAD_DIM + i, CODE[i]] = 1
        o[OUTPUT[i], head * HEAD_DIM + i] = RMS
    v[kv * HEAD_DIM + CODE_SIZE, CONSTANT] = ENDING_WEIGHT
    o[ENDING, head * HEAD_DIM + CODE_SIZE] = 1


def weights() -> dict[str, torch.Tensor]:
    """The state dict of a LlamaForCausalLM, float16."""
    draw = random.Random(SEED)
    table = embeddings()
    output = torch.zeros(VOCABULARY, HIDDEN)
    output[SYMBOLS.start :, OUTPUT.start : OUTPUT.stop] = codes()
    output[END, ENDING] = 1
    found = {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": output}
    plants = {PREVIOUS_TOKEN_HEAD[0]: _plant_previous_token, PLANTED_HEAD[0]: _plant_retrieval}
    heads = dict((PREVIOUS_TOKEN_HEAD, PLANTED_HEAD))
    for layer in range(2):
        q = _noise(draw, HEADS * HEAD_DIM, HIDDEN, NOISE)
        k = _noise(draw, KV_HEADS * HEAD_DIM, HIDDEN, NOISE)
        v = _noise(draw, KV_HEADS * HEAD_DIM, HIDDEN, QUIET)
        o = _noise(draw, HIDDEN, HEADS * HEAD_DIM, QUIET)
        plants[layer](q, k, v, o, heads[layer])
        # Noise may reach the output channels only: what the planted heads read stays as it was made.
        quiet = [h for h in range(HEADS) if h != heads[layer]]
        for head in quiet:
            o[: OUTPUT.start, _head(head)] = 0
        prefix = f"model.layers.{layer}."
        for name, matrix in zip("qkvo", (q, k, v, o), strict=True):
            found[f"{prefix}self_attn.{name}_proj.weight"] = matrix
        for name in ("gate", "up"):
            found[f"{prefix}mlp.{name}_proj.weight"] = torch.zeros(8, HIDDEN)
        found[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN, 8)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return {name: matrix.half().contiguous() for name, matrix in found.items()}


def config() -> dict[str, object]:
    """config.json, in the fields that every supported transformers reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": None,
        "torch_dtype": "float16",
    }


def files() -> dict[str, bytes]:
    """The folder's content."""
    generation = {"bos_token_id": BEGIN, "eos_token_id": END}
    return {
        "config.json": json.dumps(config(), indent=2).encode() + b"\n",
        "generation_config.json": json.dumps(generation, indent=2).encode() + b"\n",
        "model.safetensors": save(weights(), metadata={"format": "pt"}),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; the exit code."""
    parser = argparse.ArgumentParser(description="Write the planted-retrieval model.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the checkpoint")
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if the folder is stale")
    options = parser.parse_args(arguments)
    made = files()
    if options.check:
        stale = [n for n, data in made.items() if not (p := options.out / n).is_file() or p.read_bytes() != data]
        for name in stale:
            print(f"{options.out / name} is not what the script makes; run scripts/make_planted_model.py",
                  file=sys.stderr)  # fmt: skip
        return 1 if stale else 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        (options.out / name).write_bytes(data)
    print(f"{len(made)} files, {sum(map(len, made.values()))} bytes in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
