"""Limits of confined work, and the exceptions for the ways in which it fails."""

from __future__ import annotations

from msgspec import Struct

from .child import image_limits

MIB = 1 << 20
MAX_TEMPLATE = MIB  # characters of a chat template; the longest known have 30,000


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of one piece of work.

    ``seconds`` is CPU time, so that a busy machine causes no refusal; ``memory`` is in bytes beyond what the
    process had before; ``output`` is in characters, ``raw`` is the bytes of output that are no text. After ``patience``
    seconds of elapsed time, the process is killed in any case.
    """

    seconds: float
    memory: int
    output: int
    raw: int = 0
    patience: float = 120.0


CHECK = Limits(seconds=60.0, memory=4096 * MIB, output=MIB)  # to check a tokenizer or adapter that is logged or loaded


def render_limits(size: int, context: int | None) -> Limits:
    """Return the limits for rendering a request of ``size`` bytes, for a model with a context of ``context`` tokens.

    All three grow with the request, so that only a template can exceed them. The output has room for the whole context,
    with more characters per token than text in any language has.
    """
    return Limits(
        seconds=2.0 + size / MIB,
        memory=256 * MIB + 32 * size,
        output=max(MIB, 64 * (context or 0)) + 8 * size,
    )


def decode_limits(pixels: int, size: int) -> Limits:
    """Return the limits for decoding an image of at most ``pixels`` from a file of ``size`` bytes.

    The process lowers them when it knows how many pixels there are.
    """
    seconds, memory = image_limits(pixels, size)
    return Limits(seconds=seconds, memory=memory, output=MIB, raw=3 * pixels)


class Exceeded(Exception):
    """A limit was reached; the text says which: "more than 2 seconds of CPU time"."""


class Refused(Exception):
    """The work itself raised an exception of class ``kind``; ``line`` is the line of a template's syntax error."""

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.line = kind, message, line

    @property
    def reason(self) -> str:
        """The first line of the message, shortened."""
        return self.message.splitlines()[0][:200] if self.message.strip() else self.kind


class Ended(Exception):
    """The process ended during the work, usually because another program killed it; the text names the signal."""


class NoProcess(Exception):
    """No process was free in time, or none can be started."""
