"""HeadKV's two head scores of one trial, and whether the model's answer counts.

Formulas: FYYFU/HeadKV, Important_Head; the retrieval score is that of Retrieval Head (Wu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfactory.attention_probe import LastRow
from kvfactory.loop_engine import forward
from kvfactory.metrics.qa import qa_f1_score
from kvfactory.model_parts import input_device
from kvfactory.probe.trials import Trial

RETRIEVAL_STEPS = 50
GATE = 0.5
PROBE_MODES = ("generate", "teacher_forced")


def retrieval_hits(row: torch.Tensor, prompt: torch.Tensor, span: tuple[int, int], token: int) -> torch.Tensor:
    """1/|span| for every head that copies: its largest attention lies in the needle, on the very token that comes out.

    Args:
        row: (L, Hq, T) attention of one step over the prompt and the tokens generated before.
        prompt: (S,) token ids, S <= T.
        token: the id that this step puts out.

    Returns:
        (L, Hq) float64.
    """
    start, end = span
    best = row.argmax(dim=-1)
    inside = (best >= start) & (best < end)
    copied = prompt[best.clamp(max=len(prompt) - 1)] == token
    return (inside & copied).double() / (end - start)


def reasoning_mass(row: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Attention inside the needle among a head's |span| largest weights, divided by |span|.

    Args:
        row: (L, Hq, T) attention of one step.

    Returns:
        (L, Hq) float64.
    """
    start, end = span
    weights, positions = row.topk(end - start, dim=-1)
    inside = (positions >= start) & (positions < end)
    return (weights.double() * inside).sum(dim=-1) / (end - start)


@dataclass(frozen=True)
class Reading:
    """What one trial gave.

    Attributes:
        scores: (L, Hq) float64, summed over the steps.
        output: token ids put out, or fed in teacher_forced mode.
    """

    scores: torch.Tensor
    output: list[int]


@torch.no_grad()
def read_trial(
    model: PreTrainedModel,
    probe: LastRow,
    trial: Trial,
    kind: str,
    mode: str = "generate",
    stop: Callable[[int], bool] = lambda token: False,
) -> Reading:
    """Runs one trial: the prompt but for its last token in one pass, then step by step with attention rows.

    Args:
        probe: of `kvfactory.attention_probe.last_row_attention`, active on `model`.
        mode: generate decodes greedily, at most 50 tokens (reasoning: as many as the answer has); teacher_forced feeds
            the right answer.
        stop: whether a token ends the output; asked in generate mode only.
    """
    device = input_device(model)
    prompt = torch.tensor(trial.prompt, device=device)
    forced = mode == "teacher_forced"
    steps = RETRIEVAL_STEPS if kind == "retrieval" and not forced else len(trial.answer)
    cache = probe.new_cache(steps)
    forward(model, prompt[None, :-1], cache)
    scores, output, token = torch.zeros(probe.shape, dtype=torch.float64), [], trial.prompt[-1]
    for step in range(steps):
        position = torch.tensor([[len(trial.prompt) - 1 + step]], device=device)
        logits = forward(model, torch.tensor([[token]], device=device), cache, position)
        row = probe.take(device)
        token = trial.answer[step] if forced else int(logits[0].argmax())
        if kind == "retrieval":
            scores += retrieval_hits(row, prompt, trial.span, token).cpu()
        else:
            scores += reasoning_mass(row, trial.span).cpu()
        output.append(token)
        if not forced and stop(token):
            break
    return Reading(scores, output)


def ends_output(kind: str, tokenizer: object, eos: Sequence[int]) -> Callable[[int], bool]:
    """Whether a token ends the output: one with a newline does; for reasoning an end token as well."""

    def stop(token: int) -> bool:
        return "\n" in tokenizer.decode([token]) or (kind == "reasoning" and token in eos)

    return stop


def answer_quality(kind: str, output: str, reference: str) -> float:
    """Retrieval: ROUGE-1 recall of the needle's words (stemmed); reasoning: F1 of the answer's words; in [0, 1]."""
    if kind == "reasoning":
        return qa_f1_score(output, reference)
    from rouge_score import rouge_scorer

    return float(rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True).score(reference, output)["rouge1"].recall)
