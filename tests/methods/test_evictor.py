"""Decode-time eviction step by step, against sorted lists of tokens and a log of every attention weight.

The reference stores nothing clever: per stored head the positions held, ascending, and per query head the weights of
every past row on what was held then.
"""

from __future__ import annotations

import pytest
import torch
from oracles import dense_attention

from kvfactory.backends import get_backend
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.methods.evictor import lowest_slot
from kvfactory.plan import make_plan

HQ, HK, D = 6, 2, 16
BUDGET, STEPS = 20, 24
SCALE = D**-0.5
BELOW = 1 - 1e-6


class Layer:
    """One layer under decode-time eviction, fed with random queries, keys and values of `length` + steps tokens."""

    def __init__(self, method, length=37, budget=BUDGET, granularity="kv_head", agg="mean", sampler=None, **settings):
        g = torch.Generator().manual_seed(length)
        self.q, self.k, self.v = (torch.randn(1, h, length + STEPS, D, generator=g) for h in (HQ, HK, HK))
        self.q *= 2  # peaked, so that ranks differ clearly
        plan = make_plan(
            method, max_capacity_prompt=budget, kv_cache_granularity=granularity, gqa_score_agg=agg, **settings
        )
        self.cluster = plan.build(LayerShape(2, 3, HQ, HK, D))
        assert self.cluster.evicts
        self.ctx = PromptContext(length, budget, example_id="e", sampler=sampler)
        self.position = length - 1
        prompt = [x[:, :, :length] for x in (self.q, self.k, self.v)]
        kept = self.cluster.compress(*prompt, self.ctx)
        self.store = DenseStore(*prompt[1:], slack=STEPS, kept=kept)
        self.store.add_columns(kept.columns, kept.history)

    def held(self):
        """Positions per stored head, ascending."""
        return [sorted(head) for head in self.store.column("position")[0].tolist()]

    def values(self):
        """Per stored head {position: value}."""
        positions = self.store.column("position")[0].tolist()
        return [dict(zip(p, v, strict=True)) for p, v in zip(positions, self.store.view()[1][0].double(), strict=True)]

    def step(self, backend="eager"):
        """One token: stored, attended (the output comes back), then evicted for."""
        self.position += 1
        now = slice(self.position, self.position + 1)
        self.store.append(self.k[:, :, now], self.v[:, :, now])
        out = self.store.attend(self.q[:, :, now], scale=SCALE, backend=get_backend(backend))
        self.cluster.evict(self.q[:, :, now], self.store, self.position, self.ctx)
        return out[0, 0]


class Log:
    """Positions held by every stored head, and the weights of every past row."""

    def __init__(self, layer, agg="mean"):
        self.layer, self.agg = layer, agg
        self.held = layer.held()
        self.values = layer.values()
        self.heads = len(self.held)
        S = layer.ctx.prompt_len
        prompt = dense_attention(layer.q[:, :, :S], layer.k[:, :, :S], SCALE)[0]
        self.rows = [[(i, i + 1, dict(enumerate(prompt[h, i, : i + 1].tolist()))) for i in range(S)] for h in range(HQ)]
        self.prompt_rows = S

    def group(self, s):
        return range(s * HQ // self.heads, (s + 1) * HQ // self.heads)

    def reduce(self, numbers):
        return {"mean": sum(numbers) / len(numbers), "max": max(numbers), "sum": sum(numbers)}[self.agg]

    def attend(self, position):
        """Adds the token at `position` and its rows -> (Hq, D) outputs."""
        out = torch.zeros(HQ, D, dtype=torch.float64)
        for s in range(self.heads):
            self.held[s].append(position)
            head = s * HK // self.heads
            self.values[s][position] = self.layer.v[0, head, position].double()
            keys = self.layer.k[0, head, self.held[s]].double()
            for h in self.group(s):
                weights = torch.softmax(keys @ self.layer.q[0, h, position].double() * SCALE, 0)
                row = dict(zip(self.held[s], weights.tolist(), strict=True))
                self.rows[h].append((position, len(keys), row))
                out[h] = sum(weight * self.values[s][p] for p, weight in row.items())
        return out

    def received(self, s):
        """{position: attention received from all rows so far}; reduced over the prompt at once, then step by step."""
        total = {}
        for p in self.held[s]:
            rows = [[row.get(p, 0.0) for _, _, row in self.rows[h]] for h in self.group(s)]
            total[p] = self.reduce([sum(r[: self.prompt_rows]) for r in rows])
            total[p] += sum(
                self.reduce(list(step)) for step in zip(*(r[self.prompt_rows :] for r in rows), strict=True)
            )
        return total

    def judged(self, s, window):
        """{position: (low weights, attention)} over the last `window` rows, both summed over the group."""
        out = {}
        for p in self.held[s]:
            seen = [(row[p], t) for h in self.group(s) for _, t, row in self.rows[h][-window:] if p in row]
            out[p] = sum(w * t < BELOW for w, t in seen), sum(w for w, _ in seen)
        return out

    def drop(self, s, positions):
        for p in positions:
            self.held[s].remove(p)
            del self.values[s][p]


def least(scores, candidates):
    """The smallest score, of equal ones the later position."""
    return min(candidates, key=lambda p: (scores[p], -p))


def h2o(log, s, position, window):
    return [least(log.received(s), [p for p in log.held[s] if p <= position - window])]


def streaming(log, s, position, sinks):
    return [min(p for p in log.held[s] if p >= sinks)]


def l2norm(log, s, position, recent):
    norms = {p: -float(log.layer.k[0, s, p].double().norm()) for p in log.held[s]}
    return [least(norms, [p for p in log.held[s] if p <= position - recent])]


def scissorhands(log, s, position, window, recent, sinks, drop):
    judged = log.judged(s, window)
    candidates = [p for p in log.held[s] if sinks <= p <= position - recent]
    return sorted(candidates, key=lambda p: (-judged[p][0], judged[p][1], p))[:drop]


CASES = {
    "h2o": ("H2O", dict(preset="paper"), lambda *a: h2o(*a, window=10)),
    "h2o-window": ("H2O", dict(decode_evict=True, window_size=3), lambda *a: h2o(*a, window=3)),
    "h2o-one-heavy": ("H2O", dict(decode_evict=True, window_size=19), lambda *a: h2o(*a, window=19)),
    "streamingllm": ("StreamingLLM", dict(decode_evict=True), lambda *a: streaming(*a, sinks=4)),
    "streamingllm-no-sinks": ("StreamingLLM", dict(decode_evict=True, sinks=0), lambda *a: streaming(*a, sinks=0)),
    "l2norm": ("L2Norm", dict(decode_evict=True), lambda *a: l2norm(*a, recent=0)),
    "l2norm-recent": ("L2Norm", dict(decode_evict=True, l2_recent=5), lambda *a: l2norm(*a, recent=5)),
    "scissorhands": (
        "Scissorhands",
        dict(decode_evict=True),
        lambda *a: scissorhands(*a, window=400, recent=10, sinks=0, drop=1),
    ),
    "scissorhands-short-ring": (
        "Scissorhands",
        dict(decode_evict=True, scissor_window=7, scissor_recent=3, sinks=2),
        lambda *a: scissorhands(*a, window=7, recent=3, sinks=2, drop=1),
    ),
    "scissorhands-paper": (
        "Scissorhands",
        dict(preset="paper", scissor_window=15),
        lambda *a: scissorhands(*a, window=15, recent=10, sinks=0, drop=8),
    ),
    "cam": (
        "CAM",
        dict(preset="paper", window_size=6, cam_span=4),
        lambda *a: h2o(*a, window=6),
    ),
}
RECENT = {
    "h2o": 10,
    "h2o-window": 3,
    "h2o-one-heavy": 19,
    "streamingllm": 16,
    "streamingllm-no-sinks": 20,
    "l2norm": 0,
    "l2norm-recent": 5,
    "scissorhands": 10,
    "scissorhands-short-ring": 3,
    "scissorhands-paper": 10,
    "cam": 6,
}
"""Last tokens that are never dropped."""
LIMIT_AFTER_DROP = {"scissorhands-paper": BUDGET + 1 - 8}


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("length", [11, BUDGET, 37], ids=["below", "at", "above"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_the_sorted_lists(case, length, granularity):
    """Sets held, attention outputs, the budget, what is protected: from a prompt below, at and above the budget."""
    method, settings, victims = CASES[case]
    never = {"sampler": torch.zeros_like} if method == "CAM" else {}  # its merges have a test of their own
    layer = Layer(method, length, granularity=granularity, **settings, **never)
    log = Log(layer)
    drops = 0
    for t in range(STEPS):
        position = length + t
        want = log.attend(position)
        got = layer.step("sdpa" if t % 2 else "eager")
        # float32 against float64 over 21 slots
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        for s in range(log.heads):
            if len(log.held[s]) > BUDGET:
                before = len(log.held[s])
                log.drop(s, victims(log, s, position))
                drops += before - len(log.held[s])
                assert len(log.held[s]) == LIMIT_AFTER_DROP.get(case, BUDGET)
        assert layer.held() == log.held, t
        assert layer.store.length <= BUDGET
        assert all(set(range(max(0, position + 1 - RECENT[case]), position + 1)) <= set(head) for head in log.held)
    assert drops > log.heads * 5


@pytest.mark.parametrize("agg", ["mean", "max", "sum"])
def test_received_attention_equals_the_log(agg):
    """The column that eviction reads, after every step; groups are reduced in the prompt and at each step."""
    layer = Layer("H2O", preset="paper", agg=agg)
    log = Log(layer, agg)
    for t in range(STEPS):
        log.attend(37 + t)
        layer.step()
        for s in range(HK):
            if len(log.held[s]) > BUDGET:
                log.drop(s, h2o(log, s, 37 + t, 10))
            want = log.received(s)
            columns = (layer.store.column(name)[0, s].tolist() for name in ("position", "received"))
            got = dict(zip(*columns, strict=True))
            assert got.keys() == want.keys()
            for p, received in got.items():
                assert received == pytest.approx(want[p], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("window, length", [(400, 37), (7, 37), (30, 37), (30, 11)])
@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_rings_of_queries_count_as_a_log_of_weights(window, length, granularity):
    """Rings that never fill, that wrap, and that still hold prompt rows; tokens that came after a row do not count."""
    layer = Layer(
        "Scissorhands", length, granularity=granularity, decode_evict=True, scissor_window=window, scissor_recent=4
    )
    log = Log(layer)
    group = HQ // log.heads
    for t in range(STEPS):
        log.attend(length + t)
        layer.step()
        for s in range(log.heads):
            if len(log.held[s]) > BUDGET:
                log.drop(s, scissorhands(log, s, length + t, window, 4, 0, 1))
        counts, sums = layer.cluster.ring_statistics(layer.store)
        for s, positions in enumerate(layer.store.column("position")[0].tolist()):
            want = log.judged(s, window)
            assert positions and set(positions) == set(want)
            for slot, p in enumerate(positions):
                assert round(float(counts[0, s, slot]) * group) == want[p][0] <= window * group
                assert float(sums[0, s, slot]) * group == pytest.approx(want[p][1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("rule", ["always", "half", "never", "generator"])
@pytest.mark.parametrize("window, span", [(6, 4), (3, 17)])  # with the second, fewer tokens than the span often follow
def test_cam_merges_the_victim_into_the_next_kept_tokens(granularity, rule, window, span):
    """v / m to each of the next m kept tokens, m at most the span; a drawn merge conserves the sum of values."""
    asked = []

    def sampler(p):
        asked.append(p)
        return {"always": torch.ones_like(p), "half": (p >= 0.5).float(), "never": torch.zeros_like(p)}[rule]

    settings = dict(preset="paper", window_size=window, cam_span=span, sampler=None if rule == "generator" else sampler)
    layer = Layer("CAM", granularity=granularity, **settings)
    log = Log(layer)
    merged, short = 0, 0
    for t in range(STEPS):
        position = 37 + t
        log.attend(position)
        asked.clear()
        layer.step()
        assert len(asked) == (rule != "generator")
        uniform = torch.rand(log.heads, 1, generator=layer.ctx.generator(2, step=position))
        for s in range(log.heads):
            before = sum(log.values[s].values())
            received = log.received(s)
            [victim] = h2o(log, s, position, window)
            targets = [p for p in log.held[s] if p > victim][:span]
            short += len(targets) < span
            probability = min(1.0, received[victim] / (sum(received[p] for p in targets) / len(targets)))
            if asked:
                assert float(asked[0][0, s, 0]) == pytest.approx(probability, rel=1e-4)
            chance = float(uniform[s]) < probability
            drawn = {"always": 1, "never": 0, "half": probability >= 0.5, "generator": chance}[rule]
            value = log.values[s][victim]
            merged += drawn
            for p in targets:
                log.values[s][p] = log.values[s][p] + drawn * value / len(targets)
            log.drop(s, [victim])
            torch.testing.assert_close(
                sum(log.values[s].values()), before if drawn else before - value, rtol=0, atol=1e-9
            )
        assert layer.held() == log.held
        for got, want in zip(layer.values(), log.values, strict=True):
            for p, value in want.items():
                # float32 sums of up to 24 merges
                torch.testing.assert_close(got[p], value, rtol=0, atol=1e-4)
    assert (short > 0) == (span > window)
    steps = STEPS * log.heads
    assert {"always": merged == steps, "never": merged == 0}.get(rule, 0 < merged < steps)


def test_of_equal_scores_the_later_position_goes():
    """Whatever the order of slots; protected slots never, however small their score."""
    score = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.5], [3.0, 3.0, 3.0, 3.0, 3.0]]])
    position = torch.tensor([[[0, 7, 9, 8, 4], [12, 3, 15, 0, 16]]], dtype=torch.int32)
    protected = torch.tensor([[[False, False, False, False, True], [False, False, False, False, True]]])
    assert lowest_slot(score, position, protected).tolist() == [[[2], [2]]]


def test_cam_draws_depend_on_example_and_step_alone():
    def run(example, steps=STEPS):
        layer = Layer("CAM", preset="paper", window_size=6, cam_span=4)
        layer.ctx = PromptContext(37, BUDGET, example_id=example)
        for _ in range(steps):
            layer.step()
        return layer.store.view()[1].clone()

    first = run("a")
    torch.rand(5)
    other = run("b")
    assert torch.equal(run("a"), first) and not torch.equal(other, first)
    draws = [PromptContext(37, BUDGET, example_id="a").generator(2, step=i).initial_seed() for i in range(40)]
    assert len(set(draws)) == 40


@pytest.mark.parametrize("case", CASES)
def test_no_prompt_rows_beyond_the_budget_are_held(case):
    """Columns and rings are of the kept slots; nothing as long as the prompt is carried along."""
    method, settings, _ = CASES[case]
    layer = Layer(method, **settings)
    for x in layer.store.columns.values():
        assert x.shape[-1] == BUDGET + STEPS
    held = sum(x.numel() * x.element_size() for x in layer.store.history.values())
    slots = sum(layer.store.column(name).numel() * 4 for name in layer.store.columns)
    assert layer.store.nbytes_aux == held + slots and slots > 0
    if method == "Scissorhands":
        w = layer.cluster.settings.scissor_window
        assert held == w * HQ * (D + 1) * 4 + w * 2 * 8
    else:
        assert held == 0
