"""Batches of four on the sample suite with the bundled model: predictions of batch 1, a third of its forwards."""

from __future__ import annotations

import random

import pytest
from transformers import AutoConfig, AutoTokenizer

from kvfactory import attach, detach
from kvfactory.assets import model_path
from kvfactory.data.encode import PromptEncoder
from kvfactory.data.longbench import read_dataset, sample_dir
from kvfactory.data.prompts import load_prompts
from kvfactory.data.tasks import TASKS
from kvfactory.decoder import Decoder
from kvfactory.rows import Request

DATASETS = sorted(path.stem for path in sample_dir().glob("*.jsonl"))
EXAMPLES = 2


def requests(plan):
    """The two shortest examples of every sample set, shuffled, each with its own limit of new tokens."""
    folder = model_path("smollm2")
    prompts = load_prompts(sample_dir(), DATASETS)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder))
    found = []
    for name in DATASETS:
        for record in read_dataset(sample_dir() / f"{name}.jsonl", name)[:EXAMPLES]:
            task = TASKS[name]
            ids = encoder.encode(task, prompts.render(name, record), task.max_new_tokens, record["input"]).input_ids
            limit = min(task.max_new_tokens, 40)
            found.append(Request(ids, limit, 0, encoder.stop_ids(task), [plan], f"{name}/{record['_id']}"))
    random.Random(7).shuffle(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv", "adakv", "fullkv"])
def test_batch_of_four(smollm2, method):
    attachment = attach(smollm2, method, max_capacity_prompt=128, kv_cache_granularity="kv_head")
    try:
        runs = {}
        for batch in (1, 4):
            decoder = Decoder(smollm2, batch)
            rows = {request.example_id: row for request, row, _ in decoder.run(requests(attachment.plan))}
            runs[batch] = rows, decoder.counters
    finally:
        detach(smollm2)
    (alone, single), (together, counted) = runs[1], runs[4]
    assert len(alone) == len(together) == EXAMPLES * len(DATASETS)
    assert len({row.cache.prompt_len for row in alone.values()}) >= 3
    assert len({len(row.tokens) for row in alone.values()}) >= 3  # rows leave at different steps
    different = [name for name in alone if alone[name].tokens != together[name].tokens]
    assert all(together[name].near_ties for name in different), different
    assert len(different) <= 1
    assert counted.mean_rows_in_flight >= 3.5
    assert counted.decode_forwards <= 0.35 * single.decode_forwards
