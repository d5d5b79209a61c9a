"""The written pages are true: their Python runs and prints what they show, their commands parse, their links lead on.

Every fenced ```python block of README.md and docs/*.md runs, those of one page one after the other in one namespace,
except blocks marked `no-test`. A ```text block right behind one is what it prints; `text smollm2` holds for the bundled
model alone, in whose place a tiny checkpoint stands unless the slow test runs. Blocks marked `file=NAME` are files.
Commands of ```bash blocks, those of benchmarks/*.md too, go through the parsers that they name.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import save_checkpoint

import kvfactory.assets
from kvfactory import attach, detach, docs, generate, graph_support
from kvfactory.cli import build_parser, parse, unread_settings
from kvfactory.kernels import dispatch
from kvfactory.listing import verify
from kvfactory.methods import METHODS
from kvfactory.monkeypatch import restore
from kvfactory.ruler.__main__ import build_parser as ruler_parser
from kvfactory.ruler.__main__ import parse_lengths
from kvfactory.ruler.tasks import canonical_ruler_tasks
from kvfactory.tiny_models import random_prompt, tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_PAGES = [
    "README.md",
    "docs/gqa_cache_layout.md",
    "docs/adding_a_method.md",
    "docs/footguns.md",
    "docs/index.md",
    "docs/ruler_and_needle.md",
    "docs/several_gpus.md",
    "docs/speed.md",
]
FOLDERS = (ROOT / "kvfactory", ROOT / "kvfactory" / "kernels")
RUNNERS = {settings.program: settings for settings in docs.RUNNERS}
_BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block: its language, the words behind it, its text, its line, and what the page says it prints."""

    language: str
    marks: tuple[str, ...]
    body: str
    line: int
    output: str | None
    output_marks: tuple[str, ...]


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    found = []
    for block, following in zip(blocks, [*blocks, None][1:], strict=True):
        words = block["info"].split() or [""]
        after = following["info"].split() if following and not text[block.end() : following.start()].strip() else []
        shown = after[:1] == ["text"]
        found.append(
            Snippet(
                words[0],
                tuple(words[1:]),
                block["body"],
                text.count("\n", 0, block.start()) + 2,
                following["body"] if shown else None,
                tuple(after[1:]) if shown else (),
            )
        )
    return found


def runnable(page: Path) -> list[Snippet]:
    python = [s for s in snippets(page) if s.language == "python" and "no-test" not in s.marks]
    return [s for s in python if not any(mark.startswith("file=") for mark in s.marks)]


def run_page(page: Path, bundled_model: bool) -> None:
    """Runs a page's blocks and compares what they print."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet in runnable(page):
        printed = io.StringIO()
        # Empty lines in front make tracebacks point into the page.
        code = compile("\n" * (snippet.line - 1) + snippet.body, str(page), "exec")
        with redirect_stdout(printed):
            exec(code, namespace)
        if snippet.output is not None and (bundled_model or "smollm2" not in snippet.output_marks):
            assert printed.getvalue() == snippet.output, f"{page.name}, line {snippet.line}"


PAGES_WITH_CODE = [page for page in PAGES if runnable(page)]
by_page = pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@by_page
def test_python_runs_and_prints_what_the_page_shows(page, checkpoint, monkeypatch):
    monkeypatch.setattr(kvfactory.assets, "model_path", lambda name: checkpoint)
    try:
        run_page(page, bundled_model=False)
    finally:
        restore()


@pytest.mark.slow
@by_page
def test_python_runs_on_the_bundled_model(page):
    try:
        run_page(page, bundled_model=True)
    finally:
        restore()


def test_pages_have_the_code_that_is_tested():
    """A changed fence must not quietly take code out of the tests."""
    assert {page.name for page in PAGES_WITH_CODE} >= {
        "README.md",
        "gqa_cache_layout.md",
        "several_gpus.md",
        "speed.md",
    }
    assert len(runnable(ROOT / "README.md")) == 4


def commands(page: Path) -> list[list[str]]:
    """The words of every shell command in a page's bash blocks that are not marked `no-check`."""
    found = []
    for snippet in snippets(page):
        if snippet.language == "bash" and "no-check" not in snippet.marks:
            lines = snippet.body.replace("\\\n", " ").splitlines()
            found += [words for line in lines if (words := shlex.split(line, comments=True))]
    return found


BENCHMARK_PAGES = [ROOT / "benchmarks" / name for name in ("README.md", "RESULTS.md")]
COMMANDS = [(str(page.relative_to(ROOT)), words) for page in [*PAGES, *BENCHMARK_PAGES] for words in commands(page)]
SCRIPTS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.sh"))


def accepted(parse_words):
    """What a parser makes of a command's words."""
    with redirect_stderr(io.StringIO()) as said:
        try:
            return parse_words()
        except (SystemExit, ValueError) as error:
            pytest.fail(f"{said.getvalue()}{error}")


@pytest.mark.parametrize(
    "words", [words for _, words in COMMANDS], ids=[f"{p}-{i}" for i, (p, _) in enumerate(COMMANDS)]
)
def test_commands_exist_and_accept_their_arguments(words, tmp_path, monkeypatch):
    assigned = list(itertools.takewhile(lambda word: "=" in word, words))
    environment, words = dict(word.split("=", 1) for word in assigned), words[len(assigned) :]
    read = (dispatch.VARIABLE, "CUDA_VISIBLE_DEVICES") if words[0] == "python" else re.findall(r"\$\{?(\w+)", SCRIPTS)
    assert environment.keys() <= set(read)
    assert environment.get(dispatch.VARIABLE, "triton") in ("torch", "triton")
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "python" and words[1] in RUNNERS:
        settings, given = accepted(lambda: parse(words[2:], RUNNERS[words[1]]))
        if not settings.list_methods:
            unread_settings(settings.checked(METHODS).method, given)
    elif words[0] == "python" and words[1].endswith(".py"):
        known = (ROOT / words[1]).read_text()
        assert all(f'"{word}"' in known for word in words if word.startswith("--"))
    elif words[:3] == ["python", "-m", "kvfactory.ruler"]:
        options = accepted(lambda: ruler_parser().parse_args(words[3:]))
        assert parse_lengths(options.lengths) and canonical_ruler_tasks(options.tasks.split(","))
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # what some of them insist on
        accepted(lambda: importlib.import_module(words[2]).parse(words[3:]))
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, words
    elif words[0] == "bash":
        # The script itself checks the order; an interpreter that only succeeds stands for the runner.
        done = subprocess.run(
            ["bash", str(ROOT / words[1]), *words[2:]],
            env={**os.environ, "PYTHON": "true", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    else:
        pytest.fail(f"no rule checks this command: {words}")


def cells(table: str) -> list[list[str]]:
    """The lines of a printed table as cells without the last, which is seconds, and the lines around it."""
    return [[cell.strip() for cell in line.split("|")[:-2]] or [line] for line in table.splitlines()]


SHOWN = [s for s in snippets(ROOT / "README.md") if s.language == "bash" and s.output is not None]


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SHOWN, ids=lambda snippet: snippet.body.split()[1])
def test_the_first_command_of_a_block_prints_the_table_behind_it(snippet, tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")
    words = shlex.split(snippet.body.replace("\\\n", " ").splitlines()[0])
    done = subprocess.run(
        [sys.executable, ROOT / words[1], *words[2:]], capture_output=True, text=True, cwd=tmp_path, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout) == cells(snippet.output)


def test_the_readme_shows_what_runners_print():
    assert [snippet.body.split()[1] for snippet in SHOWN] == ["run_longbench.py", "run_ruler.py"]


@pytest.mark.parametrize("name", WRITTEN_PAGES)
def test_links_lead_to_files(name):
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert targets or page.name == "adding_a_method.md"
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_speed_page_names_what_the_code_says():
    """Reasons for the loop, GPUs that kernels run on, and files."""
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    table = page[page.index("| reason given |") : page.index("`--decode hf`")]
    reasons = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    code = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (graph_support, dispatch))
    assert len(reasons) == 9 and not [reason for reason in reasons if reason not in code]
    assert all(name in page for name in dispatch.MEASURED)
    files = set(re.findall(r"`(?:kvfactory/)?([\w/]+\.py)`", page))
    known = {str(path.relative_to(folder)) for folder in FOLDERS for path in folder.rglob("*.py")}
    assert len(files) > 10 and files <= known


def test_readme_has_a_place_for_the_method_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- methods:begin -->") == text.count("<!-- methods:end -->") == 1
    assert text.index("<!-- methods:begin -->") < text.index("<!-- methods:end -->")


def example_file(name: str) -> str:
    [found] = [s for s in snippets(ROOT / "docs" / "adding_a_method.md") if f"file={name}" in s.marks]
    return found.body


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def valuenorm(tmp_path, monkeypatch):
    """The example method of docs/adding_a_method.md, registered for one test."""
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    monkeypatch.setattr(METHODS, "_canonical", dict(METHODS._canonical))
    for name in ("valuenorm.py", "test_valuenorm.py"):
        (tmp_path / name).write_text(example_file(name), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "valuenorm", None)
    monkeypatch.setitem(sys.modules, "test_valuenorm", None)
    load(tmp_path / "valuenorm.py")
    return METHODS.get("valuenorm")


def test_example_method_passes_its_own_test(valuenorm, tmp_path):
    load(tmp_path / "test_valuenorm.py").test_kept_tokens_are_those_of_a_loop()


def test_example_method_has_flags_and_works_in_every_claimed_cell(valuenorm):
    parsed = build_parser().parse_args(["--method", "valuenorm", "--value_power", "0.5"])
    assert "0.5" in vars(parsed).values()
    assert verify(print_fn=lambda line: None, methods=["ValueNorm"], families=("llama",)) == 0


def test_example_setting_changes_what_is_kept_and_is_checked(valuenorm):
    model, kept = tiny_model("llama"), []
    for power in (0, 4):
        attach(model, "valuenorm", max_capacity_prompt=24, kv_cache_granularity="kv_head", value_power=power)
        cache = generate(model, random_prompt(61), 1).rows[0].cache
        assert cache.kept_tokens == [[24, 24]] * 3
        kept.append(cache.kv_layers[0].store.view()[0].clone())
        detach(model)
    assert not torch.equal(*kept)
    with pytest.raises(ValueError, match="--value_power -1.0 is negative"):
        attach(model, "valuenorm", max_capacity_prompt=24, value_power=-1)


@pytest.mark.slow
def test_example_method_passes_the_contract_suite(valuenorm, tmp_path):
    """In a process of its own, since the suite is parametrised when it is collected."""
    (tmp_path / "register_example.py").write_text("import valuenorm\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "register_example", "tests/contract", "-k", "ValueNorm"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
