"""The tree of errors: what its drawing says, and that no status stands anywhere else."""

from __future__ import annotations

import ast
import re
from http import HTTPStatus
from pathlib import Path

import pytest

from mlflow_llm.serving.interface import errors

SERVING = Path(errors.__file__).parent
FAILED_DOWNLOAD = "failures while downloading from http://s: ##### File x ##### 404 Client Error"
LINE = re.compile(r"^    ([│ ├└─]*)(\w+) +(\d{3})?", re.MULTILINE)


def test_the_drawing_is_the_tree() -> None:
    """The docstring draws every class under its parent, with its status."""
    drawing = (errors.__doc__ or "").partition("    ServingError")[2].partition("    PackagingError")[0]
    found: dict[str, tuple[str, int | None]] = {}
    parents = ["ServingError"]
    for branch, name, status in LINE.findall(drawing):
        depth = len(branch) // 4
        parents = [*parents[:depth], name]
        found[name] = (parents[depth - 1], int(status) if status else None)
    classes = [cls for cls in errors.walk() if cls is not errors.ServingError]
    assert {cls.__name__: cls.__bases__[0].__name__ for cls in classes} == {
        name: parent for name, (parent, _) in found.items()
    }
    for cls in classes:
        assert found[cls.__name__][1] in (None, cls.status)


def test_every_status_is_one_of_http() -> None:
    """Every status is one of HTTP, except 499, nginx's status for a client that went away."""
    known = {status.value for status in HTTPStatus} | {errors.Aborted.status}
    assert {cls.status for cls in errors.walk()} <= known


def test_a_status_stands_in_the_tree_alone() -> None:
    """Only the error tree has the status codes of failures: other modules raise or name its classes."""
    numbers = {cls.status for cls in errors.walk()}
    found = [
        f"{path.relative_to(SERVING)}:{node.lineno}: {node.value}"
        for folder in ("http", "dialects", "routing")
        for path in (SERVING / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in numbers
    ]
    assert found == []


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no such file\nhint: none", "no such file"),
        ("failures while downloading from http://s:\n##### File x #####\n404 Client Error\nmore", FAILED_DOWNLOAD),
        ("Error(s) in loading:\n\n\tMissing key: a.weight", "Error(s) in loading: Missing key: a.weight"),
        ("a:\n" * 9, "a: a: a:"),
        ("x" * 999, "x" * 200),
        (" \n ", "ValueError"),
    ],
    ids=range(6),
)
def test_the_reason_of_another_librarys_error(message: str, told: str) -> None:
    """The reason of another library's error is its first line, with the next one if the first only introduces it."""
    assert errors.reason(ValueError(message)) == told
