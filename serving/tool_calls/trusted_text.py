"""Texts that are written partly by this server: a marker that the server writes into a message becomes a token, while
the same marker from a caller is encoded as text."""

from __future__ import annotations

from typing import Any


class Own(str):
    """A text written by this server: its control tokens are encoded as tokens."""

    __slots__ = ()


class Composed(str):
    """A string of joined ``parts``: those of type ``Own`` are the server's, all others are a caller's."""

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Composed:
        """Join ``parts``; a part that is itself ``Composed`` is replaced by its own parts."""
        made = super().__new__(cls, "".join(parts))
        made.parts = tuple(
            part for given in parts for part in (given.parts if isinstance(given, Composed) else (given,))
        )
        return made

    def __reduce__(self) -> Any:
        return Composed, self.parts


def joined(separator: str, texts: list[Composed]) -> Composed:
    """Return ``texts`` joined with ``separator``, which counts as written by the server."""
    parts: list[str] = []
    for text in texts:
        parts += [Own(separator), text] if parts else [text]
    return Composed(*parts)
