"""Needles in a haystack: where they lie, how long prompts get, how often text is tokenised."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerFast

from kvfactory.assets import model_path
from kvfactory.needle.grid import depths
from kvfactory.needle.haystack import ANSWER_ROOM, HaystackText, NeedleHaystack, haystack_text
from kvfactory.needle.needles import DEFAULT_NEEDLE, NEEDLES, Needle


class Counting:
    """A tokenizer that notes the length of every text it is called on."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def __call__(self, text, **more):
        self.calls.append(len(text))
        return self.tokenizer(text, **more)

    def decode(self, *args, **more):
        return self.tokenizer.decode(*args, **more)


@pytest.fixture(scope="module")
def tokenizers():
    """SmolLM2's, and a byte-level one trained here whose tokens run over blanks and newlines: " inn.\\n" can be one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    lines = haystack_text(seed=7).texts[0].splitlines(keepends=True)[:60]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    return {
        "smollm2": AutoTokenizer.from_pretrained(model_path("smollm2")),
        "trained": PreTrainedTokenizerFast(tokenizer_object=core),
    }


@pytest.fixture(scope="module", params=["smollm2", "trained"])
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


def count(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def split_at_needle(tokenizer, ids: list[int], needle: Needle) -> tuple[str, str]:
    before, mark, after = tokenizer.decode(ids).partition(f"\n{needle.text}\n")
    assert mark
    return before, after


def test_ideographic_full_stops_and_no_special_tokens():
    class Characters:
        def __call__(self, text, **more):
            start = [ord("^")] if more.get("add_special_tokens", True) else []
            return BatchEncoding({"input_ids": [*start, *map(ord, text)]})

        def decode(self, ids, **more):
            return "".join(map(chr, ids))

    needle = Needle("own", "Needle", "Where?", ("needle",))
    ids = NeedleHaystack(Characters(), HaystackText(("面包很好。水也很好",), "a.txt")).place(200 + 8 + 8, 99, needle)
    assert "".join(map(chr, ids)) == "面包很好。\nNeedle\n水也很"


@pytest.mark.parametrize("needle", NEEDLES, ids=lambda n: n.name)
def test_needle_follows_a_full_stop_at_every_depth(tokenizer, needle):
    haystack = NeedleHaystack(tokenizer, haystack_text())
    whole = haystack_text().texts[0]
    inserted = tokenizer(f"\n{needle.text}\n", add_special_tokens=False).input_ids
    for length in (613, 1500):
        for depth in depths():
            ids = haystack.place(length, depth, needle)
            before, after = split_at_needle(tokenizer, ids, needle)
            assert whole.startswith(before + after)  # the text itself, uninterrupted
            if depth == 100:
                assert after == ""
                continue
            at = next(i for i in range(len(ids)) if ids[i : i + len(inserted)] == inserted)
            text = ids[:at] + ids[at + len(inserted) :]
            stops = [i + 1 for i, token in enumerate(text) if tokenizer.decode([token]).rstrip().endswith(".")]
            assert at == max([0, *(i for i in stops if i <= int(len(text) * depth / 100))])
            assert (before == "") if depth == 0 else before.rstrip().endswith(".")


def test_position_is_counted_in_tokens_of_the_cut_text():
    """One token a character: 300 - 200 - 5 = 95 tokens of text, sentences of 10, needle behind token 20 or 30."""
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    needle = Needle("n", "abc", "q", ("abc",))
    haystack = NeedleHaystack(tokenizer, HaystackText(("123456789.",), "ten"))
    text = ("123456789." * 10)[:95]
    for depth, at in ((0, 0), (10, 0), (11, 10), (31, 20), (32, 30), (99, 90), (100, 95)):
        assert tokenizer.decode(haystack.place(300, depth, needle)) == text[:at] + "\nabc\n" + text[at:], depth
    no_stop = NeedleHaystack(tokenizer, HaystackText(("no stop anywhere",), "one"))
    assert tokenizer.decode(no_stop.place(300, 99, needle)).startswith("\nabc\n")
    number = NeedleHaystack(tokenizer, HaystackText(("3.14 is 3.",), "number"))
    assert tokenizer.decode(number.place(300, 4, needle)).startswith("3.\nabc\n14")  # as in the original


def test_prompts_never_exceed_the_length(tokenizer):
    haystack = NeedleHaystack(tokenizer, haystack_text())
    for length in (431, 977, 4096):
        for depth in (0, 37, 50, 100):
            assert len(haystack.place(length, depth, DEFAULT_NEEDLE)) == length - ANSWER_ROOM
            assert len(haystack.place(length, depth, DEFAULT_NEEDLE, 19)) == length - ANSWER_ROOM - 19
            prompt = haystack.prompt(length, depth, DEFAULT_NEEDLE)
            assert length - ANSWER_ROOM < count(tokenizer, prompt) <= length - 30  # 30 new tokens still fit
            # With the room that question and wrap take, the prompt leaves the whole answer room but for the joints.
            room = count(tokenizer, prompt) - (length - ANSWER_ROOM)
            wrapped = count(tokenizer, haystack.prompt(length, depth, DEFAULT_NEEDLE, room))
            assert abs(wrapped - (length - ANSWER_ROOM)) <= 6


def test_prompt_is_text_question_and_answer_mark(tokenizers):
    haystack = NeedleHaystack(tokenizers["smollm2"], haystack_text())
    prompt = haystack.prompt(700, 44, DEFAULT_NEEDLE)
    context = tokenizers["smollm2"].decode(haystack.place(700, 44, DEFAULT_NEEDLE))
    assert prompt.endswith(f"{context}\n\nQuestion: {DEFAULT_NEEDLE.question}\nAnswer:")
    assert prompt.count(DEFAULT_NEEDLE.text) == 1


def test_each_text_is_tokenised_once_for_the_whole_grid(tokenizers):
    texts = ("Alpha stood here. " * 40 + "\n", "Beta sat there. " * 40 + "\n", "Gamma never came. " * 40 + "\n")
    counting = Counting(tokenizers["smollm2"])
    haystack = NeedleHaystack(counting, HaystackText(texts, "three"))
    long = [len(t) for t in texts]
    haystack.prompt(300, 50, DEFAULT_NEEDLE)
    assert [c for c in counting.calls if c in long] == long[:1]  # no further than needed
    for length in (5000, 300, 800, 2000):
        for depth in depths():
            haystack.prompt(length, depth, DEFAULT_NEEDLE)
    assert [c for c in counting.calls if c in long] == long
    # Repeated from the first text when they run out, and short lengths are a part of long ones.
    before, after = split_at_needle(tokenizers["smollm2"], haystack.place(5000, 50, DEFAULT_NEEDLE), DEFAULT_NEEDLE)
    assert ("".join(texts) * 20).startswith(before + after) and len(before + after) > 3 * sum(long)


def test_folder_in_name_order_with_its_own_text(tmp_path, tokenizers):
    (tmp_path / "b.txt").write_text("Second  text.\nTwo lines.\n")
    (tmp_path / "a.txt").write_text("First text,\n\nno end of line")
    (tmp_path / "c.md").write_text("Not read.")
    found = haystack_text(tmp_path)
    assert found.texts == ("First text,\n\nno end of line\n", "Second  text.\nTwo lines.\n")
    assert found.source == "a.txt, b.txt" and found.sha256 != haystack_text().sha256 == haystack_text().sha256
    assert haystack_text(tmp_path / "b.txt").texts == found.texts[1:]
    assert haystack_text(seed=1).texts != haystack_text(seed=2).texts
    ids = NeedleHaystack(tokenizers["smollm2"], found).place(400, 100, DEFAULT_NEEDLE)
    assert tokenizers["smollm2"].decode(ids).startswith("".join(found.texts * 3))


def test_real_essays(data_dir, tokenizers):
    folder = data_dir / "PaulGrahamEssays"
    haystack = NeedleHaystack(tokenizers["smollm2"], haystack_text(folder))
    for depth in depths()[1:-1]:
        before, _ = split_at_needle(tokenizers["smollm2"], haystack.place(8000, depth, DEFAULT_NEEDLE), DEFAULT_NEEDLE)
        assert before.rstrip().endswith(".")
        assert count(tokenizers["smollm2"], haystack.prompt(8000, depth, DEFAULT_NEEDLE)) <= 7970


def test_refusals(tmp_path, tokenizers):
    with pytest.raises(ValueError, match=r"--haystack_dir .* holds no .txt file"):
        haystack_text(tmp_path)
    with pytest.raises(ValueError, match=r"--haystack_dir .* does not exist"):
        haystack_text(tmp_path / "none")
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"holds no text"):
        haystack_text(tmp_path)
    tokenizer = tokenizers["smollm2"]
    haystack = NeedleHaystack(tokenizer, haystack_text())
    shortest = ANSWER_ROOM + 5 + count(tokenizer, f"\n{DEFAULT_NEEDLE.text}\n") + 1
    assert len(haystack.place(shortest, 50, DEFAULT_NEEDLE, 5)) == shortest - ANSWER_ROOM - 5
    with pytest.raises(
        ValueError, match=rf"--s_len {shortest - 1}: needle longer than the context.* from {shortest} on"
    ):
        haystack.place(shortest - 1, 50, DEFAULT_NEEDLE, 5)
    with pytest.raises(ValueError, match=r"--haystack_dir: .* no tokens in nothing"):
        NeedleHaystack(tokenizer, HaystackText(("",), "nothing")).place(500, 0, DEFAULT_NEEDLE)
