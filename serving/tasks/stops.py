"""Stop strings, matched on text as it grows, across token borders."""

from __future__ import annotations

from typing import NamedTuple


class Match(NamedTuple):
    """``stop`` was found; ``start`` and ``end`` are its place in the text since the beginning."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Takes text piece by piece and holds back only what may be the beginning of a stop string."""

    __slots__ = ("_held", "_length", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._length = 0  # characters let through

    @property
    def position(self) -> int:
        """How many characters have been let through."""
        return self._length

    def push(self, text: str, matching: bool = True) -> tuple[str, Match | None]:
        """``(text let through, match)``. With a match the text ends before it and nothing must be pushed again.

        The match is the one that is complete first; of those that end together the one that starts first.
        ``matching`` False lets everything through (before ``min_tokens``).
        """
        if not self._stops:
            self._length += len(text)
            return text, None
        whole = self._held + text
        if not matching:
            return self._release(whole, len(whole)), None
        found = self._find(whole)
        if found is not None:
            stop, start = found
            free = self._release(whole, start)
            return free, Match(stop, self._length, self._length + len(stop))
        return self._release(whole, len(whole) - self._partial(whole)), None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return self._release(self._held, len(self._held))

    def _release(self, whole: str, count: int) -> str:
        self._held = whole[count:]
        self._length += count
        return whole[:count]

    def _find(self, whole: str) -> tuple[str, int] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := whole.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return stop, start

    def _partial(self, whole: str) -> int:
        """Length of the longest end of ``whole`` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            at = max(0, len(whole) - len(stop) + 1)
            while (at := whole.find(stop[0], at)) >= 0 and len(whole) - at > longest:
                if stop.startswith(whole[at:]):
                    longest = len(whole) - at
                    break
                at += 1
        return longest
