"""Prompts with a needle in them, as token counts and depths ask for.

Anchor: run_needle_in_haystack.py of KVCache-Factory. Its rules of place and length are kept; the prompt's words and the
default text are our own, and the haystack is tokenised once per run instead of once per cell.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfactory.needle.needles import Needle
from kvfactory.probe.haystack import GENERATED, generated_haystack, read_texts

ANSWER_ROOM = 200  # tokens of a length that stay free for question, wrap and answer
_SENTENCES_PER_LINE = 6
_FULL_STOPS = (".", "。")


@dataclass(frozen=True)
class HaystackText:
    """Texts that follow one another, from the first again when they run out.

    Attributes:
        texts: in the order they are used.
        source: "generated", or the names of the files.
    """

    texts: tuple[str, ...]
    source: str

    @property
    def sha256(self) -> str:
        """Of all texts in order."""
        return hashlib.sha256("".join(self.texts).encode("utf-8", "surrogatepass")).hexdigest()


def haystack_text(haystack_dir: str | Path | None = None, seed: int = 42) -> HaystackText:
    """The .txt files of a folder in the order of their names (or one text file), else generated text drawn by `seed`.

    Raises:
        ValueError: as `kvfactory.probe.haystack.read_texts`; names --haystack_dir.
    """
    if haystack_dir is None:
        sentences = generated_haystack(seed).sentences
        lines = [sentences[i : i + _SENTENCES_PER_LINE] for i in range(0, len(sentences), _SENTENCES_PER_LINE)]
        return HaystackText(("".join(" ".join(line) + "\n" for line in lines),), GENERATED)
    texts = read_texts(haystack_dir)
    # Files that do not end a line do so here, so that the last word of one does not run into the next one's first.
    return HaystackText(tuple(t if t.endswith("\n") else t + "\n" for t in texts.values()), ", ".join(texts))


def prompt_text(text: str, needle: Needle) -> str:
    """What the model is told and asked, around a haystack."""
    return (
        "Read the following long text. A question about one of its sentences comes after it.\n\n"
        f"{text}\n\nQuestion: {needle.question}\nAnswer:"
    )


class NeedleHaystack:
    """Puts needles into a text, for one tokenizer.

    Each text is tokenised once, when a length first reaches it.
    """

    def __init__(self, tokenizer: Any, text_source: HaystackText):
        self._tokenizer = tokenizer
        self._unread = iter(text_source.texts)
        self._source = text_source.source
        self._ids: list[int] = []
        self._full_stop: dict[int, bool] = {}

    def place(self, length: int, depth: int, needle: Needle, overhead: int = 0) -> list[int]:
        """Token ids of the text with the needle on a line of its own, without special tokens.

        The text is cut to n = `length` - 200 - the needle's tokens - `overhead`. At depth 100 the needle is appended.
        Elsewhere it goes to position int(n * depth / 100), moved back to just after the last token there whose text
        ends in a full stop (one inside a number or an abbreviation counts, as in the original), or to the start when
        there is none.

        Args:
            length: tokens, of which 200 stay free for what comes around the text and for the answer.
            depth: percent of the text that comes before the needle, 0 to 100.
            overhead: tokens to leave free besides, where 200 do not hold question, wrap and answer; the original has
                none.

        Raises:
            ValueError: the needle and one token of text do not fit; names the lengths that are accepted.
        """
        assert 0 <= depth <= 100, depth
        needle_ids = self._encode(f"\n{needle.text}\n")
        taken = ANSWER_ROOM + len(needle_ids) + overhead
        if length <= taken:
            raise ValueError(
                f"--s_len {length}: needle longer than the context, since {len(needle_ids)} tokens of needle "
                f"{needle.name!r} and {ANSWER_ROOM + overhead} for question and answer leave no room for text; give "
                f"lengths from {taken + 1} on"
            )
        text = self._cut(length - taken)
        at = len(text) * depth // 100
        while depth < 100 and at and not self._ends_sentence(text[at - 1]):
            at -= 1
        return text[:at] + needle_ids + text[at:]

    def prompt(self, length: int, depth: int, needle: Needle, overhead: int = 0) -> str:
        """The text of `place` decoded, with the question after it; arguments and errors are those of `place`.

        Tokenised again it can differ from `length` - 200 by a few tokens where tokens merge or split at a joint.
        """
        ids = self.place(length, depth, needle, overhead)
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return prompt_text(text, needle)

    def _encode(self, text: str) -> list[int]:
        # verbose=False: texts over the model's window are expected here.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _cut(self, count: int) -> list[int]:
        """The first `count` token ids of the text."""
        while len(self._ids) < count:
            text = next(self._unread, None)
            if text is not None:
                self._ids += self._encode(text)
            elif self._ids:
                self._ids *= -(-count // len(self._ids))
            else:
                raise ValueError(f"--haystack_dir: the model's tokenizer finds no tokens in {self._source}")
        return self._ids[:count]

    def _ends_sentence(self, token: int) -> bool:
        if token not in self._full_stop:
            self._full_stop[token] = self._tokenizer.decode([token]).strip().endswith(_FULL_STOPS)
        return self._full_stop[token]
