from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from kvfactory.methods import METHODS
from kvfactory.settings import (
    MARKS,
    Cell,
    MethodSettings,
    as_dict,
    check_seed,
    coerce,
    format_value,
    number,
    parse_ints,
    parse_switch,
    recalled_values,
    resolve_settings,
    setting,
    shown,
    whole_number,
)


@dataclass(frozen=True)
class Example(MethodSettings):
    width: int = setting(7, "an odd width", paper=5)
    share: float = setting(0.2, "a share", paper=0.3, paper_mark="read")
    switch: bool = setting(True, "a switch")
    layers: tuple[int, ...] = setting((0, 1), "layers")
    word: str = setting("max", "a word", choices=("max", "mean"))
    maybe: int | None = setting(None, "perhaps a number")
    same: int = setting(3, "a number on which the paper agrees", paper=3)


def resolve(preset="factory", **given):
    return resolve_settings("Example", Example, preset, given)


def test_presets_fill_only_what_was_not_given():
    assert (resolve().width, resolve("paper").width, resolve("paper", width=9).width) == (7, 5, 9)
    assert resolve("paper").share == 0.3 and resolve("paper").switch is True


def test_a_setting_says_whether_the_paper_has_a_value():
    """One that it does not have keeps the factory's in the paper preset, and how that is known."""
    about = Example.__dataclass_fields__
    assert [name for name in about if about[name].metadata["in_paper"]] == ["width", "share", "same"]
    assert about["same"].metadata["paper"] == Cell(3, "recalled") and about["same"].metadata["factory"].mark == "read"
    assert about["switch"].metadata["paper"] == about["switch"].metadata["factory"] == Cell(True, "read")


def test_text_from_a_command_line_and_python_values_agree():
    typed = resolve(width="9", share="0.5", switch="off", layers="2,3", word="mean", maybe="4")
    assert typed == resolve(width=9, share=0.5, switch=False, layers=[2, 3], word="mean", maybe=4)
    assert resolve(layers="none").layers == () and resolve(maybe=None).maybe is None
    assert as_dict(typed) == dict(width=9, share=0.5, switch=False, layers=[2, 3], word="mean", maybe=4, same=3)


@pytest.mark.parametrize(
    "given, word",
    [
        (dict(width="wide"), "--width 'wide' is not a whole number"),
        (dict(width=7.5), "--width 7.5 is not a whole number"),
        (dict(width=True), "--width True is not a whole number"),
        (dict(width=float("inf")), "--width inf is not a whole number"),
        (dict(width=None), "--width"),
        (dict(width="5_1"), "--width '5_1' is not a whole number"),
        (dict(width="٧"), "--width '٧' is not a whole number"),
        (dict(layers="0,1_0"), "--layers '0,1_0' is not a comma-separated list"),
        (dict(layers=["0", "²"]), "--layers"),
        (dict(share="1_0.5"), "--share '1_0.5' is not a number"),
        (dict(share="nan"), "--share 'nan' is not a number"),
        (dict(share=float("nan")), "--share nan is not a number"),
        (dict(share="half"), "--share 'half' is not a number"),
        (dict(switch="perhaps"), "--switch 'perhaps' is not on or off"),
        (dict(layers="0;1"), "--layers '0;1' is not a comma-separated list"),
        (dict(layers=0), "--layers 0 is not a comma-separated list"),
        (dict(layers=(0.5,)), "--layers"),
        (dict(word="median"), "--word 'median' is not one of max, mean"),
        (dict(widht=3), "--widht is not read by Example.*Did you mean --width"),
        (dict(entirely_other=3), "--entirely_other is not read by Example, which reads --width"),
    ],
)
def test_bad_values_name_the_flag(given, word):
    with pytest.raises(ValueError, match=word):
        resolve(**given)


def test_an_unknown_preset():
    with pytest.raises(ValueError, match="--preset 'mine' is not one of factory, paper"):
        resolve("mine")


def test_recalled_values_in_force():
    assert recalled_values(resolve("paper"), "paper", {}) == ["width", "same"]
    assert recalled_values(resolve("paper", width=5), "paper", {"width": 5}) == ["same"]
    assert recalled_values(resolve(), "factory", {}) == []


@pytest.mark.parametrize(
    "value, text",
    [(None, "-"), (True, "on"), (False, "off"), ((0, 1), "0,1"), ((), "none"), (0.2, "0.2"), ("max", "max")],
)
def test_values_are_shown_as_they_are_typed(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize("text, value", [("on", True), ("True", True), ("1", True), ("off", False), ("NO", False)])
def test_switches(text, value):
    assert parse_switch(text) is value


@pytest.mark.parametrize("text, value", [("12", 12), ("-3", -3), ("+7", 7), (" 5 ", 5), ("007", 7)])
def test_whole_numbers(text, value):
    assert whole_number(text) == value


@pytest.mark.parametrize("text", ["5_1", "٧", "²", "１２", "", "-", "--1", "1.0", "1e3", "0x10", "1 2"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ValueError, match="is not a whole number"):
        whole_number(text)


@pytest.mark.parametrize(
    "text, value", [("0.5", 0.5), (".5", 0.5), ("3.", 3.0), ("-2", -2.0), ("2E-3", 0.002), (" 1 ", 1.0)]
)
def test_numbers(text, value):
    assert number(text) == value and number("inf") == -number("-Inf") == float("inf")


@pytest.mark.parametrize("text", ["1_0.5", "nan", "-NaN", "infinity", "٠.٥", "", ".", "e3", "1e", "0,5", "1 2"])
def test_what_is_no_number(text):
    with pytest.raises(ValueError, match="is not a number"):
        number(text)


LONG = "9" * 5000
HUGE = 10**5000  # more digits than Python writes out


@pytest.mark.parametrize(
    "given",
    [
        *(dict(width=value) for value in (LONG, LONG + "x", HUGE)),
        *(dict(layers=value) for value in (LONG, "0," + LONG, [HUGE, 0.5])),
        *({name: LONG + "x"} for name in ("share", "switch", "word")),
    ],
    ids=lambda given: next(iter(given)),
)
def test_long_values_are_cut_in_messages(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"^--{name} .* is not ") as error:
        resolve(**given)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "read, value, says",
    [
        (whole_number, LONG, r"'9+\.\.\. \(5002 characters\) has more digits than Python reads"),
        *((read, LONG + "x", "is not a") for read in (whole_number, number)),
        (parse_switch, LONG, "is not on or off"),
        *((check_seed, seed, "--seed .* is not a whole number from 0") for seed in (HUGE, 10**4000)),
    ],
    ids=lambda value: getattr(value, "__name__", "-"),
)
def test_readers_cut_what_they_echo(read, value, says):
    with pytest.raises(ValueError, match=says) as error:
        read(value)
    assert len(str(error.value)) < 200


def test_what_is_shown_whole_and_what_is_cut():
    assert shown("a" * 198) == repr("a" * 198) and shown([1, None]) == "[1, None]"
    assert shown("b" * 199) == "'" + "b" * 59 + "... (201 characters)"


def test_lists_of_numbers():
    assert (parse_ints("0,1"), parse_ints(" None "), parse_ints("")) == ((0, 1), (), ())
    assert str(Cell((0, 1), "run")) == "0,1 (run)"


@pytest.mark.parametrize("method", METHODS.names())
def test_every_setting_of_every_method_is_documented_and_survives_the_command_line(method):
    """Help, marks and a round trip of each preset's value through its text form."""
    for f in fields(METHODS.get(method).Settings):
        about = f.metadata
        assert about["help"] and not about["help"].endswith("."), f.name
        for preset in ("factory", "paper"):
            cell = about[preset]
            assert cell.mark in MARKS
            if cell.value is not None and about.get("cli", True):
                assert coerce(METHODS.get(method).Settings, f.name, format_value(cell.value)) == cell.value
        assert about["authors"] is None or about["authors"].mark in MARKS
