"""Files of the code that the documents name: every one exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlflow_llm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(mlflow_llm.__file__).parent
DOCUMENTS = (
    "docs/structures.md",
    "docs/glossary.md",
    "docs/contributing.md",
    "SECURITY.md",
    *(f"docs/internals/{path.name}" for path in sorted((ROOT / "docs/internals").glob("*.md"))),
)
# Sources of the kernels are skipped: an installed package has none.
NAMED = re.compile(r"(?<![\w/.])((?:[a-z_]+/)*[a-z_0-9]+\.py|(?:[a-z_]+/)+)(?=[`\s,;:)])")


def sources() -> set[str]:
    """Return every file and folder of the package, the tests and their neighbours, as ``/a/b.py`` and ``/a/``."""
    found = set()
    for top in (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", ROOT / "docs"):
        inner = {folder for folder in (top / "flavors", top / "plugin", top / "serving") if folder.is_dir()}
        for base in {top, *inner}:  # the three are links in a checkout, which rglob does not follow
            for path in base.rglob("*"):
                name = "/" + path.relative_to(top.parent).as_posix()
                found.add(name + "/" * path.is_dir())
    beside = {f"/{path.name}" + "/" * path.is_dir() for path in ROOT.iterdir()}
    return found | beside | {"/setup.py", "/setup.cfg", "/mlflow_llm/"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_by_documents_exist(document: str) -> None:
    """Each ``path/file.py`` and ``folder/`` between backticks is the end of an existing path."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    named = {name for span in re.findall(r"`([^`]+)`", text) for name in NAMED.findall(span + " ")}
    assert named
    there = sources()
    missing = {name for name in named if not any(path.endswith("/" + name) for path in there)}
    assert not missing
