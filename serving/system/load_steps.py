"""The steps of loading a model, as the code that loads it reports them: a name, and bytes done of bytes in all."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class LoadStep(Struct, frozen=True, kw_only=True):
    """A step of a load: ``name`` is a verb ("packing"); ``total`` bytes are 0 where their number is not known."""

    name: str
    done: int = 0
    total: int = 0


Listener = Callable[[LoadStep], None]


class _Reporter:
    """The process's one listener: a process loads one model."""

    listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have every later step of this process reported to ``listener``; None ends that."""
    _Reporter.listener = listener


def report(name: str, done: int = 0, total: int = 0) -> None:
    """Report a step, or how far it has come."""
    if _Reporter.listener is not None:
        _Reporter.listener(LoadStep(name=name, done=done, total=total))
