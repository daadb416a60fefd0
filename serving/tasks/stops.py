"""Stop strings, matched on text as it grows, across token borders, and stop sequences, matched on tokens."""

from __future__ import annotations

from collections import deque
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


class _Run:
    """One stop sequence: ``matched`` of its tokens are the last ones of the text (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_fallback", "ids", "matched")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.matched = 0
        self._fallback = [0] * len(ids)  # of each place: how long an end of the run up to it is a beginning of the run
        for place in range(1, len(ids)):
            size = self._fallback[place - 1]
            while size and ids[size] != ids[place]:
                size = self._fallback[size - 1]
            self._fallback[place] = size + (ids[size] == ids[place])

    @property
    def is_whole(self) -> bool:
        return self.matched == len(self.ids)

    @property
    def begun(self) -> int:
        """Tokens at the end of the text that may be gone on with to the whole run."""
        return self._fallback[-1] if self.is_whole else self.matched

    def feed(self, token_id: int) -> None:
        size = self.begun
        while size and self.ids[size] != token_id:
            size = self._fallback[size - 1]
        self.matched = size + (self.ids[size] == token_id)


class SequenceStops:
    """Lets the text of tokens through, but for what may be that of the beginning of a stop sequence."""

    __slots__ = ("_held", "_runs", "_starts", "position")

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        self._runs = [_Run(ids) for ids in sequences]
        self._starts: deque[int] = deque(maxlen=max(map(len, sequences)))  # of the last tokens, in the text
        self._held = ""
        self.position = 0  # characters let through

    def feed(self, token_id: int, start: int) -> None:
        """A token whose text begins at ``start``."""
        self._starts.append(start)
        for run in self._runs:
            run.feed(token_id)

    @property
    def start(self) -> int | None:
        """Where the sequence begins that is whole with the last token, the longest of several; None for none."""
        whole = max((len(run.ids) for run in self._runs if run.is_whole), default=0)
        return self._starts[-whole] if whole else None

    def push(self, text: str) -> str:
        """What of it is let through."""
        begun = max(run.begun for run in self._runs)
        return self._release(self._held + text, self._starts[-begun] if begun else None)

    def flush(self, text: str = "", end: int | None = None) -> str:
        """What was held back and ``text``, at the end of the text, which is at ``end``."""
        return self._release(self._held + text, end)

    def rest(self) -> str:
        """What ``flush`` left behind the end."""
        return self._held

    def _release(self, whole: str, end: int | None) -> str:
        count = len(whole) if end is None else max(0, end - self.position)
        self._held = whole[count:]
        self.position += min(count, len(whole))
        return whole[:count]
