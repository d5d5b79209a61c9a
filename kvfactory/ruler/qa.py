"""Question answering among documents (qa_1: one document holds the answer, qa_2: two have to be joined).

As in NVIDIA/RULER @c3f5e3b4, scripts/data/synthetic/qa.py: "Document i:" before each document, documents on the
question's own subject are the first distractors. Official data are SQuAD v2 dev (arXiv 1806.03822) and HotpotQA dev in
the distractor setting (arXiv 1809.09600), read from a user's file; without one, our own texts serve. Wording is ours.
Unlike upstream, documents repeat only after all distractors are used, gold ones never, and only the two documents that
HotpotQA marks as supporting are always present.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

from kvfactory.ruler.draw import permutation
from kvfactory.ruler.qa_texts import Corpus, Question, own_corpora
from kvfactory.ruler.sample import Sample

_RULE = "Answer the question from the documents, with the answer alone and no other words."
_TASK = """\
{rule} The documents come first, the question after them.

{documents}

{rule}

Question: {question}"""
_PREFIX = " Answer:"


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or brackets nested without end
        raise ValueError(f"{path} is not a JSON file in UTF-8: {error}.") from None


def _not_the_format(path: Path, what: str, error: Exception) -> ValueError:
    detail = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path} is not in {what}: {detail}.")


def read_squad(path: Path) -> Corpus:
    """SQuAD v1.1 or v2 JSON: paragraphs are the documents, unanswerable questions are left out.

    Raises:
        ValueError: the file, when it is missing, not in this format, or without an answerable question.
    """
    content = _read_json(path)
    numbers: dict[str, int] = {}  # paragraphs that occur twice are one document
    questions = []
    try:
        for article in content["data"]:
            paragraphs = article["paragraphs"]
            here = [numbers.setdefault(paragraph["context"], len(numbers)) for paragraph in paragraphs]
            for number, paragraph in zip(here, paragraphs, strict=True):
                near = tuple(dict.fromkeys(n for n in here if n != number))
                for entry in paragraph["qas"]:
                    if not entry.get("is_impossible", False):
                        answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                        questions.append(Question(entry["question"], answers, (number,), near))
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_the_format(path, "the format of SQuAD's dev-v2.0.json, which qa_1 reads", error) from None
    return _checked(path, numbers, questions)


def _hotpot_question(record: dict, numbers: dict[str, int]) -> Question:
    here = {
        title: numbers.setdefault(f"{title}\n{''.join(sentences)}", len(numbers))
        for title, sentences in record["context"]
    }
    titles = dict.fromkeys(title for title, _ in record["supporting_facts"])
    gold = tuple(here[title] for title in titles)
    near = tuple(n for n in here.values() if n not in gold)
    return Question(record["question"], (record["answer"],), gold, near)


def read_hotpot(path: Path) -> Corpus:
    """HotpotQA JSON, distractor setting: title and text of each paragraph are a document, supporting ones are gold.

    Raises:
        ValueError: the file, when it is missing, not in this format, or empty.
    """
    content = _read_json(path)
    numbers: dict[str, int] = {}
    try:
        questions = [_hotpot_question(record, numbers) for record in content]
    except (KeyError, TypeError, ValueError) as error:
        what = "the format of HotpotQA's hotpot_dev_distractor_v1.json, which qa_2 reads"
        raise _not_the_format(path, what, error) from None
    return _checked(path, numbers, questions)


def _checked(path: Path, numbers: dict[str, int], questions: list[Question]) -> Corpus:
    if not questions:
        raise ValueError(f"{path} has no question with an answer.")
    if not all(isinstance(document, str) and document.strip() for document in numbers):
        raise ValueError(f"{path}: every document must be a text that is not blank.")
    for question in questions:
        if not isinstance(question.text, str):
            raise ValueError(f"{path}: every question must be a text, this is {question.text!r}.")
        if not question.answers or not all(isinstance(a, str) and a.strip() for a in question.answers):
            raise ValueError(f"{path}, question {question.text!r}: every answer must be a text that is not blank.")
        if not question.gold:
            raise ValueError(f"{path}, question {question.text!r}: no paragraph is marked as supporting the answer.")
        if len(question.gold) == len(numbers):
            raise ValueError(f"{path}, question {question.text!r}: no other document can be a distractor.")
    return Corpus(tuple(numbers), tuple(questions))


_READERS = {"qa_1": read_squad, "qa_2": read_hotpot}


def source_sha256(path: Path | None) -> str:
    """SHA-256 of a data file, or of our own documents and questions for None; ValueError if it cannot be read."""
    if path is None:
        return hashlib.sha256(repr(own_corpora()).encode()).hexdigest()
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None


@dataclass(frozen=True)
class QuestionAnswering:
    """Maker of qa samples. One unit is one distractor document."""

    corpus: Corpus
    smallest: int = 1

    def _distractors(self, rng: random.Random, question: Question) -> Iterator[int]:
        """Numbers of distractors in random order, those on the same subject first; after the last one, again."""
        near = [question.near[i] for i in permutation(rng, len(question.near))]
        used = {*question.gold, *near}
        rest = (i for i in permutation(rng, len(self.corpus.documents)) if i not in used)
        return cycle(chain(near, rest))

    def make(self, key: str, units: int) -> Sample:
        """The sample of `key` with `units` distractors; the question is the key's alone. `depths` are the places of
        the gold documents in the order of reading.

        Raises:
            ValueError: units below `smallest`.
        """
        if units < self.smallest:
            raise ValueError(f"qa: {units} distractors; at least {self.smallest} document must be beside the gold.")
        rng = random.Random(key)
        question = self.corpus.questions[rng.randrange(len(self.corpus.questions))]
        distractors = islice(self._distractors(random.Random(f"{key} documents"), question), units)
        order = [*question.gold, *distractors]
        rng.shuffle(order)
        documents = "\n\n".join(f"Document {i}:\n{self.corpus.documents[n]}" for i, n in enumerate(order, 1))
        depths = tuple(100 * i / (len(order) - 1) for i, n in enumerate(order) if n in question.gold)
        text = _TASK.format(rule=_RULE, documents=documents, question=question.text)
        return Sample(text, _PREFIX, list(question.answers), depths)


def maker(task: str, path: Path | None) -> QuestionAnswering:
    """The maker of `qa_1` or `qa_2` over a data file in that task's official format, or over our own texts for None.

    Raises:
        ValueError: what is wrong with the file.
    """
    return QuestionAnswering(own_corpora()[task] if path is None else _READERS[task](path))
