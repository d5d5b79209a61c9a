"""The command line is made from the settings, and answers mistakes in one sentence."""

from __future__ import annotations

import dataclasses

import pytest

from kvfactory.cli import METHOD_PREFIX, build_parser, method_settings, parse, settings_of, unread_settings
from kvfactory.methods import METHODS
from kvfactory.run_settings import optional_name
from kvfactory.suites.longbench import LongBenchSettings
from kvfactory.suites.needle import NeedleSettings
from kvfactory.suites.ruler import RulerSettings

RUNNERS = (LongBenchSettings, RulerSettings, NeedleSettings)
of_every_runner = pytest.mark.parametrize("settings", RUNNERS, ids=lambda settings: settings.program)
GIVEN = ["--method", "snapkv", "--model_path", "m"]


def checked(*argv):
    return parse([*GIVEN, *argv])[0].checked(METHODS)


@of_every_runner
def test_every_setting_has_a_flag_and_help(settings):
    parser = build_parser(settings)
    actions = {action.dest: action for action in parser._actions}
    declared = {f.name: f for f in dataclasses.fields(settings)}
    of_methods = {
        f.name
        for name in METHODS
        for f in dataclasses.fields(METHODS.get(name).Settings)
        if f.metadata.get("cli", True)
    }
    assert set(actions) == {"help"} | set(declared) | {METHOD_PREFIX + name for name in of_methods}
    assert all(action.help for action in actions.values())
    for name, f in declared.items():
        assert actions[name].option_strings == [f"--{spelling}" for spelling in (name, *f.metadata["alias"])]
        assert f.metadata["read"] not in (int, float), f"--{name}: whole_number and number read what is typed"
    text = parser.format_help()
    assert parser.prog == settings.program and settings.benchmark in text
    for name in (*declared, *of_methods):
        assert f"--{name}" in text


@of_every_runner
def test_every_alias_sets_its_setting(settings):
    aliased = {f.name: f for f in dataclasses.fields(settings) if f.metadata["alias"]}
    assert aliased
    for name, f in aliased.items():
        for alias in f.metadata["alias"]:
            parsed = parse([f"--{alias}", "7"], settings)[0]
            assert getattr(parsed, name) == f.metadata["read"]("7") != f.default


def test_a_flag_that_several_methods_read_names_them_and_their_defaults():
    help = next(a.help for a in build_parser()._actions if a.dest == METHOD_PREFIX + "window_size")
    for part in ("SnapKV 8, paper 32", "PyramidKV 8", "StreamingLLM -", "H2O 8, paper -"):
        assert part in help


@of_every_runner
def test_nothing_given_means_the_declared_defaults(settings):
    assert parse([], settings) == (settings(), {})


def test_values_are_read():
    settings, given = parse(
        ["--method", "SnapKV, h2o", "--dataset", "qasper", "--max_capacity_prompts", "128,512,128"]
        + [
            "--use_cache",
            "True",
            "--use_fast_tokenizer",
            "False",
            "--window_size",
            "16",
            "--l2_equalize",
            "--sinks",
            "-",
        ]
    )
    assert settings.method == ("SnapKV", "h2o") and settings.datasets == ("qasper",)
    assert settings.max_capacity_prompts == (128, 512)
    assert settings.use_cache is True and settings.use_fast_tokenizer is False
    assert given == {"window_size": "16", "l2_equalize": "on", "sinks": None}


def test_names_become_canonical():
    settings = checked(
        "--method", "SNAPKV,streamingllm,snapkv", "--datasets", "Qasper,TREC,qasper_e", "--stop_newline", "LCC"
    )
    assert settings.method == ("SnapKV", "StreamingLLM")
    assert settings.datasets == ("qasper", "trec", "qasper_e") and settings.stop_newline == ("lcc",)
    assert len(checked("--datasets", "all").datasets) == 21
    assert len(checked().datasets) == 16


@pytest.mark.parametrize(
    "argv, tags",
    [
        ((), ["512"]),
        (("--max_capacity_prompts", "-1"), ["512"]),
        (("--max_capacity_prompts", "64,-1,128"), ["64", "128"]),
        (("--max_capacity_prompts", "-1", "--max_capacity_prompts_ratio", "0.2"), ["r0.2"]),
        (("--max_capacity_prompts_ratio", "0.1,0.5"), ["r0.1", "r0.5"]),
        (("--budget_bytes", "25%"), ["bytes25"]),
        (("--budget_bytes", "25"), ["bytes25"]),
    ],
)
def test_budgets(argv, tags):
    assert [budget.tag for budget in checked(*argv).budgets()] == tags


@pytest.mark.parametrize("word", ["none", "None", "NONE", ""])
def test_none_counts_as_not_given(word):
    settings = checked("--merge", word, "--quant_method", word)
    assert settings.merge is None and settings.quant_method is None


def test_merges_and_quantisers_are_looked_up():
    assert optional_name("quantiser", "Kivi", ("kivi", "gear")) == "kivi"
    with pytest.raises(ValueError, match="unknown quantiser 'kivy'. Did you mean kivi"):
        optional_name("quantiser", "kivy", ("kivi", "gear"))
    assert checked("--merge", "Pivot").merge == "pivot"


@pytest.mark.parametrize(
    "argv, told",
    [
        (("--method", "snapvk"), "Did you mean SnapKV"),
        (("--datasets", "qaspr"), "Did you mean qasper"),
        (("--stop_newline", "samsun"), "Did you mean samsum"),
        (("--merge", "pivto"), "unknown merge 'pivto'. Did you mean pivot"),
        (("--quant_method", "kivy"), "unknown quantiser 'kivy'"),
        (("--nbits", "4"), "--nbits 4 is read by quantisers only"),
        (("--max_capacity_prompts", "0"), "--max_capacity_prompts 0"),
        (("--max_capacity_prompts", "64", "--max_capacity_prompts_ratio", "0.5"), "give one of them"),
        (("--budget_bytes", "10", "--max_capacity_prompts_ratio", "0.5"), "give one of them"),
        (("--max_capacity_prompts_ratio", "1.5"), "not in (0, 1]"),
        (("--budget_bytes", "0%"), "not in (0, 100]"),
        (("--budget_bytes", "inf"), "not in (0, 100]"),
        (("--max_capacity_prompts_ratio", "inf"), "not in (0, 1]"),
        (("--use_cache", "False"), "--use_cache False"),
        (("--max_new_tokens", "0"), "--max_new_tokens 0"),
        (("--max_num_examples", "-3"), "--max_num_examples -3"),
        (("--num_shards", "2"), "needs --shard_id"),
        (("--num_shards", "2", "--shard_id", "2"), "from 0 to 1"),
        (("--shard_id", "1"), "from 0 to 0"),
        (("--num_shards", "0"), "--num_shards 0"),
        (("--merge_shards",), "needs --num_shards"),
        (("--num_shards", "2", "--shard_id", "0", "--merge_shards"), "no --shard_id"),
        (("--method", "snapkv,h2o", "--run_name", "x"), "names one file"),
        (("--verify",), "belongs to --list_methods"),
    ],
)
def test_what_arguments_alone_decide_is_refused(argv, told):
    with pytest.raises(ValueError) as refusal:
        checked(*argv)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="--method is missing"):
        parse(["--model_path", "m"])[0].checked(METHODS)
    with pytest.raises(ValueError, match="--model_path is missing"):
        parse(["--method", "snapkv"])[0].checked(METHODS)


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--metod", "snapkv"], "did you mean --method"),
        (["--eval_batch_sise=4"], "--eval_batch_sise=4"),
        (["stray"], "unknown argument stray"),
        (["--seed", "x"], "argument --seed: 'x' is not a whole number"),
        (["--seed", "5_1"], "argument --seed: '5_1' is not a whole number"),
        (["--seed", "x" * 5000], "xxx... (5002 characters) is not a whole number"),
        (["--max_num_examples", "٣"], "argument --max_num_examples: '٣' is not a whole number"),
        (["--max_capacity_prompts", "128,5_1"], "'128,5_1' is not a whole number, or several"),
        (["--max_capacity_prompts_ratio", "0_1.5"], "'0_1.5' is not a number, or several"),
        (["--max_capacity_prompts_ratio", "nan"], "'nan' is not a number, or several"),
        (["--budget_bytes", "nan%"], "'nan%' is not a percentage"),
        (["--max_capacity_prompts", "12,a"], "several separated by commas"),
        (["--budget_bytes", "a%"], "percentage"),
        (["--method", " , "], "is not a name"),
        (["--protocol", "paper"], "invalid choice: 'paper'"),
        (["--attn_implementation", "flash"], "invalid choice: 'flash'"),
        (["--attn_implementation", "f" * 199], f"invalid choice: '{'f' * 59}... (201 characters) (choose from"),
        (["--attn_implementation", "f" * 198], f"invalid choice: '{'f' * 198}' (choose from"),
        (
            ["--attn_implementation", "f g " * 900],
            f"invalid choice: '{'f g ' * 14}f g... (3602 characters) (choose from",
        ),
        (["--" + "x" * 5000], f"unknown argument --{'x' * 58}... (5002 characters); see --help"),
        (["--use_cache", "maybe"], "True or False"),
        (["--seed"], "expected one argument"),
    ],
)
def test_typing_mistakes_are_one_sentence_and_exit_2(argv, told, capsys):
    refused_at_parsing(argv, LongBenchSettings, told, capsys)


@pytest.mark.parametrize(
    "settings, argv, told",
    [
        (RulerSettings, ["--lenghts", "4096"], "did you mean --lengths"),
        (RulerSettings, ["--context_length", "4k"], "argument --lengths: '4k' is not a whole number, or several"),
        (RulerSettings, ["--dataset", " , "], "argument --tasks: ' , ' is not a name"),
        (RulerSettings, ["--protocol", "factory"], "unknown argument --protocol"),
        (NeedleSettings, ["--s_len", "1k"], "'1k' is not a whole number"),
        (NeedleSettings, ["--depth", "50"], "did you mean --depths"),
        (NeedleSettings, ["--depth_kind", "square"], "invalid choice: 'square'"),
    ],
)
def test_typing_mistakes_of_other_runners(settings, argv, told, capsys):
    refused_at_parsing(argv, settings, told, capsys)


@of_every_runner
def test_messages_call_a_flag_by_its_main_name(settings, capsys):
    """Whichever spelling was typed, and none of the others."""
    for declared in dataclasses.fields(settings):
        takes_value = not isinstance(declared.default, bool)
        for typed in (declared.name, *declared.metadata["alias"]) if takes_value else ():
            told = f": argument --{declared.name}: expected one argument"
            refused_at_parsing([f"--{typed}"], settings, told, capsys)


def refused_at_parsing(argv, settings, told, capsys):
    with pytest.raises(SystemExit) as end:
        parse(argv, settings)
    error = capsys.readouterr().err
    assert error.startswith(f"{settings.program}: ")
    assert end.value.code == 2 and told in error and error.count("\n") == 1 and "usage" not in error


def test_settings_go_to_the_methods_that_read_them():
    given = {"kernel_size": "5", "window_size": "16"}
    assert settings_of("StreamingLLM", given) == {"window_size": "16"}
    assert unread_settings(("SnapKV", "StreamingLLM", "FullKV"), given) == {
        "StreamingLLM": ["kernel_size"],
        "FullKV": ["kernel_size", "window_size"],
    }
    with pytest.raises(ValueError, match="--kernel_size is not read by StreamingLLM or FullKV, only by .*SnapKV"):
        unread_settings(("StreamingLLM", "FullKV"), given)
    assert set(method_settings()["sinks"]) >= {"StreamingLLM"}
