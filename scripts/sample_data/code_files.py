"""lcc and repobench-p: Python code that is cut before a line which the code before it determines."""

from __future__ import annotations

from .code_classes import KINDS, METHODS, Kind, class_lines, function_lines
from .draw import Draw, words
from .record import record

_OPTIONAL = ["check", "describe", "equal", "scaled"]
# (method that is cut in the last class, number of the field whose line is the answer)
_CUTS = (("to_row", 2), ("init", 3), ("from_row", 1), ("describe", 2), ("check", 3))


def _module_head(about: str) -> list[str]:
    return [f'"""{about}"""', "", "import csv", ""]


def _method_cut(kind: Kind, method: str, field: int) -> tuple[list[str], str]:
    """The lines of a method before the (last) line about a field, and that line."""
    lines = METHODS[method](kind)
    name = kind.names[field]
    # the error text of `check` is part of the answer, the condition before it is not
    at = max(i for i, line in enumerate(lines) if name in line and "return" not in line)
    return lines[:at], lines[at]


def lcc(sizes: tuple[int, ...]) -> list[dict]:
    """The next line of one file; `sizes` are words of context."""
    found = []
    for index, ((method, field), size) in enumerate(zip(_CUTS, sizes, strict=True)):
        draw = Draw("lcc", index)
        kinds = draw.shuffled(KINDS)
        last = kinds.pop()
        # every class has its methods in the same order; the last one breaks off in the method that is cut
        rest = [name for name in ["to_row", "from_row", *draw.sample(_OPTIONAL, 3)] if name != method]
        order = ["init", *rest] + ([] if method == "init" else [method])
        cut, answer = _method_cut(last, method, field)
        tail = ["", "", *class_lines(last, order[: order.index(method)]), "", *cut]
        lines = _module_head("Records of the municipal works and how they are read and written.")
        while words("\n".join(lines + tail)) < size:
            kind = kinds.pop()
            lines += ["", *class_lines(kind, order), *function_lines(draw, kind), ""]
        context = "\n".join([*lines[:-1], *tail]) + "\n"
        found.append(record("lcc", context, [answer], language="python"))
    return found


def _loads(kinds: list[Kind]) -> tuple[list[str], list[str]]:
    head = [
        "def read_folder(folder):",
        '    """Everything that the office keeps, read from the files of one folder."""',
    ]
    lines = [f'    {kind.plural} = load_{kind.plural}(folder / "{kind.plural}.csv")' for kind in kinds]
    return [f"load_{kind.plural}" for kind in kinds], head + lines


def _indexes(kinds: list[Kind]) -> tuple[list[str], list[str]]:
    names = ", ".join(kind.plural for kind in kinds)
    head = [f"def build_indexes({names}):", '    """One index for each list, in the order of the arguments."""']
    lines = [f"    {kind.single}_index = index_{kind.plural}({kind.plural})" for kind in kinds]
    return [f"index_{kind.plural}" for kind in kinds], head + lines


def _totals(kinds: list[Kind]) -> tuple[list[str], list[str]]:
    names = ", ".join(kind.plural for kind in kinds)
    head = [f"def yearly_report({names}):", '    """The totals of the year as a dict."""', "    report = {}"]
    lines = [f'    report["{kind.number}"] = total_{kind.number}({kind.plural})' for kind in kinds]
    return [f"total_{kind.number}" for kind in kinds], head + lines


def _round_trips(kinds: list[Kind]) -> tuple[list[str], list[str]]:
    names = ", ".join(kind.single for kind in kinds)
    head = [f"def test_round_trip({names}):", '    """Rows keep all fields."""']
    lines = [f"    assert {kind.name}.from_row({kind.single}.to_row()) == {kind.single}" for kind in kinds]
    return [kind.name for kind in kinds], head + lines


def _scalings(kinds: list[Kind]) -> tuple[list[str], list[str]]:
    names = ", ".join(kind.single for kind in kinds)
    head = [f"def test_scaled_by_two({names}):", '    """Only the number changes."""']
    lines = [f"    assert {kind.single}.scaled(2).{kind.number} == 2 * {kind.single}.{kind.number}" for kind in kinds]
    return [kind.name for kind in kinds], head + lines


# methods of a snippet; the first record has two of them, the next one three, and so on
_NEEDED = ["from_row", "check", "to_row", "equal", "scaled"]
_USES = (_loads, _indexes, _totals, _round_trips, _scalings)


def repobench_p(sizes: tuple[int, ...]) -> list[dict]:
    """The next line of a file that uses other files of its project; `sizes` are words of context."""
    found = []
    for index, (use, size) in enumerate(zip(_USES, sizes, strict=True)):
        draw = Draw("repobench-p", index)
        pool = draw.shuffled(KINDS)
        kinds, snippets = [], []
        package = draw.pick(("harbour", "townworks", "ledger", "office"))
        while sum(map(words, snippets)) < size or len(kinds) < 3:
            kind = pool.pop()
            kinds.append(kind)
            methods = ["init", *draw.shuffled(_NEEDED[: 2 + index])]
            body = class_lines(kind, methods) + function_lines(draw, kind)
            about = f"{kind.plural.capitalize()} of the {package}."
            path = f"# Path: {package}/{kind.plural}.py"
            snippets.append("\n".join([path, *_module_head(about), "", *body]) + "\n\n\n")
        used = draw.shuffled(kinds)[: max(3, len(kinds) // 2)]
        imports, lines = use(used)
        heads = [f"from {package}.{kind.plural} import {name}" for kind, name in zip(used, imports, strict=True)]
        path = f"# Path: {package}/{'test_records' if lines[0].startswith('def test') else 'main'}.py"
        shown = [path, *sorted(heads), "", "", *lines[:-1]]
        question = "\n".join(shown) + "\n"
        found.append(record("repobench-p", "".join(snippets), [lines[-1]], question, language="python"))
    return found
