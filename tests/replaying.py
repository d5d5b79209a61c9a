"""The graph engine where nothing can be captured: the same step, run as it is, and rows to compare it by."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tiny import random_prompt

from kvfactory.decoder import Decoder
from kvfactory.graph_engine import GraphEngine
from kvfactory.graph_support import _of_method
from kvfactory.rows import Request

LENGTHS = (90, 33, 61, 120, 47, 75, 101)


def replaying(monkeypatch) -> Callable[..., Decoder]:
    """Lets decoders replay on any device -> `Decoder(model, batch_size, keep_caches=True)` that does."""
    monkeypatch.setattr("kvfactory.decoder.graph_obstacle", lambda attachment, plan, *_: _of_method(attachment, plan))
    monkeypatch.setattr("kvfactory.decoder.GraphEngine", partial(GraphEngine, capture=False))
    return partial(Decoder, graph=True)


def requests(plans, lengths=LENGTHS, new=9, stops=(), min_new=0):
    """Prompts of several lengths, each with its own number of new tokens."""
    found = [
        Request(random_prompt(n, seed=n), new + i % 3, min_new, list(stops), list(plans), f"example-{n}")
        for i, n in enumerate(lengths)
    ]
    random.Random(3).shuffle(found)
    return found


def request(plan, length, new, stops=(), min_new=0, name=None):
    return Request(random_prompt(length, seed=length), new, min_new, list(stops), [plan], name or str(length))


def outcome(rows):
    """What must not depend on who decodes: tokens, finish, what is stored and how much."""
    found = {}
    for asked, row, plan in rows:
        if isinstance(row, Exception):
            raise row
        sizes = row.cache.bytes()
        key = (asked.example_id, plan.method, plan.budget.tag)
        assert key not in found
        found[key] = (
            row.tokens,
            row.finish,
            row.prompt_bytes,
            sizes.used,
            sizes.aux,
            row.cache.kept_tokens,
            row.cache.get_seq_length(),
        )
    return found
