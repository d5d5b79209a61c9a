from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import save_checkpoint

from kvfactory.loading import open_checkpoint
from kvfactory.probe.haystack import generated_haystack
from kvfactory.probe.needles import KINDS, needles
from kvfactory.probe.trials import TrialMaker, make_trials, spread


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random Llama with a byte tokenizer: nothing in it retrieves, so generate mode never passes."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", layers=2)


@pytest.fixture(scope="session")
def maker(checkpoint) -> TrialMaker:
    return TrialMaker(open_checkpoint(str(checkpoint)).tokenizer, generated_haystack(42))


@pytest.mark.parametrize("kind", KINDS)
def test_span_holds_the_needle_and_nothing_else(kind, maker, checkpoint):
    tokenizer = open_checkpoint(str(checkpoint)).tokenizer
    for needle in needles(kind):
        for length, depth in ((0, 0), (900, 0), (900, 37), (900, 100)):
            trial = maker.make(needle, length, depth)
            start, end = trial.span
            assert tokenizer.decode(trial.prompt[start:end]) == " " + needle.sentences[needle.target]
            text = tokenizer.decode(trial.prompt)
            assert text.startswith("Text: ") and text.endswith(f"\n\nQ: {needle.question}\nA: {needle.cue}")
            body = text.removeprefix("Text:").split("\n\nQ:")[0]
            assert " ".join(needle.sentences) in body
            assert len(tokenizer(body, add_special_tokens=False).input_ids) <= max(length, 400)
            assert "<|im" not in text
            if kind == "retrieval":
                assert trial.answer == trial.prompt[start:end]


def test_needles_lie_at_sentence_ends_at_or_before_their_depth(maker, checkpoint):
    tokenizer = open_checkpoint(str(checkpoint)).tokenizer
    needle, opening = needles("retrieval")[0], len(maker.ids("Text:"))
    filler = maker.make(needle, 1500, 100).span[0] - opening
    longest = 1 + max(len(maker.ids(sentence)) for sentence in generated_haystack(42).sentences)
    places = []
    for depth in spread(0, 100, 10):
        trial = maker.make(needle, 1500, depth)
        text = tokenizer.decode(trial.prompt[: trial.span[0]])
        assert text == "Text:" or text.endswith("."), depth
        place = trial.span[0] - opening
        assert place <= filler * depth / 100 < place + longest, depth
        places.append(place)
    assert places[0] == 0 and places[-1] == filler and places == sorted(set(places))


def test_lengths_and_counts():
    assert spread(0, 10_000, 5) == [0, 2500, 5000, 7500, 10_000]
    assert spread(0, 100, 10) == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert len(needles("retrieval")) >= 3
    reasoning = needles("reasoning")
    assert len(reasoning) >= 8 and {needle.target for needle in reasoning} == {1, 2}
    for kind in KINDS:
        for needle in needles(kind):
            assert needle.answer in needle.sentences[needle.target]
            assert needle.answer not in " ".join(s for i, s in enumerate(needle.sentences) if i != needle.target)
            assert needle.answer not in needle.question


def test_bos_stands_once_in_front(tmp_path, checkpoint):
    """A tokenizer that adds BOS puts it before the prompt, and never before the needle."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = open_checkpoint(str(checkpoint)).tokenizer
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    trial = TrialMaker(tokenizer, generated_haystack(1)).make(needles("retrieval")[0], 300, 50)
    assert trial.prompt[0] == bos and trial.prompt.count(bos) == 1


def test_smollm2_trials_decode_to_the_needle():
    """On a real tokenizer, whose words carry their blank in front."""
    tokenizer = open_checkpoint("smollm2").tokenizer
    maker = TrialMaker(tokenizer, generated_haystack(42))
    for trial in make_trials(maker, needles("retrieval"), [0, 400], [0, 60]):
        start, end = trial.span
        assert tokenizer.decode(trial.prompt[start:end]) == " " + trial.reference
        assert tuple(trial.answer) == trial.prompt[start:end]
