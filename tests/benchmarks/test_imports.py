"""Imports of this package in benchmarks and examples, also in program strings, which mypy does not read."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
OURS = "mlflow_llm"


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield modules and imported names, those of programs in string constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == OURS:
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "__name__") for alias in node.names if alias.name.split(".")[0] == OURS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS in node.value:
            try:
                yield from imports(node.value)
            except (SyntaxError, ValueError):  # a text, not a program
                continue


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        return importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:  # the module is no package
        return False


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_imports_of_scripts_exist(script: Path) -> None:
    """Every name that a script imports from this package exists."""
    assert [found for found in imports(script.read_text()) if not is_there(*found)] == []


def test_programs_in_strings_are_read() -> None:
    """Imports of programs in string constants are found, and missing names are recognised."""
    program = "from mlflow_llm.serving import nowhere; import mlflow_llm.serving.system.files"
    found = list(imports(f"RUN = {program!r}; SAID = 'mlflow_llm: a name'"))
    assert found == [("mlflow_llm.serving", "nowhere"), ("mlflow_llm.serving.system.files", "__name__")]
    assert [is_there(*each) for each in [*found, ("mlflow_llm.serving.system.files", "nothing")]] == [
        False,
        True,
        False,
    ]
