from __future__ import annotations

import pytest
import torch
from tiny import random_prompt, tiny_model

from kvfactory import attach, detach
from kvfactory.attention_probe import last_row_attention
from kvfactory.loop_engine import forward


def test_probe_leaves_the_model_as_it_was():
    model, ids = tiny_model("llama"), random_prompt(23)[None]
    before = model(ids).logits
    with pytest.raises(RuntimeError), last_row_attention(model):
        raise RuntimeError
    assert torch.equal(model(ids).logits, before)
    attach(model, "snapkv", max_capacity_prompt=16)
    with pytest.raises(ValueError, match="already"), last_row_attention(model):
        pass
    detach(model)


def test_rows_are_taken_once():
    model = tiny_model("llama")
    with last_row_attention(model) as rows:
        cache = rows.new_cache(2)
        forward(model, random_prompt(12)[None], cache)
        with pytest.raises(AssertionError, match="no token"):
            rows.take()
        forward(model, random_prompt(1)[None], cache)
        row = rows.take()
        assert row.shape == (3, 6, 13) and row.dtype == torch.float32
        torch.testing.assert_close(row.sum(-1), torch.ones(3, 6))
        with pytest.raises(AssertionError, match="no token"):
            rows.take()
