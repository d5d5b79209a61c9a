"""Writes the generated pages: `python -m kvfactory.docs`, or `--check` to name what is stale.

docs/methods.md comes from docstrings, capabilities and settings, docs/presets.md from the settings' cells, docs/cli.md
from the runners' parsers, and the method table of README.md from the capabilities. Parser help is laid out here
rather than by argparse, whose layout changes between Python versions.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path

from kvfactory.cli import DESCRIPTION, METHOD_PREFIX, build_parser
from kvfactory.listing import table_cells
from kvfactory.methods import METHODS
from kvfactory.settings import PRESETS, field_type, format_value
from kvfactory.suites.longbench import LongBenchSettings
from kvfactory.suites.needle import NeedleSettings
from kvfactory.suites.ruler import RulerSettings

RUNNERS = (LongBenchSettings, RulerSettings, NeedleSettings)
ROOT = Path(__file__).resolve().parents[1]
NOTICE = "<!-- Written by `python -m kvfactory.docs`; change the code and run it again. -->"
NOT_IN_PAPER = "none known"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """A header row and its lines as a Markdown table."""
    header, *body = [[_cell(cell) for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _names() -> list[str]:
    return sorted(METHODS, key=str.lower)


def _settings(method: str) -> list[Field]:
    """The settings that have a flag."""
    return [f for f in fields(METHODS.get(method).Settings) if f.metadata.get("cli", True)]


def _paragraphs(doc: str) -> str:
    """A docstring with each paragraph on one line, so that it is wrapped by the reader's window."""
    return "\n\n".join(" ".join(part.split()) for part in doc.split("\n\n"))


def _accepts(method: str, declared: Field) -> str:
    if declared.metadata["choices"]:
        return ", ".join(declared.metadata["choices"])
    kind = field_type(METHODS.get(method).Settings, declared.name)
    words = {bool: "on, off", int: "whole number", float: "number", tuple: "whole numbers, comma-separated"}
    return words.get(kind, "text")


def methods_page() -> str:
    """docs/methods.md: the table, then one section per method."""
    parts = [
        NOTICE,
        "# Methods",
        "What `python run_longbench.py --list_methods` prints, then each method: idea, source, settings. A setting "
        "that is not given takes the value of `--preset`; `-` means that there is none.",
        methods_table(),
    ]
    for name in _names():
        cluster = METHODS.get(name)
        capability = cluster.capability
        parts += [f"## {name}", _paragraphs(inspect.cleandoc(cluster.__doc__))]
        facts = [
            f"acts: {capability.stage}",
            f"the budget counts: {capability.budget_means}",
            f"granularities: {', '.join(capability.granularities)}"
            + (
                " (the same tokens for all heads of a group: stored at kv heads)"
                if capability.same_for_all_heads
                else ""
            ),
            f"backends: {', '.join(capability.backends)}",
            f"random: {'yes, seeded by (seed, example, layer)' if capability.randomised else 'no'}",
        ]
        facts += [f"refused: {what}, because {why}" for what, why in capability.refusals]
        parts.append("\n".join(f"- {fact}" for fact in facts))
        rows = [["setting", *PRESETS, "accepts", "meaning"]]
        for f in _settings(name):
            values = [format_value(f.metadata[preset].value) for preset in PRESETS]
            rows.append([f"`--{f.name}`", *values, _accepts(name, f), f.metadata["help"]])
        parts.append(markdown_table(rows) if len(rows) > 1 else "No settings of its own.")
    return "\n\n".join(parts) + "\n"


def methods_table() -> str:
    """The capability table in Markdown."""
    return markdown_table(table_cells())


def presets_page() -> str:
    """docs/presets.md: one row per method and setting, with what each source gives."""
    rows = [["method", "setting", "factory", "authors' code", "paper"]]
    for name in _names():
        for f in _settings(name):
            about = f.metadata
            authors = "" if about["authors"] is None else str(about["authors"])
            paper = str(about["paper"]) if about["in_paper"] else NOT_IN_PAPER
            rows.append([name, f"`--{f.name}`", str(about["factory"]), authors, paper])
    return (
        "\n\n".join(
            [
                NOTICE,
                "# Presets",
                "`--preset factory` (the default) sets what the original project's runner sets, `--preset paper` what "
                "each paper's experiments set, by its text or the authors' scripts; a preset fills only what was not "
                "given. Each value is marked: *read* in the code or the text, *run* and seen, or *recalled* and not "
                "checked. Recalled values in force are named in the run record. An empty cell: the authors' code has "
                f"no such setting, or it was not looked up. *{NOT_IN_PAPER}*: the same for the paper, and "
                "`--preset paper` keeps the factory's value.",
                markdown_table(rows),
            ]
        )
        + "\n"
    )


def _flag_rows(group: argparse._ArgumentGroup) -> list[list[str]]:
    return [_flag_row(action) for action in group._group_actions if "--help" not in action.option_strings]


def _flag_row(action: argparse.Action) -> list[str]:
    names = ", ".join(f"`{option}`" for option in action.option_strings)
    if action.nargs == 0:
        value = ""
    elif action.choices:
        value = ", ".join(str(choice) for choice in action.choices)
    else:
        value = str(action.metavar or action.dest.removeprefix(METHOD_PREFIX).upper())
    if action.nargs == "?":
        value += f" (alone: {action.const})"
    return [names, value, (action.help or "").replace("%%", "%")]


def cli_page() -> str:
    """docs/cli.md: by group what at least two runners share, then what each has of its own, in the order of --help."""
    parsers = [build_parser(settings) for settings in RUNNERS]
    tables = [{group.title: _flag_rows(group) for group in parser._action_groups} for parser in parsers]
    seen = Counter(tuple(row) for groups in tables for rows in groups.values() for row in rows)
    header = ["flag", "value", "meaning"]
    names = [f"`python {parser.prog}`" for parser in parsers]
    parts = [
        NOTICE,
        "# Command line",
        f"{', '.join(names)}: {DESCRIPTION.format('a benchmark')} First the flags that they share, then those of each "
        "runner, among them shared ones that it gives another default or a further spelling.",
    ]
    for title in dict.fromkeys(title for groups in tables for title in groups):
        rows = dict.fromkeys(tuple(row) for groups in tables for row in groups.get(title, ()))
        if shared := [row for row in rows if seen[row] > 1]:
            parts += [f"## {title}", markdown_table([header, *shared])]
    for parser, settings, groups in zip(parsers, RUNNERS, tables, strict=True):
        own = [row for rows in groups.values() for row in rows if seen[tuple(row)] == 1]
        parts += [f"## {parser.prog}: {settings.benchmark}", markdown_table([header, *own])]
    return "\n\n".join(parts) + "\n"


def readme_with_table(text: str) -> str:
    """README.md with the method table between its two markers.

    Raises:
        ValueError: a marker is missing, or they are in the wrong order.
    """
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"README.md must hold {BEGIN} and, after it, {END}: the method table is written between them")
    return text[: begin + len(BEGIN)] + "\n" + methods_table() + "\n" + text[end:]


def pages(root: Path = ROOT) -> dict[Path, str]:
    """{file: what it should hold}; README.md only when it exists."""
    docs = root / "docs"
    made = {docs / "methods.md": methods_page(), docs / "cli.md": cli_page(), docs / "presets.md": presets_page()}
    readme = root / "README.md"
    if readme.is_file():
        made[readme] = readme_with_table(readme.read_text(encoding="utf-8"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, or up to date; 1: --check found stale files; 2: README.md lacks its markers."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.docs", description="Write the generated pages.")
    parser.add_argument("--check", action="store_true", help="write nothing, name the stale files and exit 1")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder of README.md and docs/ (default: this checkout)"
    )
    args = parser.parse_args(argv)
    try:
        made = pages(args.root)
    except ValueError as error:
        print(f"kvfactory.docs: {error}", file=sys.stderr)
        return 2
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path.relative_to(args.root)} is stale: run python -m kvfactory.docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], encoding="utf-8", newline="\n")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
