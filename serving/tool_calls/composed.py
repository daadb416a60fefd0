"""Texts that are partly ours: a marker that we write in a message is a token, the same one from a caller is text."""

from __future__ import annotations

from typing import Any


class Own(str):
    """A text of ours: its control tokens are tokens."""

    __slots__ = ()


class Composed(str):
    """``parts`` joined: ``Own`` ones are ours, all others a caller's."""

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Composed:
        """What is composed itself counts by its parts."""
        made = super().__new__(cls, "".join(parts))
        made.parts = tuple(
            part for given in parts for part in (given.parts if isinstance(given, Composed) else (given,))
        )
        return made

    def __reduce__(self) -> Any:
        return Composed, self.parts


def joined(separator: str, texts: list[Composed]) -> Composed:
    """``texts`` with ``separator``, which is ours, between them."""
    parts: list[str] = []
    for text in texts:
        parts += [Own(separator), text] if parts else [text]
    return Composed(*parts)
