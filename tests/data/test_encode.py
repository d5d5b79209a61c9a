"""Prompt to ids and ids to text: the order of LongBench's pred.py and its token traps."""

from __future__ import annotations

import random
import string

import pytest
import torch

from kvfactory.data.encode import PromptEncoder
from kvfactory.data.prompts import load_prompts
from kvfactory.data.tasks import TASKS, get_task

NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
QA = get_task("hotpotqa")
LETTERS = string.ascii_lowercase + string.ascii_uppercase


def ids_of(tokenizer, text, add_special_tokens=True):
    return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]


def official(tokenizer, text, limit, head="", tail="", wrapped_specials=True):
    """pred.py's order, written out: tokenise, cut, decode the halves, wrap, tokenise."""
    ids = ids_of(tokenizer, text)
    if len(ids) > limit:
        half = int(limit / 2)
        text = tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
            ids[-half:], skip_special_tokens=True
        )
    return ids_of(tokenizer, head + text + tail, wrapped_specials if head else True)


# ---- the cut -------------------------------------------------------------------------------------------------------


def test_eleven_of_twenty_ids_keep_five_and_five(base_tokenizer, config):
    text = LETTERS[:19]
    assert len(ids_of(base_tokenizer, text)) == 20
    got = PromptEncoder(base_tokenizer, config(), max_input_length=11).encode(QA, text, 32)
    assert base_tokenizer.decode(got.input_ids) == "<s>" + LETTERS[:4] + LETTERS[14:19]
    assert (got.prompt_tokens, got.prompt_tokens_raw, got.truncated) == (10, 20, True)
    assert got.input_ids.tolist().count(base_tokenizer.bos_token_id) == 1
    assert got.input_ids.dtype == torch.long and got.input_ids.shape == (10,)
    whole = PromptEncoder(base_tokenizer, config(), max_input_length=20).encode(QA, text, 32)
    assert whole.input_ids.tolist() == ids_of(base_tokenizer, text)
    assert not whole.truncated
    assert PromptEncoder(base_tokenizer, config(), max_input_length=19).encode(QA, text, 32).prompt_tokens == 18


def test_the_order_equals_the_official_one_on_awkward_text(make_tokenizer, config):
    """Merges across the joint, characters of several bytes cut in half, special tokens in the text."""
    merges = [("a", "b"), ("ab", "a"), ("b", "b"), ("c", "a")]
    tokenizer = make_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", merges=merges)
    rng = random.Random(0)
    differs = 0
    for trial in range(200):
        text = "".join(rng.choice(["a", "b", "c", "\u00e9", "\u4e2d", "\U0001f600", " ", "\n"]) for _ in range(67))
        limit = rng.randrange(2, 90)
        got = PromptEncoder(tokenizer, config(), max_input_length=limit).encode(QA, text, 32)
        want = official(tokenizer, text, limit)
        assert got.input_ids.tolist() == want, (trial, limit)
        differs += got.truncated and got.prompt_tokens != 2 * (limit // 2)
    assert differs > 20, "re-tokenising must have changed the length somewhere, or the test shows nothing"


def test_the_wrap_comes_after_the_cut(llama3_tokenizer, config):
    encoder = PromptEncoder(llama3_tokenizer, config(), max_input_length=21)
    got = encoder.encode(QA, LETTERS, 32)
    want = official(llama3_tokenizer, LETTERS, 21, encoder.wrap.head, encoder.wrap.tail, wrapped_specials=False)
    assert got.input_ids.tolist() == want
    assert got.prompt_tokens > 21
    assert got.head_text.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nabc")


def test_lone_surrogates_are_replaced(base_tokenizer, config):
    got = PromptEncoder(base_tokenizer, config()).encode(QA, "a\ud800b\U0001f600", 32, "\ud800b")
    assert base_tokenizer.decode(got.input_ids) == "<s>a\ufffdb\U0001f600"
    assert got.question_seen


@pytest.mark.parametrize(
    ("text", "question", "seen"),
    [
        (LETTERS + "?", "XYZ", True),
        (LETTERS + "?", "abc", True),
        (LETTERS + "?", "TUV", False),  # the cut is inside
        (LETTERS + "?", "mnop", False),
        (LETTERS + "?", "VWX", False),  # its first letter is the last one removed
        (LETTERS + "?", "WXYZ", True),
        (LETTERS + "?", "abcd", True),
        (LETTERS + "?", "abcde", False),
        (LETTERS + "?", "", True),
        (LETTERS + "?", None, True),
        ("mnop" + LETTERS + "?", "mnop", False),  # the last occurrence is the question, not its echo in the context
    ],
)
def test_question_seen(base_tokenizer, config, text, question, seen):
    got = PromptEncoder(base_tokenizer, config(), max_input_length=10).encode(QA, text, 32, question)
    assert base_tokenizer.decode(got.input_ids[1:]) == text[:4] + "WXYZ?"
    assert got.question_seen is seen
    assert PromptEncoder(base_tokenizer, config()).encode(QA, text, 32, question).question_seen


def test_question_seen_with_a_slow_tokenizer(base_tokenizer, config, monkeypatch):
    monkeypatch.setattr(type(base_tokenizer), "is_fast", False)
    encoder = PromptEncoder(base_tokenizer, config(), max_input_length=10)
    assert encoder.encode(QA, LETTERS, 32, "WXYZ").question_seen
    assert not encoder.encode(QA, LETTERS, 32, "mnop").question_seen


# ---- wraps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TASKS))
def test_llama3_has_one_bos_and_the_no_chat_sets_stay_bare(llama3_tokenizer, config, name):
    got = PromptEncoder(llama3_tokenizer, config()).encode(get_task(name), "The text. ", 32)
    ids = got.input_ids.tolist()
    assert ids.count(llama3_tokenizer.bos_token_id) == 1
    assert ids[0] == llama3_tokenizer.bos_token_id
    text = llama3_tokenizer.decode(ids)
    if name in NO_CHAT:
        assert text == "<|begin_of_text|>The text. "
        assert got.template_tail_tokens == 0
    else:
        assert text.endswith("The text. <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
        # <|eot_id|>, header, nine letters, header end, two newlines
        assert got.template_tail_tokens == 14
        assert text.endswith(got.tail_text)


def test_force_chat_wraps_every_dataset(llama3_tokenizer, config):
    encoder = PromptEncoder(llama3_tokenizer, config(), force_chat=True)
    assert all(encoder.wraps(t) for t in TASKS.values())
    base = PromptEncoder(llama3_tokenizer, config())
    assert [t.name for t in TASKS.values() if not base.wraps(t)] == list(NO_CHAT)


def test_llama2_and_mistral_get_one_bos(llama2_tokenizer, config):
    for model_type, text in (("llama", "<s>[INST]P[/INST]"), ("mistral", "<s>P")):
        ids = PromptEncoder(llama2_tokenizer, config(model_type)).encode(QA, "P", 32).input_ids
        assert llama2_tokenizer.decode(ids) == text
    ids = PromptEncoder(llama2_tokenizer, config("mistral"), chat_template="tokenizer").encode(QA, "P", 32).input_ids
    assert llama2_tokenizer.decode(ids) == "<s>[INST] P [/INST]"


def test_a_bos_inside_the_data_is_not_taken_for_a_double(base_tokenizer, config):
    ids = PromptEncoder(base_tokenizer, config()).encode(QA, "a<s>b", 32).input_ids.tolist()
    assert ids.count(base_tokenizer.bos_token_id) == 2


def test_qwen_template_and_its_tail(qwen_tokenizer, config):
    encoder = PromptEncoder(qwen_tokenizer, config("qwen3"))
    got = encoder.encode(QA, "P", 32)
    assert qwen_tokenizer.decode(got.input_ids) == encoder.wrap.head + "P" + encoder.wrap.tail
    # <|im_end|> \n <|im_start|> a s s i s t a n t \n <think> \n \n </think> \n \n
    assert got.template_tail_tokens == 3 + 9 + 1 + 6
    assert encoder.window_text(got, 7) == "\n<think>\n\n</think>\n\n"
    assert encoder.window_text(got, 5) == "\n\n</think>\n\n"
    assert got.prompt_tokens_raw == 1


def test_the_tail_counts_only_whole_template_tokens(make_tokenizer, config, qwen_tokenizer):
    """A token that holds the prompt's last character and the template's first one is prompt."""
    tokenizer = make_tokenizer(template="{{ messages[0]['content'] }}xyz", merges=[("b", "x")])
    got = PromptEncoder(tokenizer, config("other")).encode(QA, "ab", 32)
    assert (got.prompt_tokens, got.template_tail_tokens) == (4, 2)


def test_head_and_tail_text_are_the_final_prompt(base_tokenizer, config):
    text = "".join(random.Random(1).choices(LETTERS, k=777))
    got = PromptEncoder(base_tokenizer, config()).encode(QA, text, 32)
    assert (got.head_text, got.tail_text) == (text[:200], text[-200:])


# ---- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "new", "limit"),
    [
        (4096, 512, 3500),
        (8192, 32, 7500),
        (32768, 512, 31500),
        (131072, 64, 127500),
        (2048, 128, 1856),
        (40960, 32, 40864),
    ],
)
def test_limit_follows_the_window(base_tokenizer, config, window, new, limit):
    assert PromptEncoder(base_tokenizer, config(window=window)).limit(new) == limit
    assert PromptEncoder(base_tokenizer, config(window=window), max_input_length=77).limit(new) == 77


def test_limit_errors(base_tokenizer, config):
    with pytest.raises(ValueError, match="--max_new_tokens 512 leaves no room .* 256 "):
        PromptEncoder(base_tokenizer, config(window=256)).limit(512)
    with pytest.raises(ValueError, match="no max_position_embeddings; pass --max_input_length"):
        PromptEncoder(base_tokenizer, config(window=None)).limit(32)
    assert (
        PromptEncoder(base_tokenizer, config(window=None), max_input_length=9).encode(QA, "abc", 32).prompt_tokens == 4
    )
    for bad in (1, 0, -3):  # half of 1 is 0, and the last 0 ids of a list are all of them
        with pytest.raises(ValueError, match=f"--max_input_length {bad} must be at least 2"):
            PromptEncoder(base_tokenizer, config(), max_input_length=bad)


def test_factory_limits_follow_the_family(llama2_tokenizer, llama3_tokenizer, qwen_tokenizer, config):
    for model_type, tokenizer, window, limit in (
        ("llama", llama2_tokenizer, 4096, 3950),
        ("llama", llama3_tokenizer, 131072, 7500),
        ("mistral", llama2_tokenizer, 32768, 31500),
    ):
        assert PromptEncoder(tokenizer, config(model_type, window), protocol="factory").limit(512) == limit
    with pytest.raises(ValueError, match="--protocol factory has no length limit for model type 'qwen2'.*--max_input"):
        PromptEncoder(qwen_tokenizer, config("qwen2"), protocol="factory").limit(32)


def test_a_prompt_beyond_the_window_is_refused(base_tokenizer, config):
    encoder = PromptEncoder(base_tokenizer, config(window=50), max_input_length=40)
    assert encoder.encode(QA, "a" * 39, 10).prompt_tokens == 40
    with pytest.raises(ValueError, match="40 tokens and 11 new ones do not fit .* 50; lower --max_input_length"):
        encoder.encode(QA, "a" * 39, 11)


def test_factory_runs_over_the_window_with_a_note(llama2_tokenizer, config):
    encoder = PromptEncoder(llama2_tokenizer, config(window=50), protocol="factory", max_input_length=48)
    [note] = encoder.encode(QA, "a" * 90, 32).notes
    assert "do not fit the model's window of 50" in note
    assert encoder.encode(QA, "a", 8).notes == ()
    encoder = PromptEncoder(llama2_tokenizer, config(window=50), protocol="factory", max_input_length=90)
    with pytest.raises(ValueError, match="lower --max_input_length"):
        encoder.encode(QA, "a" * 99, 8)


# ---- protocol factory ----------------------------------------------------------------------------------------------


def test_factory_llama2_is_wrapped_before_the_cut_on_every_dataset(llama2_tokenizer, config):
    encoder = PromptEncoder(llama2_tokenizer, config(), protocol="factory", max_input_length=20)
    for name in ("hotpotqa", "trec", "lcc"):
        got = encoder.encode(get_task(name), LETTERS, 32, LETTERS[-2:])
        assert llama2_tokenizer.decode(got.input_ids) == "<s>[INST] ab" + "YZ [/INST]"
        assert got.prompt_tokens == 20
        assert got.question_seen
        assert got.template_tail_tokens == len(" [/INST]")
        assert got.prompt_tokens_raw == 1 + len("[INST] ") + len(LETTERS) + len(" [/INST]")


def test_factory_llama3_equals_longbench_ids(llama3_tokenizer, config):
    for name in ("hotpotqa", "lcc"):
        a, b = (
            PromptEncoder(llama3_tokenizer, config(), protocol=p).encode(get_task(name), LETTERS, 32).input_ids.tolist()
            for p in ("factory", "longbench")
        )
        assert a == b


def test_space_cleanup_belongs_to_factory_and_follows_the_tokenizer_file(make_tokenizer, config):
    text = "it 's so , is n't it ?"
    for setting, cleaned in ((None, True), (True, True), (False, False)):
        more = {} if setting is None else {"clean_up_tokenization_spaces": setting}
        tokenizer = make_tokenizer(["<s>"], ["<0x0A>"], bos="<s>", eos="<s>", **more)
        ids = ids_of(tokenizer, text, add_special_tokens=False)
        want = "it's so, isn't it?" if cleaned else text
        assert PromptEncoder(tokenizer, config()).decode(ids) == (text, 0)
        assert PromptEncoder(tokenizer, config(), protocol="factory").decode(ids) == (want, 0)
        assert PromptEncoder(tokenizer, config(), legacy_decode_cleanup=True).decode(ids) == (want, 0)


# ---- stops and the first token -------------------------------------------------------------------------------------


def test_stop_ids(llama3_tokenizer, config):
    tokenizer = llama3_tokenizer
    eot, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|eot_id|>", "<|end_of_text|>"))
    newline = ids_of(tokenizer, "\n", add_special_tokens=False)[-1]
    encoder = PromptEncoder(tokenizer, config(eos_token_id=5))
    for name in TASKS:
        stops = encoder.stop_ids(get_task(name))
        assert (newline in stops) == (name == "samsum")
        assert stops[:3] == [5, eot, end]
        assert len(stops) == len(set(stops))
    assert encoder.stop_ids(get_task("samsum_e"))[-1] == newline
    more = PromptEncoder(tokenizer, config(eos_token_id=5), stop_newline=["TREC", "qasper_e"])
    assert [n for n in TASKS if newline in more.stop_ids(get_task(n))] == ["qasper", "trec", "samsum"]


def test_stop_ids_come_from_the_generation_config(base_tokenizer, config):
    own = base_tokenizer.eos_token_id

    def stops(generation_config, eos=9):
        return PromptEncoder(base_tokenizer, config(eos_token_id=eos), generation_config=generation_config).stop_ids(QA)

    class Generation:
        eos_token_id = [7, own, 7]

    assert stops(Generation) == [7, own]  # each id once
    Generation.eos_token_id = 3
    assert stops(Generation) == [3, own]
    Generation.eos_token_id = None
    assert stops(Generation) == [own]
    assert stops(None) == [9, own]
    assert stops(None, eos=None) == [own]


def test_min_new_tokens(base_tokenizer, llama3_tokenizer, config):
    encoder = PromptEncoder(base_tokenizer, config())
    assert [n for n in TASKS if encoder.min_new_tokens(get_task(n))] == ["samsum"]
    assert encoder.min_new_tokens(get_task("samsum")) == 1
    for every in (
        PromptEncoder(llama3_tokenizer, config(), protocol="factory"),
        PromptEncoder(base_tokenizer, config(), min_one_token=True),
    ):
        assert all(every.min_new_tokens(t) == 1 for t in TASKS.values())


# ---- ids to text ---------------------------------------------------------------------------------------------------


def test_decode_skips_specials_and_strips_nothing(llama3_tokenizer, config):
    encoder = PromptEncoder(llama3_tokenizer, config())
    ids = ids_of(llama3_tokenizer, "\n two , three \n<|eot_id|>", add_special_tokens=False)
    assert encoder.decode(torch.tensor(ids)) == ("\n two , three \n", 0)
    assert encoder.decode([]) == ("", 0)


def test_decode_takes_the_text_after_the_thinking_block(qwen_tokenizer, thinker_tokenizer, config):
    on = PromptEncoder(qwen_tokenizer, config("qwen3"), thinking="on")

    def ids(text):
        return ids_of(qwen_tokenizer, text, add_special_tokens=False)

    block = "<think>\nlet me see\n</think>"
    assert on.decode(ids(block + "\n\n 42\n<|im_end|>")) == (" 42\n", len(ids(block)))
    assert on.decode(ids("<think>\nlet me")) == ("", len(ids("<think>\nlet me")))
    assert on.decode(ids("at once\n")) == ("at once\n", 0)
    assert on.decode(ids(block + "x"), get_task("trec")) == (block + "x", 0)  # not wrapped, so no block
    always = PromptEncoder(thinker_tokenizer, config("qwen3"), thinking=9)
    assert always.decode(ids_of(thinker_tokenizer, "hm</think>\nyes", False)) == ("yes", 3)
    assert always.decode(ids_of(thinker_tokenizer, "hm", False)) == ("", 2)
    off = PromptEncoder(qwen_tokenizer, config("qwen3"))
    assert off.decode(ids("yes<|im_end|>")) == ("yes", 0)


def test_thinking_has_its_own_limit_inside_the_window(qwen_tokenizer, config):
    encoder = PromptEncoder(qwen_tokenizer, config("qwen3"), thinking=1000)
    assert (encoder.thinking_budget(), encoder.thinking_budget(QA), encoder.thinking_budget(get_task("lcc"))) == (
        1000,
        1000,
        0,
    )
    assert encoder.limit(32) == 8192 - 32 - 1000 - 64
    assert PromptEncoder(qwen_tokenizer, config("qwen3"), thinking=100).limit(32) == 7500
    tight = PromptEncoder(qwen_tokenizer, config("qwen3", 300), thinking=200, max_input_length=60)
    with pytest.raises(ValueError, match="232 new ones"):
        tight.encode(QA, "a" * 60, 32)
    assert tight.encode(get_task("lcc"), "a" * 60, 32).prompt_tokens == 60


# ---- all together --------------------------------------------------------------------------------------------------


def test_describe_is_plain_data(llama3_tokenizer, config):
    import json

    facts = PromptEncoder(llama3_tokenizer, config(eos_token_id=[1, 2])).describe()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["family"], facts["chat_wrap"], facts["window"]) == ("llama3", "llama3", 8192)
    assert facts["stop_ids"][:2] == [1, 2]


def test_real_records_encode_within_the_window(data_dir, llama3_tokenizer, config):
    from kvfactory.data.longbench import read_dataset

    prompts = load_prompts(data_dir / "LongBench", TASKS)
    encoder = PromptEncoder(llama3_tokenizer, config())
    cut = 0
    for name, task in TASKS.items():
        record = read_dataset(data_dir / "LongBench" / f"{name}.jsonl", name)[0]
        text = prompts.render(name, record)
        got = encoder.encode(task, text, task.max_new_tokens, record["input"])
        wrap = (encoder.wrap.head, encoder.wrap.tail) if task.chat else ("", "")
        assert got.input_ids.tolist() == official(llama3_tokenizer, text, 7500, *wrap, wrapped_specials=False)
        assert got.question_seen  # one token a byte: the question is always within the last 3,750
        cut += got.truncated
    assert cut > 10
