"""docs/dialects.md is made of the conformance rows, and these have every field of every dialect and document.

What a running server does with each is in ``tests/real/test_conformance.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import Part, declared, page
from conformance_rows import PARTS

from mlflow_llm.serving.dialects import DIALECTS

PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"
DOCUMENTED = ("databricks", "openvino", "mindie", "generate", "kserve")


def test_the_page_is_made_of_the_rows() -> None:
    """The page is the output of ``python tests/conformance.py > docs/dialects.md``."""
    assert PAGE.read_text(encoding="utf-8") == page(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_field_has_a_row(part: Part) -> None:
    """Each field that the dialect declares or its document names has a row, and no other field has one."""
    names = set(declared(DIALECTS[part.dialect].request_schemas[part.task]))  # type: ignore[index]
    rows = {name for name in part.rows if name.partition("[")[0] == name or name in part.of_document}
    assert names | set(part.of_document) == rows


def test_every_documented_dialect_has_a_part() -> None:
    """Each documented dialect has a part for each of its tasks."""
    expected = {(name, task) for name in DOCUMENTED if name in DIALECTS for task in DIALECTS[name].request_schemas}
    assert {(part.dialect, part.task) for part in PARTS} == expected
