"""The types of the page are those of the server's OpenAPI document."""

from __future__ import annotations

import pytest
import write_api_types


@pytest.mark.skipif(not write_api_types.PATH.parent.is_dir(), reason="run from a copy without the page's sources")
def test_the_types_are_those_of_the_document() -> None:
    """The committed file is what the document gives now; ``python write_api_types.py`` writes it again."""
    assert write_api_types.PATH.read_text(encoding="utf-8") == write_api_types.written()
