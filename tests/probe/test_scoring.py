"""Scores of a trial against a slow reference.

A stock eager model runs over prompt and output at once; the rows are read out of the S x S matrices that transformers
returns, and nothing is shared with the probe.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import PLANTED_HEAD, ends, planted_model, probe_trials
from tiny import random_prompt, tiny_model
from tiny_checkpoint import save_checkpoint

from kvfactory.attention_probe import last_row_attention
from kvfactory.loading import open_checkpoint
from kvfactory.probe.needles import KINDS, needles
from kvfactory.probe.scoring import answer_quality, ends_output, read_trial, reasoning_mass, retrieval_hits
from kvfactory.probe.trials import Trial


def stock_rows(model, prompt: tuple[int, ...], output: list[int]) -> list[torch.Tensor]:
    """(L, Hq, t) attention of each step that puts out a token, from one stock forward with all attention matrices."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    matrices = torch.cat(layers)
    first = len(prompt) - 1
    return [matrices[:, :, first + i, : first + i + 1] for i in range(len(output))]


def slow_retrieval(rows: list[torch.Tensor], trial: Trial, output: list[int]) -> np.ndarray:
    start, end = trial.span
    found = np.zeros(rows[0].shape[:2])
    for row, token in zip(rows, output, strict=True):
        for layer, head in np.ndindex(found.shape):
            best = int(np.argmax(row[layer, head].numpy()))
            if best in range(start, end) and trial.prompt[best] == token:
                found[layer, head] += 1 / (end - start)
    return found


def slow_reasoning(rows: list[torch.Tensor], trial: Trial) -> np.ndarray:
    start, end = trial.span
    found = np.zeros(rows[0].shape[:2])
    for row in rows:
        for layer, head in np.ndindex(found.shape):
            weights = row[layer, head].double().tolist()
            largest = sorted(range(len(weights)), key=lambda i: -weights[i])[: end - start]
            found[layer, head] += sum(weights[i] for i in largest if start <= i < end) / (end - start)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("mode", ["generate", "teacher_forced"])
def test_scores_equal_those_of_whole_attention_matrices(family, mode):
    """float32 sums in another order: 1e-5 is far above their difference and far below the least non-zero score."""
    model, stock = tiny_model(family), tiny_model(family, backend="eager")
    copied = tuple(random_prompt(9, seed=5).tolist())
    prompt = (*random_prompt(31, seed=1).tolist(), *copied, *random_prompt(17, seed=2).tolist())
    trial = Trial("t", prompt, (31, 40), copied)
    seen = 0.0
    for kind in KINDS:
        with last_row_attention(model) as rows:
            got = read_trial(model, rows, trial, kind, mode)
        assert len(got.output) == (50 if (kind, mode) == ("retrieval", "generate") else len(copied))
        if mode == "teacher_forced":
            assert got.output == list(copied)
        matrices = stock_rows(stock, prompt, got.output)
        expected = (
            slow_retrieval(matrices, trial, got.output) if kind == "retrieval" else slow_reasoning(matrices, trial)
        )
        np.testing.assert_allclose(got.scores.numpy(), expected, atol=1e-5)
        seen += expected.sum()
    assert seen > 0.01  # not a comparison of zeros


@pytest.mark.parametrize("kind", KINDS)
def test_planted_scores_equal_those_of_whole_attention_matrices(kind):
    model, stock = planted_model(), planted_model("eager")
    for trial in probe_trials(2):
        with last_row_attention(model) as rows:
            got = read_trial(model, rows, trial, kind, "generate", stop=ends)
        assert tuple(got.output[:2]) == trial.answer
        matrices = stock_rows(stock, trial.prompt, got.output)
        expected = (
            slow_retrieval(matrices, trial, got.output) if kind == "retrieval" else slow_reasoning(matrices, trial)
        )
        np.testing.assert_allclose(got.scores.numpy(), expected, atol=1e-5)
        assert expected[PLANTED_HEAD] == pytest.approx(2 / 3, abs=0.01)  # two of the record's three tokens are copied


def test_one_step_by_hand():
    prompt = torch.tensor([7, 8, 9, 8, 7])
    row = torch.zeros(1, 5, 6)  # the sixth column is a generated token
    row[0, 0, 1] = row[0, 1, 3] = row[0, 2, 0] = row[0, 3, 2] = row[0, 4, 5] = 1
    # In the span and the token itself; the same token outside; outside; inside, another token; a generated one.
    assert retrieval_hits(row, prompt, (1, 3), 8)[0].tolist() == [0.5, 0, 0, 0, 0]
    row = torch.tensor([[[0.1, 0.3, 0.05, 0.35, 0.2]]])
    assert reasoning_mass(row, (1, 3)).item() == pytest.approx(0.3 / 2)  # of the two largest, one lies inside
    assert reasoning_mass(row, (0, 4)).item() == pytest.approx((0.35 + 0.3 + 0.1) / 4)


def test_gate():
    needle = needles("retrieval")[0].answer
    half = " ".join(needle.split()[: len(needle.split()) * 2 // 3])
    assert answer_quality("retrieval", needle, needle) == 1
    assert answer_quality("retrieval", half + " and a lot of other words", needle) > 0.5  # recall, not F
    assert answer_quality("retrieval", "eat", needle) < 0.5
    assert answer_quality("reasoning", "The pressed ferns.", "pressed ferns") == 1
    assert answer_quality("reasoning", "pressed ferns and a great many copper buttons", "pressed ferns") < 0.5


def test_output_ends_at_a_newline_and_for_reasoning_at_the_end_token(tmp_path):
    tokenizer = open_checkpoint(str(save_checkpoint(tmp_path))).tokenizer
    newline, letter, end = (tokenizer.convert_tokens_to_ids(t) for t in ("Ċ", "a", "<|im_end|>"))
    for kind, wanted in (("retrieval", [True, False, False]), ("reasoning", [True, False, True])):
        stop = ends_output(kind, tokenizer, [end])
        assert [stop(token) for token in (newline, letter, end)] == wanted
