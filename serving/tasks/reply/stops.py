"""Matching of stop strings, on the growing text and across token boundaries, and of stop sequences, on tokens."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string that was found; ``start`` and ``end`` are its character positions in the whole text."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """A matcher that takes text piece by piece and holds back only the part that may begin a stop string."""

    __slots__ = ("_held", "_length", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._length = 0  # characters released

    @property
    def position(self) -> int:
        """How many characters have been released."""
        return self._length

    def push(self, text: str, matching: bool = True) -> tuple[str, Match | None]:
        """Return ``(released text, match)``. The text ends before the match; after a match, push nothing more.

        The match is the one that is complete first; of several that end together, the one that starts first.
        With ``matching`` False (before ``min_tokens``) everything is released.
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
        """Return the text that was held back; call this at the end of the text."""
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
        """Return the length of the longest suffix of ``whole`` that begins some stop string."""
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
    """One stop sequence, matched token by token (Knuth, Morris and Pratt 1977).

    The last ``matched`` tokens of the text are the first ``matched`` tokens of the sequence.
    """

    __slots__ = ("_fallback", "ids", "matched")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.matched = 0
        self._fallback = [0] * len(ids)  # per place: length of the longest border (prefix and suffix) of the run so far
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
        """How many tokens at the end of the text may be the beginning of another match."""
        return self._fallback[-1] if self.is_whole else self.matched

    def feed(self, token_id: int) -> None:
        size = self.begun
        while size and self.ids[size] != token_id:
            size = self._fallback[size - 1]
        self.matched = size + (self.ids[size] == token_id)


class SequenceStops:
    """A filter that releases the text of tokens, but holds back the text of tokens that may begin a stop sequence."""

    __slots__ = ("_held", "_runs", "_starts", "position")

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        self._runs = [_Run(ids) for ids in sequences]
        self._starts: deque[int] = deque(maxlen=max(map(len, sequences)))  # where the texts of the last tokens start
        self._held = ""
        self.position = 0  # characters released

    def feed(self, token_id: int, start: int) -> None:
        """Take a token whose text begins at character ``start``."""
        self._starts.append(start)
        for run in self._runs:
            run.feed(token_id)

    @property
    def start(self) -> int | None:
        """The start of the sequence that the last token completes, the longest of several; None if there is none."""
        whole = max((len(run.ids) for run in self._runs if run.is_whole), default=0)
        return self._starts[-whole] if whole else None

    def push(self, text: str) -> str:
        """Return the text that is released once ``text`` is added."""
        begun = max(run.begun for run in self._runs)
        return self._release(self._held + text, self._starts[-begun] if begun else None)

    def flush(self, text: str = "", end: int | None = None) -> str:
        """Return the held text and ``text``, at the end of the whole text; up to position ``end`` if it is given."""
        return self._release(self._held + text, end)

    def rest(self) -> str:
        """Return the text after the ``end`` that ``flush`` was given."""
        return self._held

    def _release(self, whole: str, end: int | None) -> str:
        count = len(whole) if end is None else max(0, end - self.position)
        self._held = whole[count:]
        self.position += min(count, len(whole))
        return whole[:count]
