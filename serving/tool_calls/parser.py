"""A model's text read as it comes: what is text, what reasoning, and which tools are called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..request import ToolUse
from .channels import TOKENS, ChannelReader
from .formats import ToolFormat
from .marked import MarkedReader
from .markers import literals, stand_ins
from .reading import Parser

__all__ = ["Parser", "call_id", "make_parser", "special_stand_ins"]

_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def special_stand_ins(special_tokens: Iterable[str], format: ToolFormat) -> dict[str, str]:
    """The character that a parser of ``format`` gets for each special token that it looks for, by the token's text."""
    return stand_ins(special_tokens, format, TOKENS if format.layout == "channels" else ())


def make_parser(
    format: ToolFormat,
    tools: ToolUse | None = None,
    *,
    in_reasoning: bool = False,
    specials: dict[str, str] | None = None,
    show_special: bool = False,
) -> Parser:
    """A parser of one text. ``tools`` None: none may be called, and only reasoning is read. ``specials`` is what
    ``special_stand_ins`` gave; ``show_special``: special tokens that mean nothing here are shown, not left out."""
    compiled = literals(format, tuple(sorted((specials or {}).items())))
    reader = ChannelReader if format.layout == "channels" else MarkedReader
    return reader(compiled, tools, in_reasoning, show_special)


def call_id(request_id: str, choice: int, call: int) -> str:
    """The id of a call: the same for the same place in the same reply, as OpenAI's look."""
    number = int.from_bytes(hashlib.sha256(f"{request_id}/{choice}/{call}".encode()).digest())
    chars = []
    for _ in range(24):
        number, digit = divmod(number, len(_ID_CHARS))
        chars.append(_ID_CHARS[digit])
    return "call_" + "".join(chars)
