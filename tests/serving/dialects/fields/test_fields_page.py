"""docs/fields.md is what its script makes of the dialects."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, get_args

import pytest

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.request import Task

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "reference/fields.py"))


def test_the_page_is_what_the_script_prints(script: dict[str, Any]) -> None:
    """The page is the output of ``python docs/reference/fields.py > docs/fields.md``."""
    assert (DOCS / "fields.md").read_text(encoding="utf-8") == script["page"]()


def test_every_dialect_and_field_is_there(script: dict[str, Any]) -> None:
    """Each dialect has a name, each of its fields a row in the section of the task."""
    assert set(script["NAMES"]) >= set(DIALECTS)
    for task in get_args(Task):
        section = script["section"](task)
        for dialect in DIALECTS.values():
            for name, _ in script["fields"](dialect.request_schemas.get(task, {})):
                assert f"| `{name}` |" in section


def test_unsupported_fields_take_empty_values_only(script: dict[str, Any]) -> None:
    """null, false and what is empty ask for nothing."""
    takes = script["takes_something"]
    nothing = ({"type": "null"}, {"enum": [False]}, {"anyOf": [{"enum": [[], {}]}, {"type": "null"}]})
    assert not any(map(takes, nothing))
    assert all(map(takes, ({"type": "string"}, {"enum": ["a"]}, {"anyOf": [{"type": "null"}, {"type": "string"}]})))
