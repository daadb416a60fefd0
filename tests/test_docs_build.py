"""The documented command that builds the site is the one that the checks run, with the packages that it needs; the site
asks no other host for anything."""

from __future__ import annotations

import configparser
import hashlib
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def section(title: str) -> str:
    """Return the text of a section of the page for contributors."""
    text = (ROOT / "docs/contributing.md").read_text()
    found = re.search(rf"^## {title}\n(.*?)^## ", text, re.M | re.S)
    assert found, title
    return found[1]


def test_the_documented_command_is_what_the_checks_run() -> None:
    """docs/contributing.md installs the extra ``docs`` and runs the ``mkdocs`` command of tests/run.sh."""
    documented = section("Build the documentation")
    assert 'pip install -e ".[docs]"' in documented
    (command,) = re.findall(r"^mkdocs build[a-z -]*--strict", documented, re.M)
    assert re.search(rf"^check_beside {command} ", (ROOT / "tests/run.sh").read_text(), re.M)


@pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="run from a copy that has no mkdocs.yml")
def test_the_extra_has_each_extension() -> None:
    """Every extension and plugin that mkdocs.yml names, which is not MkDocs' own, is in the extra."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert {"mkdocstrings", "mkdocs-click", "mkdocs-material"} <= names()
    for name in re.findall(r"^  - (mkdocs[a-z-]*)", text, re.M):
        assert name in names()


def names() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {Requirement(line).name for line in config["options.extras_require"]["docs"].split("\n") if line}


def test_signatures_can_be_formatted() -> None:
    """mkdocstrings warns, and a strict build stops, where it has no formatter."""
    assert names() & {"ruff", "black"}


@pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="run from a copy that has no mkdocs.yml")
def test_the_site_asks_no_other_host() -> None:
    """The theme loads no fonts and no script for diagrams, and mkdocs.yml names no file of another host."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert "  font: false" in text
    assert "mermaid" not in text
    assert "http" not in text


def test_diagrams_are_drawn_from_their_sources() -> None:
    """Each diagram's image was drawn from the source beside it, needs no other file, and stands on a page."""
    sources = sorted((ROOT / "docs/diagrams").glob("*.mmd"))
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert len(sources) > 1
    for source in sources:
        image = source.with_suffix(".svg").read_text()
        digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
        assert image.endswith(f"<!-- {digest} -->\n"), f"python docs/diagrams/render.py draws {source.name}"
        assert set(re.findall(r"https?://[^\"\s]+", image)) == {"http://www.w3.org/2000/svg"}
        assert f"(diagrams/{source.stem}.svg)" in pages
