"""The steps of something that takes long, on standard error: how far each is, and the seconds that are left."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from . import logs
from .escape import visible_line
from .sizes import readable

REDRAW_SECONDS = 0.2
ESTIMATE_SECONDS = 1.0  # seconds of a step from which the rest is estimated
CLEAR = "\r\x1b[K"


class StepLine:
    """A display of steps on ``stream``. A terminal gets one line that is updated, anything else a line a step."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._updates = is_terminal(self._stream)
        self._name = ""
        self._began, self._first, self._drawn = 0.0, 0, 0.0
        self._is_shown = False

    def show(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show the step ``name``, of which ``done`` bytes of ``total`` (0: unknown) are done."""
        now = self._clock()
        is_new = name != self._name
        if is_new:
            self._name, self._began, self._first = name, now, done
        if not self._updates:
            if is_new:
                self._tell(f"{visible_line(name)}{f': {readable(total)}' if total else ''}", name, total)
            return
        if is_new or now - self._drawn >= REDRAW_SECONDS:
            self._drawn, self._is_shown = now, True
            self._write(f"{CLEAR}{visible_line(name)}{self._how_far(done, total, now - self._began)}")

    def _tell(self, line: str, name: str, total: int) -> None:
        """Tell what is no terminal of a step: where standard error is this process's log, as an event of it."""
        if self._stream is sys.stderr and logs.is_configured():
            logs.event("step", sentence=line, step=name, bytes=total or None)
        else:
            self._write(f"{line}\n")

    def clear(self) -> None:
        """Take the updated line away, so that other lines can be written. The next ``show`` begins a new step."""
        if self._is_shown:
            self._write(CLEAR)
        self._name, self._is_shown = "", False

    def _how_far(self, done: int, total: int, seconds: float) -> str:
        if not total:
            return f": {seconds:.0f} s" if seconds >= ESTIMATE_SECONDS else ""
        text = f": {readable(done)} of {readable(total)}"
        if seconds < ESTIMATE_SECONDS or done <= self._first:
            return text
        left = (total - done) * seconds / (done - self._first)
        return f"{text}, {duration(left)} left"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """Return whether a line on ``stream`` can be drawn again."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def duration(seconds: float) -> str:
    """Return a time that is left, as people say it: ``8 s``, ``3 min 5 s``."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


@contextmanager
def watched(line: StepLine, name: str, done: Callable[[], int], total: int) -> Iterator[None]:
    """Show the step ``name`` during the block; ``done()`` returns the bytes so far."""
    with drawn(line, name, lambda: line.show(name, done(), total), total):
        yield


@contextmanager
def drawn(line: StepLine, first: str, draw: Callable[[], object], total: int = 0) -> Iterator[None]:
    """Show the step ``first``, and call ``draw`` as often as is worth drawing during the block."""
    over = threading.Event()

    def keep_drawing() -> None:
        while not over.wait(REDRAW_SECONDS):
            draw()

    line.show(first, 0, total)
    drawer = threading.Thread(target=keep_drawing, name="mlflow-llm-steps", daemon=True)
    drawer.start()
    try:
        yield
    finally:
        over.set()
        drawer.join()
        line.clear()
