"""The command line: built from `RunSettings` and from the settings of every method; nothing is typed twice."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn

from kvfactory.methods import METHODS
from kvfactory.run_settings import GROUPS, KINDS, RunSettings
from kvfactory.settings import field_type, format_value, shortened, shown, whole_number
from kvfactory.suites.longbench import LongBenchSettings

METHOD_PREFIX = "method_setting_"
METHOD_GROUP = "Settings of methods (default: the preset's value)"
DESCRIPTION = "Run {} with KV-cache reduction methods and measure what they store."


class OneSentenceParser(argparse.ArgumentParser):
    """argparse whose errors are one sentence on standard error, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        # argparse's own message repeats the value whole, however long it is.
        message = re.sub(r"(?<=invalid choice: ).*(?= \(choose from)", lambda value: shortened(value[0]), message)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def build_parser(settings: type[RunSettings] = LongBenchSettings) -> argparse.ArgumentParser:
    """The parser of a runner whose flags, besides those of methods, are the fields of `settings`.

    Flags that were not given are absent from the namespace. Actions of method settings have a `dest` that begins with
    `METHOD_PREFIX`.
    """
    parser = OneSentenceParser(
        prog=settings.program,
        description=DESCRIPTION.format(settings.benchmark),
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.HelpFormatter,
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for declared in fields(settings):
        _add_flag(groups[declared.metadata["group"]], declared)
    group = parser.add_argument_group(METHOD_GROUP)
    shared = {f.name for f in fields(settings)}
    for name, readers in method_settings().items():
        assert name not in shared, f"the method setting {name} has the name of a shared flag"
        _add_method_flag(group, name, readers)
    return parser


def method_settings() -> dict[str, dict[str, Field]]:
    """{setting: {method that reads it: its field}}, methods in the order of the registry; Python-only ones are out."""
    found: dict[str, dict[str, Field]] = {}
    for method in METHODS:
        for declared in fields(METHODS.get(method).Settings):
            if declared.metadata.get("cli", True):
                found.setdefault(declared.name, {})[method] = declared
    return found


def _reader(read: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """`read` with argparse's kind of error: what the value is not."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {KINDS.get(read, 'accepted')}") from None

    convert.__name__ = name
    return convert


def _add_flag(group: Any, declared: Field) -> None:
    about = declared.metadata
    names = [f"--{name}" for name in (declared.name, *about["alias"])]
    help = about["help"]
    if declared.default is False:
        group.add_argument(*names, dest=declared.name, action="store_true", help=_escaped(help))
        return
    shown = declared.default if declared.default is not MISSING else None
    if shown not in (None, ()) and "default" not in help:
        help += f" (default: {shown})"
    options: dict[str, Any] = {"dest": declared.name, "help": _escaped(help)}
    if about["choices"]:
        options["choices"] = about["choices"]
    else:
        options |= {"type": _reader(about["read"], declared.name), "metavar": about["metavar"] or _metavar(declared)}
    if declared.default is True:
        options |= {"nargs": "?", "const": True}
    group.add_argument(*names, **options)


def _metavar(declared: Field) -> str:
    read = declared.metadata["read"]
    if read in (str, whole_number):
        return "N" if read is whole_number else "TEXT"
    return "A[,B]"


def _add_method_flag(group: Any, name: str, readers: dict[str, Field]) -> None:
    helps: dict[str, list[str]] = {}
    for method, declared in readers.items():
        choices = declared.metadata["choices"]
        text = declared.metadata["help"] + (f" [{', '.join(choices)}]" if choices else "")
        helps.setdefault(text, []).append(f"{method} {_defaults(declared)}")
    text = "; ".join(f"{text} ({', '.join(who)})" for text, who in helps.items())
    kinds = {field_type(METHODS.get(method).Settings, name) for method in readers}
    options: dict[str, Any] = {"nargs": "?", "const": "on"} if kinds == {bool} else {}
    metavar = {bool: "on|off", int: "N", float: "X", tuple: "N,N"}.get(kinds.pop(), "WORD")
    group.add_argument(f"--{name}", dest=METHOD_PREFIX + name, metavar=metavar, help=_escaped(text), **options)


def _escaped(help: str) -> str:
    """argparse fills in %-placeholders, of which our texts have none."""
    return help.replace("%", "%%")


def _defaults(declared: Field) -> str:
    factory, paper = (format_value(declared.metadata[preset].value) for preset in ("factory", "paper"))
    return factory if factory == paper else f"{factory}, paper {paper}"


def parse(argv: Sequence[str], settings: type[RunSettings] = LongBenchSettings) -> tuple[Any, dict[str, str | None]]:
    """(shared settings as typed, method settings that were given, as text; "-" means no value).

    Exits with code 2 and one sentence on standard error for flags or values that do not exist.
    """
    parser = build_parser(settings)
    try:
        namespace, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:  # argparse calls a flag by all its spellings, the main one first
        parser.error(f"argument {(error.argument_name or '').partition('/')[0]}: {error.message}")
    if unknown:
        parser.error(_unknown_argument(parser, unknown))
    values = vars(namespace)
    given = {
        name.removeprefix(METHOD_PREFIX): None if values[name] == "-" else values[name]
        for name in values
        if name.startswith(METHOD_PREFIX)
    }
    return settings(**{k: v for k, v in values.items() if not k.startswith(METHOD_PREFIX)}), given


def _unknown_argument(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    wrong = next((text for text in unknown if text.startswith("-")), unknown[0])
    name = wrong.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; see --help"
    return f"unknown argument {shortened(wrong)}{hint}"


def settings_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The given settings that `method` reads."""
    names = {declared.name for declared in fields(METHODS.get(method).Settings)}
    return {name: value for name, value in given.items() if name in names}


def unread_settings(methods: Sequence[str], given: dict[str, Any]) -> dict[str, list[str]]:
    """{method: given settings it does not read} for a call with several methods, each setting read by one of them.

    Raises:
        ValueError: a setting that none of the methods reads, with near matches among what they read.
    """
    known = method_settings()
    for name in given:
        if not set(known[name]) & set(methods):
            reads = sorted({n for n, readers in known.items() if set(readers) & set(methods)})
            near = difflib.get_close_matches(name, reads, n=2, cutoff=0.75)
            hint = f" Did you mean {' or '.join('--' + n for n in near)}?" if near else ""
            raise ValueError(f"--{name} is not read by {' or '.join(methods)}, only by {', '.join(known[name])}.{hint}")
    unread = {m: [name for name in given if m not in known[name]] for m in methods}
    return {method: names for method, names in unread.items() if names}
