"""The private parts of the product that tests touch, in one place.

Tests use what callers use. They come here only to put a part into a state that no call reaches at will (a disk that is
full between two writes, a thread that has died), or to see what is kept although no caller can tell: that memory was
given back. Each function says which of the two it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from mlflow_llm.flavors.llm.predict.language_model import LanguageModel
    from mlflow_llm.flavors.llm.predict.session import Session
    from mlflow_llm.serving.cli.http import Client
    from mlflow_llm.serving.tool_calls.parser_base import Reading


def session_of(model: LanguageModel) -> Session:
    """Return the session of a model, whose methods return texts and vectors and not the requests that they make."""
    return model._session


def connection_of(client: Client) -> HTTPConnection | None:
    """Return the connection that this thread keeps: only speed tells a caller whether it is used again."""
    return client._kept.slot.connection


def unread_text(parser: Reading) -> str:
    """Return the text that a parser of tool calls keeps, whose size is bounded."""
    return parser._text
