"""Makes parsers that divide a model's text, as it arrives, into text, reasoning and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..interface.request import ToolUse
from ..interface.tool_format import ToolFormat
from .channels import TOKENS, ChannelReader
from .marker_parser import MarkedReader
from .markers import literals, stand_ins
from .parser_base import Parser

__all__ = ["Parser", "call_id", "make_parser", "special_stand_ins"]

_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def special_stand_ins(special_tokens: Iterable[str], format: ToolFormat) -> dict[str, str]:
    """Return the characters that a parser of ``format`` gets for the special tokens it looks for, by token text."""
    return stand_ins(special_tokens, format, TOKENS if format.layout == "channels" else ())


def make_parser(
    format: ToolFormat,
    tools: ToolUse | None = None,
    *,
    in_reasoning: bool = False,
    specials: dict[str, str] | None = None,
    show_special: bool = False,
) -> Parser:
    """Return a parser for one text.

    If ``tools`` is None, no tool may be called and only reasoning is parsed. ``specials`` is the result of
    ``special_stand_ins``. With ``show_special``, special tokens that are not part of a marker appear in the text.
    """
    compiled = literals(format, tuple(sorted((specials or {}).items())))
    reader = ChannelReader if format.layout == "channels" else MarkedReader
    return reader(compiled, tools, in_reasoning, show_special)


def call_id(request_id: str, choice: int, call: int) -> str:
    """Return the id of a call in the form of OpenAI's ids; it depends only on the call's place in the reply."""
    number = int.from_bytes(hashlib.sha256(f"{request_id}/{choice}/{call}".encode()).digest())
    chars = []
    for _ in range(24):
        number, digit = divmod(number, len(_ID_CHARS))
        chars.append(_ID_CHARS[digit])
    return "call_" + "".join(chars)
