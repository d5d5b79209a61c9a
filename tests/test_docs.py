"""Generated pages are current, complete, and found stale when they are not."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvfactory import docs
from kvfactory.cli import build_parser
from kvfactory.methods import METHODS


def test_the_committed_pages_are_current(capsys):
    assert docs.main(["--check"]) == 0, capsys.readouterr().err


def rows_of(section: str) -> list[str]:
    return [line for line in section.splitlines() if line.startswith("| `--")]


@pytest.mark.parametrize("settings", docs.RUNNERS, ids=lambda settings: settings.program)
def test_every_flag_is_in_the_command_line_page_with_its_aliases(settings):
    sections = docs.cli_page().split("\n## ")
    [own] = [section for section in sections if section.startswith(f"{settings.program}: {settings.benchmark}\n")]
    shared = [section for section in sections[1:] if not section.startswith("run_")]
    rows = rows_of(own) + [row for section in shared for row in rows_of(section)]
    actions = [action for action in build_parser(settings)._actions if action.dest != "help"]
    assert len(actions) > 30
    for action in actions:
        names = ", ".join(f"`{option}`" for option in action.option_strings)
        found = [row for row in rows if row.startswith(f"| {names} |")]
        assert len(found) == 1 and action.help.replace("%%", "%").replace("|", "\\|") in found[0], names


def test_what_runners_share_is_told_once():
    page = docs.cli_page()
    assert "%%" not in page
    for flag, times in (
        ("--method", 1),
        ("--seed", 1),
        ("--save_dir", 3),
        ("--chat_template", 3),
        ("--window_size", 1),
    ):
        assert page.count(f"\n| `{flag}`") == times, flag
    assert page.count("`--model_path`") == 2 and "`--model_path`, `--model_name`" in page
    assert "`--tasks`, `--datasets`, `--dataset`" in page and "`--lengths`, `--context_length`" in page
    for settings in docs.RUNNERS:
        assert page.count(f"`python {settings.program}`") == 1


@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_and_setting_is_in_the_pages(method):
    section = docs.methods_page().split(f"\n## {method}\n")[1].split("\n## ")[0]
    cluster = METHODS.get(method)
    assert " ".join(cluster.__doc__.split(".")[0].split()) in section and cluster.capability.stage in section
    rows = [line for line in docs.presets_page().splitlines() if line.startswith(f"| {method} |")]
    shown = [f for f in fields(cluster.Settings) if f.metadata.get("cli", True)]
    assert len(rows) == len(shown)
    for f, row in zip(shown, rows, strict=True):
        assert f"`--{f.name}`" in section and f"`--{f.name}`" in row
        # Every cell that holds a value says how it is known, and the paper's holds one only where the paper has one.
        factory, authors, paper = (cell.strip() for cell in row.replace("\\|", "/").split("|")[3:6])
        for cell, absent in (
            (factory, None),
            (authors, "" if f.metadata["authors"] is None else None),
            (paper, None if f.metadata["in_paper"] else "none known"),
        ):
            assert cell == absent if absent is not None else cell.endswith(("(read)", "(run)", "(recalled)"))


def test_a_value_that_only_the_factory_has_is_not_claimed_for_the_paper():
    page = docs.presets_page()
    assert "| SnapKV | `--score_dtype` | float32 (read) |  | none known |" in page
    assert "| Random | `--window_size` | 8 (read) |  | none known |" in page
    assert "| PyramidKV | `--pyramid_beta` | 20 (read) | 20 (read) | 20 (read) |" in page


def test_tables_are_rectangular():
    for page in (docs.cli_page(), docs.methods_page(), docs.presets_page()):
        width = None
        for line in page.splitlines():
            if not line.startswith("|"):
                width = None
                continue
            cells = line.replace("\\|", "/").count("|")
            assert width in (None, cells), line
            width = cells


def test_writing_checking_and_going_stale(tmp_path, capsys):
    root = ["--root", str(tmp_path)]
    assert docs.main([*root, "--check"]) == 1
    assert all(f"docs/{name}.md is stale" in capsys.readouterr().err or name for name in ("methods", "cli", "presets"))
    assert docs.main(root) == 0 and docs.main([*root, "--check"]) == 0
    page = tmp_path / "docs" / "presets.md"
    page.write_text(page.read_text().replace("SnapKV", "SnipKV", 1))
    capsys.readouterr()
    assert docs.main([*root, "--check"]) == 1
    assert capsys.readouterr().err == "docs/presets.md is stale: run python -m kvfactory.docs\n"
    assert "SnipKV" in page.read_text()  # --check writes nothing
    assert docs.main(root) == 0 and "SnipKV" not in page.read_text()


def test_the_readme_table_is_between_its_markers(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    assert docs.main(["--root", str(tmp_path)]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{docs.BEGIN}\n| method |") and text.endswith(f"|\n{docs.END}\nafter\n")
    assert "old" not in text and "PyramidKV" in text
    assert docs.main(["--root", str(tmp_path), "--check"]) == 0
    for broken in ("no markers", docs.BEGIN, f"{docs.END} {docs.BEGIN}"):
        readme.write_text(broken)
        capsys.readouterr()
        assert docs.main(["--root", str(tmp_path)]) == 2
        assert "README.md must hold" in capsys.readouterr().err
        assert readme.read_text() == broken
