"""The parts into which a model's text is parsed, and the handling of white space next to markers."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from .markers import SPACE

MAX_HELD_SPACE = 256  # characters; longer runs are text


class Text(Struct, frozen=True):
    """New text of the reply itself."""

    text: str


class Thought(Struct, frozen=True):
    """New text of the reasoning."""

    text: str


class CallBegin(Struct, frozen=True):
    """A call of ``name`` begins."""

    name: str


class CallArguments(Struct, frozen=True):
    """New text of the arguments of the call that has begun."""

    text: str


class CallEnd(Struct, frozen=True):
    """The call that has begun is complete."""


Part: TypeAlias = Text | Thought | CallBegin | CallArguments | CallEnd


class Trimmed:
    """A text without the white space that stands next to markers.

    White space is held until text follows. At the beginning and at the end of the text, white space next to a marker
    (``at_marker``) is dropped; within the text everything is kept.
    """

    __slots__ = ("_after_marker", "_begun", "_flows", "_held")

    def __init__(self, after_marker: bool = False) -> None:
        self._held = ""
        self._begun = False
        self._flows = False  # whether a run of white space is so long that it counts as text
        self._after_marker = after_marker

    @property
    def is_begun(self) -> bool:
        """Whether anything except white space has arrived since the last marker."""
        return self._begun and not self._after_marker

    def push(self, text: str) -> str:
        """Add ``text`` and return what is now certain to be text."""
        body = text.rstrip(SPACE)
        if body:
            if self._after_marker and not self._begun:
                self._held, body = "", body.lstrip(SPACE)
            out, self._held = self._held + body, text[len(text.rstrip(SPACE)) :]
            self._begun, self._after_marker, self._flows = True, False, False
        else:
            out, self._held = "", self._held + text
        if self._after_marker and not self._begun:
            self._held = ""
        elif self._flows or len(self._held) > MAX_HELD_SPACE:
            out, self._held, self._flows = out + self._held, "", True
        return out

    def at_marker(self) -> None:
        """Note that a marker stands at this place."""
        self._after_marker = True
        self._flows = False
        if not self._begun:
            self._held = ""

    def flush(self) -> str:
        """Return the white space still held at the end of the whole text, unless it stands after a marker."""
        out, self._held = "" if self._after_marker else self._held, ""
        return out


class Parts:
    """A collector of parts, which joins adjacent texts of the same kind."""

    def __init__(self) -> None:
        self._done: list[Part] = []
        self._pieces: list[str] = []
        self._kind: type[Text] | type[Thought] | type[CallArguments] | None = None

    def add(self, kind: type[Text] | type[Thought] | type[CallArguments], text: str) -> None:
        """Add text of a kind."""
        if not text:
            return
        if self._kind is not kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def put(self, part: CallBegin | CallEnd) -> None:
        """Add a part that is not text."""
        self._close()
        self._done.append(part)

    def take(self) -> list[Part]:
        """Return all parts since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        if self._kind is not None:
            self._done.append(self._kind("".join(self._pieces)))
            self._pieces, self._kind = [], None
