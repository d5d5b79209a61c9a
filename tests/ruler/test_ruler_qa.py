"""Question answering: what stands in the documents, our own texts, and both public formats."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from kvfactory.ruler import qa, qa_texts
from kvfactory.ruler.qa_texts import own_corpora

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Lamps",
            "paragraphs": [
                {
                    "context": "The blue lamp hangs in Ostrow.",
                    "qas": [
                        {
                            "id": "1",
                            "question": "Where is the blue lamp?",
                            "is_impossible": False,
                            "answers": [{"text": t, "answer_start": 0} for t in ("Ostrow", "in Ostrow", "Ostrow")],
                        },
                        {"id": "2", "question": "Who lit it?", "is_impossible": True, "answers": []},
                    ],
                },
                {"context": "The red lamp hangs in Sella.", "qas": []},
            ],
        },
        {"title": "Boats", "paragraphs": [{"context": f"Boat {i} leaks.", "qas": []} for i in (1, 2, 2)]},
    ],
}
HOTPOT = [
    {
        "_id": "a",
        "question": "Who owns the mill by the ford?",
        "answer": "Berit",
        "supporting_facts": [["Ford", 0], ["Mill", 1], ["Mill", 0]],
        "context": [["Mill", ["Berit owns it.", " It is old."]], ["Quay", ["Wet."]], ["Ford", ["By the mill."]]],
        "type": "bridge",
        "level": "hard",
    },
    {
        "_id": "b",
        "question": "Is the quay wet?",
        "answer": "yes",
        "supporting_facts": [["Quay", 0]],
        "context": [["Quay", ["Wet."]], ["Barn", ["Dry."]]],
    },
]


def documents_of(sample) -> list[str]:
    """The documents of a prompt, whose numbers must run from 1."""
    body = sample.input.split("\n\nAnswer the question", 1)[0]
    numbers, documents = zip(
        *re.findall(r"^Document (\d+):\n(.*?)(?=\n\nDocument |\Z)", body, re.M | re.S), strict=True
    )
    assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1))
    return list(documents)


def question_of(sample) -> str:
    return sample.input.rsplit("\n\nQuestion: ", 1)[1]


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_own_answers_stand_in_one_document_only():
    for corpus in own_corpora().values():
        everything = "\n".join(corpus.documents).lower()
        for question in corpus.questions[::31]:
            holder = corpus.documents[question.gold[-1]].lower()
            found = [everything.count(answer.lower()) for answer in question.answers]
            # an answer may recur in its own document (a surname), never elsewhere
            assert found == [holder.count(answer.lower()) for answer in question.answers], question
            assert found[0] == 1
            # no question gives its answer away
            assert not any(answer.lower() in question.text.lower() for answer in question.answers)


@pytest.mark.parametrize("first, second", [("_QUALITIES", "_THINGS"), ("_MATERIALS", "_CREATURES")])
def test_no_pair_of_words_is_part_of_another_pair(first, second):
    # "old bell" would be part of "gold bellows": no ending among the first words, no beginning among the second
    firsts, seconds = getattr(qa_texts, first), getattr(qa_texts, second)
    assert len(set(firsts)) * len(set(seconds)) >= 1600
    assert not any(a != b and a.endswith(b) for a in firsts for b in firsts)
    assert not any(a != b and a.startswith(b) for a in seconds for b in seconds)


def test_names_of_a_kind_have_one_length():
    # so none is part of another, and each comes apart in one way only
    for heads, tails in (("_SURNAME_HEADS", "_SURNAME_TAILS"), ("_TOWN_HEADS", "_TOWN_TAILS")):
        for words in (getattr(qa_texts, heads), getattr(qa_texts, tails)):
            assert len({len(word) for word in words}) == 1 and len(set(words)) == len(words)


def test_own_questions_join_the_documents_of_their_subject():
    documents = own_corpora()["qa_1"].documents
    for question in own_corpora()["qa_1"].questions[::37]:
        name = re.search(r"did (.+) collect|of (\w+)\?", question.text)
        name = name.group(1) or name.group(2)
        holders = [n for n, document in enumerate(documents) if name in document]
        assert question.gold[0] in holders
        assert len(holders) == (1 if " " in name else 2)  # a town is somebody's birthplace too
    for question in own_corpora()["qa_2"].questions[::37]:
        name = re.search(r"the town in which (.+) was born", question.text).group(1)
        person, town = (documents[n] for n in question.gold)
        assert [document for document in documents if name in document] == [person]
        # the name of the town is the only word of eight letters with a capital that both documents have
        shared = set(re.findall(r"\b[A-Z][a-z]{7}\b", person)) & set(re.findall(r"\b[A-Z][a-z]{7}\b", town))
        assert len(shared) == 1 and re.search("born", person, re.I)


def test_own_documents_are_distinct_and_fill_the_longest_prompts():
    documents = own_corpora()["qa_1"].documents
    assert len(set(documents)) == len(documents)
    # 131,072 tokens of at most 5 characters on average
    assert sum(map(len, documents)) > 5 * 131_072


@pytest.mark.parametrize("task, gold", [("qa_1", 1), ("qa_2", 2)])
def test_an_own_sample(task, gold):
    for units in (1, 2, 150):
        sample = qa.maker(task, None).make(f"key {units}", units)
        documents = documents_of(sample)
        assert len(documents) == len(set(documents)) == units + gold
        holding = [i for i, d in enumerate(documents) if any(a.lower() in d.lower() for a in sample.outputs)]
        assert len(holding) == 1 and len(sample.depths) == gold
        assert 100 * holding[0] / (len(documents) - 1) in sample.depths
        assert sample.answer_prefix == " Answer:" and question_of(sample).endswith("?")


def test_gold_documents_stand_anywhere():
    maker = qa.maker("qa_1", None)
    depths = [maker.make(str(i), 9).depths[0] for i in range(2000)]
    # ten places, 200 expected at each, standard deviation 13.4: five of them
    places = [sum(round(d * 9 / 100) == place for d in depths) for place in range(10)]
    assert all(abs(n - 200) < 67 for n in places)


def test_depths_are_in_reading_order():
    maker = qa.maker("qa_2", None)
    for i in range(20):
        first, second = maker.make(str(i), 7).depths
        assert 0 <= first < second <= 100


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_references_of_other_samples_do_not_score(task):
    maker = qa.maker(task, None)
    outputs = [maker.make(str(i), 1).outputs for i in range(200)]
    hits = [any(a.lower() in " ".join(outputs[i - 1]).lower() for a in outputs[i]) for i in range(200)]
    assert sum(hits) / len(hits) < 0.05


def test_more_units_add_documents_and_keep_the_question():
    maker = qa.maker("qa_2", None)
    samples = [maker.make("k", units) for units in (1, 2, 50, 1500)]
    sets = [set(documents_of(sample)) for sample in samples]
    assert all(small < large for small, large in zip(sets, sets[1:], strict=False))
    assert len({(question_of(sample), *sample.outputs) for sample in samples}) == 1


def test_a_sample_is_the_same_on_every_machine():
    sample = qa.maker("qa_2", None).make("key", 3)
    assert sample == qa.maker("qa_2", None).make("key", 3)
    assert hashlib.sha256(repr(sample).encode()).hexdigest()[:16] == "7ba2738b4e3d1c13"
    assert qa.source_sha256(None)[:16] == "6e94bab852c85c2e"


def test_too_few_distractors_are_refused():
    with pytest.raises(ValueError, match="0 distractors; at least 1"):
        qa.maker("qa_1", None).make("a", 0)


def test_squad(tmp_path):
    path = write(tmp_path / "dev.json", SQUAD)
    maker = qa.maker("qa_1", path)
    sample = maker.make("a", 1)
    assert question_of(sample) == "Where is the blue lamp?"
    assert sample.outputs == ["Ostrow", "in Ostrow"]
    # the paragraph of the same article comes first, the repeated one counts once
    assert set(documents_of(sample)) == {"The blue lamp hangs in Ostrow.", "The red lamp hangs in Sella."}
    assert sorted(documents_of(maker.make("a", 3)))[:2] == ["Boat 1 leaks.", "Boat 2 leaks."]
    assert [question.text for question in maker.corpus.questions] == ["Where is the blue lamp?"]
    assert qa.source_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_documents_repeat_only_when_all_are_used_and_gold_ones_never(tmp_path):
    maker = qa.maker("qa_1", write(tmp_path / "dev.json", SQUAD))
    documents = documents_of(maker.make("a", 8))
    assert documents.count("The blue lamp hangs in Ostrow.") == 1
    others = [documents.count(d) for d in ("The red lamp hangs in Sella.", "Boat 1 leaks.", "Boat 2 leaks.")]
    assert sum(others) == 8 and min(others) == 2 and max(others) == 3


def test_hotpot(tmp_path):
    maker = qa.maker("qa_2", write(tmp_path / "dev.json", HOTPOT))
    samples = {question_of(s): s for s in (maker.make(str(i), 1) for i in range(20))}
    sample = samples["Who owns the mill by the ford?"]
    assert sample.outputs == ["Berit"] and len(sample.depths) == 2
    # both supporting paragraphs, and the distractor that the record brings
    assert set(documents_of(sample)) == {"Mill\nBerit owns it. It is old.", "Ford\nBy the mill.", "Quay\nWet."}
    other = samples["Is the quay wet?"]
    assert set(documents_of(other)) == {"Quay\nWet.", "Barn\nDry."} and other.outputs == ["yes"]


def without(record, key):
    return {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("qa_1", HOTPOT, r"format of SQuAD's dev-v2.0.json, which qa_1 reads"),
        ("qa_2", SQUAD, r"format of HotpotQA's hotpot_dev_distractor_v1.json, which qa_2 reads"),
        ("qa_1", {"data": [{"title": "x"}]}, "there is no 'paragraphs'"),
        ("qa_1", {"data": []}, "has no question with an answer"),
        ("qa_2", [], "has no question with an answer"),
        ("qa_2", [without(HOTPOT[0], "answer")], "there is no 'answer'"),
        ("qa_2", [HOTPOT[0] | {"supporting_facts": [["Attic", 0]]}], "there is no 'Attic'"),
        ("qa_2", [HOTPOT[0] | {"supporting_facts": []}], "no paragraph is marked as supporting"),
        ("qa_2", [HOTPOT[0] | {"answer": " "}], "every answer must be a text that is not blank"),
        ("qa_2", [HOTPOT[0] | {"answer": 3}], "every answer must be a text that is not blank"),
        ("qa_2", [HOTPOT[0] | {"context": {"title": ["Mill"], "sentences": [["x"]]}}], "format of HotpotQA's"),
        ("qa_2", [HOTPOT[1] | {"context": [["Quay", ["Wet."]]]}], "no other document can be a distractor"),
    ],
)
def test_wrong_content_names_the_file(tmp_path, task, content, message):
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        qa.maker(task, path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_what_is_not_json_names_the_file(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is not a JSON file in UTF-8"):
        qa.maker("qa_1", path)


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.json"
    for call in (lambda: qa.maker("qa_1", path), lambda: qa.source_sha256(path), lambda: qa.maker("qa_2", tmp_path)):
        with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.* cannot be read"):
            call()


@pytest.mark.parametrize("field, value", [("context", 7), ("context", " "), ("question", 7)])
def test_texts_of_another_type(tmp_path, field, value):
    content = json.loads(json.dumps(SQUAD))
    paragraph = content["data"][0]["paragraphs"][0]
    (paragraph if field == "context" else paragraph["qas"][0])[field] = value
    with pytest.raises(ValueError, match=f"dev.json: every {'document' if field == 'context' else 'question'} must"):
        qa.maker("qa_1", write(tmp_path / "dev.json", content))


def test_a_byte_order_mark(tmp_path):
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(SQUAD), encoding="utf-8-sig")
    assert qa.maker("qa_1", path).corpus.questions
