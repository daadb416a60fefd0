"""Escape untrusted text for logs and terminals.

There, control characters are commands (ANSI escape sequences) or forge lines (log injection), and bidirectional ones
make a text appear in an order that it does not have ("Trojan Source").
"""

from __future__ import annotations

import logging
import re

# C0 without tab and newline, DEL and C1; Unicode's directional marks, embeddings, overrides and isolates; its line and
# paragraph separators; halves of surrogate pairs, which no stream can encode.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile("[\t\n]")


def visible(text: str) -> str:
    """Return ``text`` with such characters as ``\\uXXXX``, which in JSON is the same text; tabs and newlines stay."""
    return _HIDDEN.sub(_escape, text)


def visible_line(text: str) -> str:
    """Escape a text as ``visible`` does, but into one line."""
    return _LINE.sub(_escape, visible(text))


def plain(text: str) -> str:
    """Return ``text`` without such characters, for programs that show it (a trace viewer)."""
    return _HIDDEN.sub("", text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class VisibleFormatter(logging.Formatter):
    """A formatter of a message in one line, whatever it quotes; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def configure(level: int, pattern: str) -> None:
    """Call ``logging.basicConfig`` for standard error, with a ``VisibleFormatter``."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(pattern))
    logging.basicConfig(level=level, handlers=[handler], force=True)
