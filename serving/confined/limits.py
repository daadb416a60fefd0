"""What a confined piece of work may take, and how it can fail."""

from __future__ import annotations

from msgspec import Struct

MIB = 1 << 20
MAX_TEMPLATE = MIB  # characters of a chat template; the longest known have 30,000


class Limits(Struct, frozen=True, kw_only=True):
    """``seconds`` of processor time (a busy machine refuses nobody), ``memory`` in bytes above what the process had,
    ``output`` in characters. ``patience``: seconds after which the process is killed, however little
    it ran."""

    seconds: float
    memory: int
    output: int
    patience: float = 120.0


CHECK = Limits(seconds=60.0, memory=4096 * MIB, output=MIB)  # of a tokenizer or an adapter, when it is logged or loaded


def render_limits(size: int, context: int | None) -> Limits:
    """For one rendering of a request of ``size`` bytes with a model of ``context`` tokens.

    All three grow with what the caller has sent, so that only a template can exceed them. The output has room for the
    whole context, at more characters a token than any language's text has.
    """
    return Limits(
        seconds=2.0 + size / MIB,
        memory=256 * MIB + 32 * size,
        output=max(MIB, 64 * (context or 0)) + 8 * size,
    )


class Exceeded(Exception):
    """A limit was reached; the text says which: "more than 2 seconds of processor time"."""


class Refused(Exception):
    """What the work itself raised: ``kind`` is the exception's class, ``line`` where a template's syntax is wrong."""

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.line = kind, message, line

    @property
    def reason(self) -> str:
        """One short line."""
        return self.message.splitlines()[0][:200] if self.message.strip() else self.kind


class Ended(Exception):
    """The process ended under the work: a crash, or killed by somebody else; the text says by what."""


class NoProcess(Exception):
    """None was free in time, or none can be started."""
