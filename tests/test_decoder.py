"""Rows in flight against rows one by one: tokens, bytes, counters; one prompt pass for several methods; failures."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny import random_prompt, shared_model

from kvfactory import attach, detach, generate, loop_engine
from kvfactory import decoder as decoder_module
from kvfactory.decoder import Decoder
from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS
from kvfactory.monkeypatch import attach_plan
from kvfactory.plan import make_plan
from kvfactory.rows import Request

PROMPTS = [random_prompt(n, seed=n) for n in (61, 20, 37, 93, 24)]  # the second and the last fit the budget
BUDGET, NEW = 24, 8
STOPS = list(range(50, 62))  # an eighth of the words
LIMITS = (8, 4, 7, 8, 2)  # rows stop at different steps
EVICTING = {
    "H2O": dict(preset="paper"),
    "StreamingLLM": dict(preset="paper", reindex_positions=False),
    "L2Norm": dict(decode_evict=True),
    "Scissorhands": dict(preset="paper"),
    "CAM": dict(preset="paper"),
}
CASES = [(m, REQUIRED_SETTINGS.get(m, {})) for m in METHODS.names()] + list(EVICTING.items())
CASES += [("SnapKV", dict(merge="pivot")), ("AdaKV", dict(merge="weighted"))]
IDS = [f"{m}-{'-'.join(map(str, o.values())) or 'default'}" for m, o in CASES]


def requests(plans, prompts=PROMPTS, max_new=NEW, min_new=0, stops=STOPS):
    return [Request(p, max_new, min_new, stops, plans, str(i), tag=i) for i, p in enumerate(prompts)]


def decode(model, batch_size, work):
    """({(prompt, plan's place): output}, counters)."""
    decoder = Decoder(model, batch_size)
    rows = {}
    for request, row, plan in decoder.run(iter(work)):
        [place] = [i for i, p in enumerate(request.plans) if p is plan]
        assert (request.tag, place) not in rows
        rows[request.tag, place] = row
    return rows, decoder.counters


def attached(test):
    """Runs `test` with (model, plan) attached for model, method and options."""

    @functools.wraps(test)
    def run(name, method, granularity="query_head", **options):
        plan = make_plan(method, max_capacity_prompt=BUDGET, kv_cache_granularity=granularity, **options)
        model = shared_model(name)
        attach_plan(model, plan, "sdpa")
        try:
            return test(model, plan)
        finally:
            detach(model)

    return run


def alone(model, work):
    """Every prompt in a decoder of its own."""
    out = {}
    for request in work:
        rows, counters = decode(model, 1, [request])
        assert counters.prefills == 1 and rows[request.tag, 0].near_ties == 0
        out |= rows
    return out


def same_rows(got, want):
    """Tokens, bytes, kept slots and stored numbers; rows whose best words nearly tied may part from there on."""
    assert got.keys() == want.keys()
    exact = 0
    for key, row in got.items():
        other = want[key]
        assert row.cache.kept_tokens == other.cache.kept_tokens and row.prompt_bytes.used == other.prompt_bytes.used
        if row.near_ties and row.tokens != other.tokens:
            continue
        exact += 1
        assert row.tokens == other.tokens and row.finish == other.finish
        assert row.cache.nbytes == other.cache.nbytes
        assert row.cache.get_seq_length() == other.cache.get_seq_length()
        for a, b in zip(row.cache.kv_layers, other.cache.kv_layers, strict=True):
            for x, y in zip(a.store.view(), b.store.view(), strict=True):
                # A row of the batch is stored per query head where others are: compare what is common to the group.
                x, y = (z[:, :: z.shape[1] // min(x.shape[1], y.shape[1])] for z in (x, y))
                torch.testing.assert_close(x, y, rtol=0, atol=1e-3)
    assert exact >= len(got) - 1


@pytest.mark.parametrize("name, granularity", [("llama", "query_head"), ("qwen2-mixed-sliding", "kv_head")])
@pytest.mark.parametrize("method, options", CASES, ids=IDS)
def test_rows_together_equal_rows_alone(name, granularity, method, options):
    @attached
    def check(model, plan):
        work = requests([plan])
        for request, limit in zip(work, LIMITS, strict=True):
            request.max_new = limit
        want = alone(model, work)
        assert len({len(row.tokens) for row in want.values()}) >= 3
        for size in (2, 3, 5):
            rows, counters = decode(model, size, work)
            same_rows(rows, want)
            assert counters.prefills == 5

    check(name, method, granularity, **options)


def schedule(lengths, size):
    """(forwards, rows decoded, mean rows beside each) when rows of so many tokens wait for `size` places in order."""
    waiting, live = list(enumerate(lengths)), {}
    shared, steps = {i: 0 for i in range(len(lengths))}, {i: 0 for i in range(len(lengths))}
    forwards = decoded = 0
    while waiting or live:
        while waiting and len(live) < size:
            i, n = waiting.pop(0)
            if n > 1:  # the prompt gives the first token
                live[i] = n - 1
        if not live:
            continue
        forwards += 1
        rows = list(live)
        decoded += len(rows)
        for i in rows:
            shared[i] += len(rows)
            steps[i] += 1
            live[i] -= 1
            if not live[i]:
                del live[i]
    return forwards, decoded, [shared[i] / steps[i] if steps[i] else 1.0 for i in shared]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("stops", [STOPS, []])
def test_counters_equal_a_schedule_on_paper(size, stops):
    @attached
    def check(model, plan):
        work = requests([plan], stops=stops)
        work[2].max_new = 1  # finished by its prompt alone
        rows, counters = decode(model, size, work)
        lengths = [len(rows[i, 0].tokens) for i in range(5)]
        forwards, decoded, beside = schedule(lengths, size)
        assert (counters.prefills, counters.decode_forwards, counters.decoded_rows) == (5, forwards, decoded)
        assert counters.mean_rows_in_flight == decoded / forwards
        assert [rows[i, 0].rows_in_flight for i in range(5)] == beside
        assert [rows[i, 0].timing.decode_s is None for i in range(5)] == [x > 1 for x in beside]

    check("llama", "SnapKV")


def test_a_full_batch_needs_a_quarter_of_the_forwards():
    """Twelve rows of equal length, four at a time."""

    @attached
    def check(model, plan):
        prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(12)]
        many, one = (decode(model, size, requests([plan], prompts, stops=[]))[1] for size in (4, 1))
        assert many.mean_rows_in_flight == 4 and many.decode_forwards * 4 == one.decode_forwards == 12 * (NEW - 1)

    check("llama", "AdaKV")


def test_prompts_are_fetched_when_there_is_room():
    """The next example is tokenized and prefilled only when a place is free: memory does not depend on the data set."""

    @attached
    def check(model, plan):
        fetched, finished = 0, 0

        def source():
            nonlocal fetched
            for request in requests([plan], PROMPTS * 2):
                fetched += 1
                yield request

        for _ in Decoder(model, 3).run(source()):
            finished += 1
            assert fetched <= finished + 3
        assert finished == fetched == 10

    check("llama", "SnapKV")


@pytest.mark.parametrize("gap, counted", [(0.5e-3, True), (2e-3, False)])
def test_near_ties_are_counted_where_rows_share_a_forward(monkeypatch, gap, counted):
    """The two best logits are `gap` apart at every step."""
    inner = decoder_module.forward

    def forward(*args):
        logits = torch.zeros_like(inner(*args))
        logits[:, 7], logits[:, 9] = 1.0, 1.0 - gap
        return logits

    for module in (decoder_module, loop_engine):
        monkeypatch.setattr(module, "forward", forward)

    @attached
    def check(model, plan):
        work = requests([plan], PROMPTS[:3], stops=[])
        work[0].max_new, work[1].max_new = 3, 5
        rows, _ = decode(model, 3, work)
        # Shared steps of the rows: 2, 4, and of the last one 4 before it is the only one left.
        assert [rows[i, 0].near_ties for i in range(3)] == ([2, 4, 4] if counted else [0, 0, 0])
        rows, _ = decode(model, 1, work)
        assert all(row.near_ties == 0 for row in rows.values())

    check("llama", "SnapKV")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_first_tokens_that_may_not_be_stops(size):
    """Per row and step: a row past its minimum stops beside one that may not yet."""

    @attached
    def check(model, plan):
        free = alone(model, requests([plan], stops=[]))
        stops = sorted({free[i, 0].tokens[j] for i in range(5) for j in (0, 2)})
        work = requests([plan], stops=stops)
        for i, request in enumerate(work):
            request.min_new = i  # 0 to 4
        rows, _ = decode(model, size, work)
        for i in range(5):
            tokens = rows[i, 0].tokens
            want = generate(model, PROMPTS[i], NEW, min_new_tokens=i, eos_token_id=stops, decode="hf").rows[0].tokens
            assert tokens == want or rows[i, 0].near_ties
            assert not set(tokens[:i]) & set(stops) and len(tokens) >= max(i, 1)
        assert rows[0, 0].tokens == free[0, 0].tokens[:1]  # without a minimum the very first token ends the row

    check("llama", "SnapKV")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_failing_prompt_leaves_the_others_alone(size):
    """A share of a short prompt smaller than the window: reported with its request, wherever it stands among others."""
    prompts = [random_prompt(n, seed=n) for n in (20, 61, 93, 21, 37, 22)]
    plan = make_plan("SnapKV", max_capacity_prompt_ratio=0.3)
    model = shared_model("llama")
    attach_plan(model, plan, "sdpa")
    try:
        fine = [1, 2, 4]
        want = alone(model, [requests([plan], prompts)[i] for i in fine])
        rows, counters = decode(model, size, requests([plan], prompts))
    finally:
        detach(model)
    assert sorted(rows) == [(i, 0) for i in range(6)]
    for i in (0, 3, 5):
        assert isinstance(rows[i, 0], ValueError) and "window" in str(rows[i, 0])
    same_rows({(i, 0): rows[i, 0] for i in fine}, want)
    assert counters.prefills == 3


def test_a_prompt_that_does_not_fit_memory_leaves_the_others_alone(monkeypatch):
    inner = decoder_module.forward

    def forward(model, ids, *args):
        if ids.shape[1] == 93:
            raise torch.OutOfMemoryError("out of memory")
        return inner(model, ids, *args)

    @attached
    def check(model, plan):
        want = alone(model, requests([plan]))
        monkeypatch.setattr(decoder_module, "forward", forward)
        rows, _ = decode(model, 3, requests([plan]))
        assert isinstance(rows.pop((3, 0)), torch.OutOfMemoryError)
        del want[3, 0]
        same_rows(rows, want)

    check("llama", "H2O")


def _plans():
    """One of each kind, both granularities, two budgets of one method."""
    specs = [
        ("SnapKV", 24, "kv_head", {}),
        ("SnapKV", 12, "query_head", {}),
        ("AdaKV", 30, "query_head", dict(merge="pivot")),
        ("FullKV", 24, "query_head", {}),
        ("H2O", 16, "query_head", dict(preset="paper")),
        ("Oracle", 16, "kv_head", {}),
        ("NACL", 20, "query_head", {}),
        ("CAM", 24, "kv_head", dict(cam_variant="paper_prompt")),
    ]
    return [make_plan(m, max_capacity_prompt=b, kv_cache_granularity=g, **more) for m, b, g, more in specs]


def separately(model, plans, prompts):
    """Each plan attached by itself, each prompt by itself."""
    want = {}
    for place, plan in enumerate(plans):
        attach_plan(model, plan, "sdpa")
        try:
            want |= {(i, place): row for (i, _), row in alone(model, requests([plan], prompts)).items()}
        finally:
            detach(model)
    return want


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed-sliding"])
@pytest.mark.parametrize("size", [1, 4, 30])
def test_several_plans_share_one_prompt_pass(name, size):
    """Also where transformers' own sliding layers are shared by rows that go on with different tokens."""
    model, plans = shared_model(name), _plans()
    want = separately(model, plans, PROMPTS[:3])
    attach_plan(model, plans[0], "sdpa")
    try:
        rows, counters = decode(model, size, requests(plans, PROMPTS[:3]))
    finally:
        detach(model)
    assert counters.prefills == 3
    assert len(rows) == 3 * len(plans)
    same_rows(rows, want)


@pytest.mark.parametrize("order", [1, -1])
def test_methods_that_change_the_prompt_pass_have_one_of_their_own(order):
    """CAM's leak shows merged values to the prompt's attention, which the others must not see."""
    model = shared_model("llama")
    plans = [
        make_plan(m, max_capacity_prompt=24, kv_cache_granularity="kv_head", **more)
        for m, more in (("SnapKV", {}), ("CAM", {}), ("H2O", {}), ("CAM", dict(cam_leak=False)))
    ][::order]
    want = separately(model, plans, PROMPTS[:1])
    attach_plan(model, plans[0], "sdpa")
    try:
        rows, counters = decode(model, 4, requests(plans, PROMPTS[:1]))
    finally:
        detach(model)
    assert counters.prefills == 2
    same_rows(rows, want)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_plan_leaves_the_others_alone(failing):
    model = shared_model("qwen2-mixed-sliding")
    plans = [make_plan(m, max_capacity_prompt=24) for m in ("SnapKV", "H2O")]
    plans.insert(failing, make_plan("SnapKV", max_capacity_prompt_ratio=0.1))
    fine = [i for i in range(3) if i != failing]
    want = separately(model, [plans[i] for i in fine], PROMPTS[:1])
    attach_plan(model, plans[0], "sdpa")
    try:
        rows, counters = decode(model, 3, requests(plans, PROMPTS[:1]))
        both, _ = decode(
            model, 3, requests([plans[failing], make_plan("H2O", max_capacity_prompt_ratio=0.05)], PROMPTS[:1])
        )
    finally:
        detach(model)
    assert isinstance(rows.pop((0, failing)), ValueError) and counters.prefills == 1
    same_rows({(0, i): rows[0, place] for i, place in enumerate(fine)}, want)
    assert len(both) == 2 and all(isinstance(row, ValueError) for row in both.values())


def test_generate_hands_rows_back_in_order():
    @attached
    def check(model, plan):
        want = alone(model, requests([plan]))
        out = generate(model, PROMPTS, NEW, eos_token_id=STOPS, example_id=list("01234"), batch_size=3)
        for i, (sequence, row) in enumerate(zip(out.sequences, out.rows, strict=True)):
            assert torch.equal(sequence[: len(PROMPTS[i])], PROMPTS[i])
            assert sequence[len(PROMPTS[i]) :].tolist() == row.tokens
            assert row.near_ties or row.tokens == want[i, 0].tokens
        assert out.cache.nbytes == sum(row.cache.nbytes for row in out.rows)

    check("llama", "Random")


def test_nothing_to_do():
    model = shared_model("llama")
    attach(model, "snapkv", max_capacity_prompt=BUDGET)
    try:
        assert decode(model, 4, [])[0] == {}
    finally:
        detach(model)
