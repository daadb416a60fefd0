"""The types of the page are those of the server's OpenAPI document."""

from __future__ import annotations

import write_api_types


def test_the_types_are_those_of_the_document() -> None:
    """The committed file is what the document gives now; ``python write_api_types.py`` writes it again."""
    assert write_api_types.PATH.read_text(encoding="utf-8") == write_api_types.written()
