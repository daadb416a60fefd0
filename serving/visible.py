"""Escaping of untrusted text for logs and terminals, where control characters are commands (ANSI escape sequences) or
forge lines (log injection), and bidirectional ones show a text in another order than it has ("Trojan Source")."""

from __future__ import annotations

import logging
import re

# C0 without tab and newline, DEL and C1; Unicode's marks, embeddings, overrides and isolates of direction; its own line
# and paragraph separators; halves of surrogate pairs, which no stream can encode.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile("[\t\n]")


def visible(text: str) -> str:
    """``text`` with such characters as ``\\uXXXX``, which inside of JSON is the same text; tabs and newlines stay."""
    return _HIDDEN.sub(_escape, text)


def visible_line(text: str) -> str:
    """As ``visible``, and in one line."""
    return _LINE.sub(_escape, visible(text))


def plain(text: str) -> str:
    """``text`` without such characters, for what others show (a trace's viewer)."""
    return _HIDDEN.sub("", text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class VisibleFormatter(logging.Formatter):
    """A message in one line, whatever it quotes; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def configure(level: int, pattern: str) -> None:
    """``logging.basicConfig`` to standard error, made visible."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(pattern))
    logging.basicConfig(level=level, handlers=[handler], force=True)
