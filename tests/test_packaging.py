"""Files that name the same packages or the same version must not drift apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvfactory.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def _requirements(text: str) -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _needed() -> list[Requirement]:
    """What `pip install -e .[dev]` asks for."""
    dev = re.search(r"^dev = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL).group(1)
    named = "\n".join(re.findall(r'"([^"]+)"', dev))
    return _requirements((ROOT / "requirements.txt").read_text()) + _requirements(named)


def _applies(marker: Marker | None, python: str) -> bool:
    return marker is None or marker.evaluate({"python_version": python, "platform_system": "Linux"})


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_every_requirement_once(python):
    pins: dict[str, str] = {}
    for pin in _requirements((ROOT / "constraints.txt").read_text()):
        if _applies(pin.marker, python):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"{name} is pinned twice for Python {python}"
            pins[name] = str(pin.specifier).removeprefix("==")
    for wanted in _needed():
        pinned = pins.get(canonicalize_name(wanted.name))
        assert pinned, f"{wanted.name} has no pin for Python {python}"
        assert wanted.specifier.contains(pinned), f"{wanted} does not admit the pinned {pinned}"


def test_oldest_transformers_is_the_lower_bound():
    pins = {pin.name: str(pin.specifier) for pin in _requirements((ROOT / "constraints-oldest.txt").read_text())}
    lower = next(r for r in _needed() if r.name == "transformers").specifier
    pinned = pins["transformers"].removeprefix("==")
    assert lower.contains(pinned) and any(s.operator == ">=" and pinned.startswith(s.version) for s in lower)


def test_licences_name_every_dependency():
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    named = {
        canonicalize_name(word) for row in page.splitlines() if row[:1] == "|" for word in re.findall(r"[\w.-]+", row)
    }
    missing = [wanted.name for wanted in _needed() if canonicalize_name(wanted.name) not in named]
    assert not missing


def test_one_version_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
