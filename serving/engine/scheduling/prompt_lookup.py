"""Finds what may come after a text: in the text itself (prompt lookup), or in a text that its caller predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..attention.kv_cache import TokenIds

MATCH_TOKENS = 3  # tokens that an earlier place must share with the end of the text


def lookup(tokens: TokenIds, maximum: int) -> TokenIds:
    """Return at most ``maximum`` tokens that followed the last ``MATCH_TOKENS`` of ``tokens`` at their latest earlier
    occurrence."""
    if maximum < 1 or len(tokens) <= MATCH_TOKENS:
        return tokens[:0]
    places = ends_of(tokens[-MATCH_TOKENS:], tokens[:-1])
    if not len(places):
        return tokens[:0]
    start = int(places[-1])
    return tokens[start : start + maximum]


def ends_of(words: TokenIds, tokens: TokenIds) -> npt.NDArray[np.intp]:
    """Return the places in ``tokens`` after each occurrence of ``words``, in order."""
    size = len(tokens) - len(words) + 1
    if size < 1:
        return np.empty(0, dtype=np.intp)
    found = tokens[:size] == words[0]
    for place in range(1, len(words)):
        found &= tokens[place : place + size] == words[place]
    return np.flatnonzero(found) + len(words)


class Prediction:
    """A predicted text, which is followed as the sequence's text comes::

        prediction   the quick brown fox jumps over the lazy dog
                     ~~~~~~~~~~~~~~~     ^ place: the text's last three words come before it
        text         the quick red   fox jumps over ...

    The prediction is followed token by token from its beginning. Once the text has departed from it, it is followed
    again from a place after the text's last ``MATCH_TOKENS`` tokens, preferably the next such place.
    """

    __slots__ = ("_seen", "is_followed", "place", "tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens: TokenIds = np.array(token_ids, dtype=np.int32)
        self.place = 0
        self.is_followed = True
        self._seen = 0

    def follow(self, output: TokenIds, tokens: TokenIds) -> None:
        """Follow the tokens since the last call. ``output``, the tokens generated so far, is the end of ``tokens``."""
        new = output[self._seen :]
        self._seen = len(output)
        if not self.is_followed or not np.array_equal(self.tokens[self.place : self.place + len(new)], new):
            self._take_up(tokens[-MATCH_TOKENS:])
        else:
            self.place += len(new)

    def _take_up(self, words: TokenIds) -> None:
        places = ends_of(words, self.tokens) if len(words) == MATCH_TOKENS else words[:0]
        self.is_followed = bool(len(places))
        if self.is_followed:
            after = places[places > self.place]
            self.place = int(after[0] if len(after) else places[-1])

    def next(self, maximum: int) -> TokenIds:
        """Return at most ``maximum`` next tokens of the prediction; none if the text does not follow it."""
        return self.tokens[self.place : self.place + max(maximum, 0)] if self.is_followed else self.tokens[:0]
