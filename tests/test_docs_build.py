"""The documented command that builds the site is the one that the checks run, with the packages that it needs."""

from __future__ import annotations

import configparser
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
    assert {"mkdocstrings", "mkdocs-click"} <= names()
    for name in re.findall(r"^  - (mkdocs[a-z-]*)", text, re.M):
        assert name in names()


def names() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {Requirement(line).name for line in config["options.extras_require"]["docs"].split("\n") if line}


def test_signatures_can_be_formatted() -> None:
    """mkdocstrings warns, and a strict build stops, where it has no formatter."""
    assert names() & {"ruff", "black"}
