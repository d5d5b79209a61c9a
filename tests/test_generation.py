"""Our own greedy loop: stops, minimum lengths, shapes of inputs and outputs, what it refuses."""

from __future__ import annotations

import pytest
import torch
from tiny import random_prompt, shared_model

from kvfactory import attach, detach, generate

LONG, SHORT = random_prompt(61), random_prompt(37, seed=7)


@pytest.fixture(params=["FullKV", "SnapKV"])
def model(request):
    model = shared_model("llama")
    attach(model, request.param, max_capacity_prompt=24)
    yield model
    detach(model)


def new_tokens(out, prompt):
    return out.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize("decode", ["loop", "hf", "auto"])
def test_a_stop_ends_the_row_and_is_part_of_it(model, decode):
    free = new_tokens(generate(model, LONG, 9, eos_token_id=[], decode=decode), LONG)
    assert len(free) == 9
    stop = free[3]
    out = generate(model, LONG, 9, eos_token_id=stop, decode=decode)
    assert new_tokens(out, LONG) == free[: free.index(stop) + 1]
    assert out.rows[0].finish == stop
    assert generate(model, LONG, 9, eos_token_id=[], decode=decode).rows[0].finish == "length"


@pytest.mark.parametrize("decode", ["loop", "hf"])
def test_first_tokens_that_may_not_be_stops(model, decode):
    """The best other token is taken, at exactly the first `min_new_tokens` places."""
    free = new_tokens(generate(model, LONG, 4, eos_token_id=[]), LONG)
    for least in (1, 2):
        out = new_tokens(generate(model, LONG, 4, min_new_tokens=least, eos_token_id=[free[0]], decode=decode), LONG)
        assert free[0] not in out[:least] and len(out) >= least
    assert new_tokens(generate(model, LONG, 4, eos_token_id=[free[0]], decode=decode), LONG) == free[:1]


def test_both_paths_agree_whatever_the_checkpoint_asks_for(model):
    """Processors of the checkpoint's generation config are neutralised on the path through transformers."""
    free = generate(model, LONG, 8, eos_token_id=[])
    first = new_tokens(free, LONG)[0]
    config = model.generation_config
    saved = config.to_dict()
    changes = dict(repetition_penalty=1.7, no_repeat_ngram_size=1, temperature=0.2, top_k=3, suppress_tokens=[first])
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        assert torch.equal(generate(model, LONG, 8, eos_token_id=[], decode="hf").sequences, free.sequences)
    finally:
        for name in changes:
            setattr(config, name, saved.get(name))


def test_the_checkpoint_names_the_stops(model):
    saved = model.generation_config.eos_token_id
    first = new_tokens(generate(model, LONG, 1, eos_token_id=[]), LONG)[0]
    try:
        for ids in (first, [5, first]):
            model.generation_config.eos_token_id = ids
            assert generate(model, LONG, 5).rows[0].tokens == [first]
        model.generation_config.eos_token_id = None
        assert len(generate(model, LONG, 5).rows[0].tokens) == 5
    finally:
        model.generation_config.eos_token_id = saved


def test_shapes_of_inputs_and_outputs(model):
    one = generate(model, LONG, 3, eos_token_id=[])
    assert one.sequences.shape == (1, 64) and torch.equal(one.sequences[0, :61], LONG)
    two = generate(model, torch.stack([LONG, LONG.flip(0)]), 3, eos_token_id=[])
    assert two.sequences.shape == (2, 64) and two.sequences[0].tolist() == one.sequences[0].tolist()
    rows = generate(model, [LONG, SHORT.tolist()], 3, eos_token_id=[])
    assert [len(row) for row in rows.sequences] == [64, 40] and rows.sequences[0].dtype == torch.int64
    assert rows.cache.nbytes == sum(row.cache.nbytes for row in rows.rows)
    assert rows.cache.kept_tokens[0] == rows.rows[0].cache.kept_tokens[0] + rows.rows[1].cache.kept_tokens[0]


def test_rows_that_stop_early_are_padded_with_their_last_token(model):
    both = torch.stack([LONG, LONG.flip(0)])
    free = generate(model, both, 6, eos_token_id=[])
    stop = int(free.sequences[0, 62])
    out = generate(model, both, 6, eos_token_id=stop)
    lengths = [len(row.tokens) for row in out.rows]
    assert out.sequences.shape == (2, 61 + max(lengths)) and lengths[0] <= 2
    for row, n, all_tokens in zip(out.sequences, lengths, free.sequences, strict=True):
        assert row[: 61 + n].tolist() == all_tokens[: 61 + n].tolist()
        assert set(row[61 + n :].tolist()) <= {int(row[61 + n - 1])}


def test_a_prompt_of_one_token(model):
    for decode in ("loop", "hf"):
        out = generate(model, LONG[:1], 3, eos_token_id=[], decode=decode)
        assert len(out.rows[0].tokens) == 3 and not out.cache.compressed


def test_timing_is_known_where_the_moment_is_seen(model):
    loop, hf = (generate(model, LONG, 3, eos_token_id=[], decode=d).timing for d in ("loop", "hf"))
    assert loop.prefill_s > 0 and loop.decode_s > 0
    assert hf.prefill_s is None and hf.decode_s > 0


def test_positions_follow_tokens_seen_not_tokens_stored():
    """Rotary positions after compression: a shift by the dropped count would change these tokens."""
    model = shared_model("llama")
    attach(model, "streamingllm", max_capacity_prompt=60, sinks=59)
    out = generate(model, LONG, 1, eos_token_id=[])
    detach(model)
    assert out.cache.get_seq_length() == 61 and out.cache.kept_tokens == [[60, 60]] * 3


@pytest.mark.parametrize(
    "ids, options, word",
    [
        (LONG, dict(max_new_tokens=0), "max_new_tokens=0"),
        (LONG, dict(max_new_tokens=3, min_new_tokens=4), "min_new_tokens=4"),
        (LONG, dict(max_new_tokens=3, min_new_tokens=-1), "min_new_tokens=-1"),
        (LONG, dict(max_new_tokens=3, decode="fast"), "--decode 'fast'"),
        (LONG[:0], dict(max_new_tokens=3), "at least one token"),
        ([], dict(max_new_tokens=3), "at least one token"),
        (LONG[None, None], dict(max_new_tokens=3), "must be"),
        ([LONG, SHORT], dict(max_new_tokens=3, example_id=["a"]), "1 example ids for 2 prompts"),
    ],
)
def test_bad_calls(model, ids, options, word):
    with pytest.raises(ValueError, match=word):
        generate(model, ids, **options)
