"""OpenAI's ``prediction``: the text that the caller expects, such as a file in which little will change."""

from __future__ import annotations

from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import Entry, any_of, list_of, reader, record, string, type_of
from ...interface.request import Draft
from .fields import Field

_PARTS = list_of(record(type=type_of("text"), text=Entry(string, required="a text")), "a list of text parts")


@reader(**any_of(string.schema, _PARTS.schema))
def _content(value: Any, path: str) -> str:
    """Read a text, or text parts, which are joined."""
    if isinstance(value, str):
        return string(value, path)
    if not isinstance(value, list | tuple):
        raise InvalidField(path, value, "a string or a list of text parts")
    return "".join(part["text"] for part in _PARTS(value, path))


_PREDICTION = record(type=type_of("content"), content=Entry(_content, required="a string or a list of text parts"))


@reader(**_PREDICTION.schema)
def prediction(value: Any, path: str) -> Draft:
    """Read ``{"type": "content", "content": …}``."""
    return Draft(text=_PREDICTION(value, path)["content"], field=path)


PREDICTION = (
    Field(
        name="prediction",
        read=prediction,
        target="sampling.draft",
        description="the expected text: where the model's text agrees with it, several tokens are computed at a time; "
        "the result is the same as without it",
    ),
)
