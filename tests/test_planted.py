"""The planted-retrieval model: it does what it was made for, and separates methods the way it has to."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from planted import FOLDER, PLANTED_HEAD, SCRIPT, load_script, make_prompt, planted_model, prompts, recall, recalls

from kvfactory.attention_probe import last_row_attention
from kvfactory.loop_engine import forward
from kvfactory.plan import make_plan

TABLE = SCRIPT.parent / "planted_table.py"
ROOT = SCRIPT.parent.parent
GRANULARITIES = ("kv_head", "query_head")


def everywhere(count: int) -> list:
    """`count` prompts at each of five depths."""
    return [prompt for depth in (0, 25, 50, 75, 100) for prompt in prompts(count, depth)]


def test_committed_weights_are_the_scripts(tmp_path):
    maker = load_script(SCRIPT)
    assert maker.main(["--check"]) == 0
    assert maker.main(["--out", str(tmp_path)]) == 0
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert maker.main(["--out", str(tmp_path), "--check"]) == 1


def test_small_two_layer_grouped_llama():
    config = planted_model().config
    assert (config.model_type, config.num_hidden_layers) == ("llama", 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 500_000


def test_prompts_are_what_they_say():
    for length, depth in ((200, 0), (331, 50), (500, 100)):
        prompt = make_prompt(3, length, depth)
        assert len(prompt.ids) == length
        key, *answer = prompt.ids[prompt.record : prompt.record + 3]
        assert tuple(answer) == prompt.answer
        assert prompt.ids[-1] == key and prompt.ids.count(key) == 2
        assert all(prompt.ids.count(token) == 1 for token in answer)
        assert abs(prompt.record - 1 - depth / 100 * (length - 6)) <= 2
    assert make_prompt(3, 331, 50) == make_prompt(3, 331, 50) != make_prompt(4, 331, 50)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_stock_model_recalls(backend):
    """Without kvfactory: at least 99 % of 100 prompts."""
    model, asked = planted_model(backend), everywhere(20 if backend == "sdpa" else 4)
    right = 0
    for prompt in asked:
        ids = torch.tensor([prompt.ids])
        # The first token's id is 0 as well, so generate would take it for padding without a mask.
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0
        )
        right += tuple(out[0, len(prompt.ids) :].tolist()) == prompt.answer
    assert right >= 0.99 * len(asked)


def test_unknown_key_ends_the_text():
    """A symbol that does not occur makes no value up."""
    prompt = make_prompt(0, 300, 50)
    unknown = next(token for token in load_script(SCRIPT).SYMBOLS if token not in prompt.ids)
    with torch.no_grad():
        logits = planted_model()(torch.tensor([[*prompt.ids[:-1], unknown]])).logits[0, -1]
    assert int(logits.argmax()) == planted_model().generation_config.eos_token_id


def test_planted_head_alone_sees_the_value():
    model, prompt = planted_model(), make_prompt(1, 400, 40)
    with last_row_attention(model) as probe:
        cache = probe.new_cache(1)
        forward(model, torch.tensor([prompt.ids[:-1]]), cache)
        forward(model, torch.tensor([prompt.ids[-1:]]), cache)
        seen = probe.take()[:, :, prompt.record + 1]
    layer, head = PLANTED_HEAD
    assert seen[layer, head] > 0.99
    seen[layer, head] = 0
    assert seen.max() < 0.1


def test_full_cache_recalls_everywhere():
    assert recall("fullkv", everywhere(20)) >= 0.99


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_streaming_llm_holds_the_ends_and_loses_the_middle(granularity):
    plan = [make_plan("streamingllm", max_capacity_prompt=32, kv_cache_granularity=granularity)]
    found = [recalls(planted_model(), plan, prompts(10, depth))[0] for depth in (0, 25, 50, 75, 100)]
    assert found[0] == found[-1] == 1
    assert max(found[1:-1]) <= 0.1


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_selection_recalls_at_small_budgets_and_random_falls_with_them(granularity):
    """32 of up to 500 tokens are enough for SnapKV, 4 for the oracle; a random choice needs most of the prompt."""
    budgets = (180, 100, 60, 16)
    cells = [("oracle", 4), ("snapkv", 32), *(("random", budget) for budget in budgets)]
    plans = [make_plan(name, max_capacity_prompt=b, kv_cache_granularity=granularity) for name, b in cells]
    middle = [prompt for depth in (25, 50, 75) for prompt in prompts(12, depth, shortest=200, longest=260)]
    oracle, snapkv, *chance = recalls(planted_model(), plans, middle)
    assert oracle >= 0.99 and snapkv >= 0.99
    assert chance == sorted(chance, reverse=True), chance
    assert chance[0] > 0.5 and chance[-1] < 0.2


def test_pooling_is_what_keeps_the_second_token():
    """Nothing in the prompt attends to it: without pooling over neighbours it stays by luck only."""
    assert recall("snapkv", prompts(10, 50), budget=32, kernel_size=1) <= 0.6


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_long_prompts_at_small_budgets(granularity):
    plans = [
        make_plan(name, max_capacity_prompt=budget, kv_cache_granularity=granularity)
        for name, budget in (("oracle", 4), ("snapkv", 32), ("adakv", 32))
    ]
    assert min(recalls(planted_model(), plans, everywhere(4))) >= 0.99


def test_committed_table_is_current():
    """One depth of some rows, computed again; the slow test below compares the whole page."""
    table = load_script(TABLE)
    text = (ROOT / "docs" / "planted_retrieval.md").read_text(encoding="utf-8")
    assert table.INTRODUCTION.splitlines()[0] == text.splitlines()[0]
    cells = [("StreamingLLM", 128), ("SnapKV", 16), ("SnapKV", 32), ("AdaKV", 32), ("PyramidKV", 64), ("Oracle", 16)]
    plans = [make_plan(name, max_capacity_prompt=budget, kv_cache_granularity="kv_head") for name, budget in cells]
    section = text.split("## kv_head")[1].split("## ")[0]
    for (name, budget), got in zip(cells, recalls(planted_model(), plans, prompts(table.PROMPTS, 75)), strict=True):
        row = re.search(rf"^\| {name} \| {budget} \| (.*) \|$", section, re.MULTILINE)[1].split(" | ")
        assert row[table.DEPTHS.index(75)] == f"{100 * got:.0f}", (name, budget)


@pytest.mark.slow
def test_whole_table_is_current():
    done = subprocess.run(
        [sys.executable, str(TABLE), "--check"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
