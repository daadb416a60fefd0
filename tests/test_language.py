"""The language of code and documents: docstrings that stand by themselves, and the words of the glossary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlflow_llm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(mlflow_llm.__file__).parent
FRAGMENT = re.compile(r"(Of|What|Where|Who|By|As|Those|Which|Why)\b")
NO_VERB = re.compile(r"The|An?|At|For|From|Up|How|Whether|In|On|With|Without|Between|If|When|No|All|Each|Every|It")
CAPITALISED = re.compile(r"[A-Z][a-z]+(-[a-z]+)?")
PLURAL = re.compile(r"[A-Za-z-]+[^s]s")
FOLDERS = tuple(
    folder
    for folder in (
        *(PACKAGE / name for name in ("plugin", "flavors", "serving")),
        *(ROOT / name for name in ("tests", "benchmarks", "examples", "docs")),
    )
    if folder.is_dir()
)
GLOSSARY = ROOT / "docs/glossary.md"
EXEMPT = {"test_language.py", "glossary.md", "CHANGELOG.md"}  # they name the words


def python_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from folder.rglob("*.py")


def shown(path: Path) -> str:
    base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    return path.relative_to(base).as_posix()


def test_docstrings_are_sentences() -> None:
    """No docstring begins with a word that makes it a fragment, such as Of, What, By or As."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = [
        f"{shown(path)}: {getattr(node, 'name', 'module')}: {text.splitlines()[0][:60]}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and FRAGMENT.match(text)
    ]
    assert not found, "\n".join(found)


def first_words() -> Iterator[tuple[str, bool, str]]:
    """Yield, of each class and function with a docstring, its name, whether it is a class, and its first word.

    Tests are left out, as their docstrings state facts, and so are properties, which are named by nouns.
    """
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_class = isinstance(node, ast.ClassDef)
            if not is_class and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            text = ast.get_docstring(node)
            if text and not is_property and not node.name.startswith("test_"):
                yield f"{shown(path)}: {node.name}", is_class, text.split()[0].strip(".,:;")


def test_function_docstrings_begin_with_a_verb() -> None:
    """No function's docstring begins with an article, a preposition, a plural, a name or a sign; ruff's D401 refuses
    verbs that are not in the imperative."""
    found = [
        f"{where}: {word}"
        for where, is_class, word in first_words()
        if not is_class and (NO_VERB.fullmatch(word) or not CAPITALISED.fullmatch(word) or PLURAL.fullmatch(word))
    ]
    assert not found, "\n".join(found)


def test_class_docstrings_begin_with_a_noun() -> None:
    """No class's docstring begins with a verb with which a function's begins, in the imperative or with an s."""
    words = list(first_words())
    verbs = {word for _, is_class, word in words if not is_class}
    verbs |= {verb + ending for verb in verbs for ending in ("s", "es")}
    found = [f"{where}: {word}" for where, is_class, word in words if is_class and (word in verbs or word == "How")]
    assert not found, "\n".join(found)


def test_tests_state_a_fact() -> None:
    """Each test function has a docstring."""
    found = [
        f"{shown(path)}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and ast.get_docstring(node) is None
    ]
    assert not found, "\n".join(found)


def words() -> list[tuple[str, str]]:
    """Return the rows of the glossary's table of words not to use: a regular expression, and what to say instead."""
    table = GLOSSARY.read_text(encoding="utf-8").split("## Words not to use")[1]
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", table, flags=re.M)
    assert rows
    return [(pattern.replace("\\|", "|"), instead) for pattern, instead in rows]


@pytest.mark.parametrize(("pattern", "instead"), words())
def test_words_of_the_field_are_used(pattern: str, instead: str) -> None:
    """No file has a word that the glossary replaces; a line that reads a user's old name says "old name"."""
    word = re.compile(pattern)
    documents = [path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    found = [
        f"{shown(path)}:{number}: {line.strip()[:80]}"
        for path in [*python_files(), *documents, *ROOT.glob("*.md")]
        if path.name not in EXEMPT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word.search(line) and "old name" not in line
    ]
    assert not found, f"say {instead}:\n" + "\n".join(found)
