"""Texts that are written partly by this server: a marker that the server writes into a message becomes a token, while
the same marker from a caller is encoded as text."""

from __future__ import annotations

from typing import Any


class TrustedText(str):
    """A text written by this server: its control tokens are encoded as tokens."""

    __slots__ = ()


class ComposedText(str):
    """A string of joined ``parts``: those of type ``TrustedText`` are the server's, all others are a caller's."""

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> ComposedText:
        """Join ``parts``; a part that is itself ``ComposedText`` is replaced by its own parts."""
        made = super().__new__(cls, "".join(parts))
        made.parts = tuple(
            part for given in parts for part in (given.parts if isinstance(given, ComposedText) else (given,))
        )
        return made

    def __reduce__(self) -> Any:
        return ComposedText, self.parts


def joined(separator: str, texts: list[ComposedText]) -> ComposedText:
    """Return ``texts`` joined with ``separator``, which counts as written by the server."""
    parts: list[str] = []
    for text in texts:
        parts += [TrustedText(separator), text] if parts else [text]
    return ComposedText(*parts)
