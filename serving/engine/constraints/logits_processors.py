"""A request's changes to logits beside penalties: a bias for all tokens, and tokens that may not come next.

The forbidden tokens are those of transformers' ``NoBadWordsLogitsProcessor`` (except that it ignores words that are an
end of text) and ``NoRepeatNGramLogitsProcessor``, over the prompt and the output. Everything is prepared once per
request, so that a step only compares arrays of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...interface.errors import InvalidField
from ...interface.request import Sampling
from ..attention.kv_cache import TokenIds

NARROWED_TOKENS = 64  # tokens of an n-gram that are compared one after the other with the whole text
FIELDS = ("bad_words", "no_repeat_ngram_size", "embedding_bias")
"""The fields of ``Sampling`` that may forbid a token."""


class _Runs:
    """The runs of tokens of equal length: their ``beginnings`` [runs, length - 1] and ``last`` tokens [runs]."""

    __slots__ = ("beginnings", "last")

    def __init__(self, runs: list[tuple[int, ...]]) -> None:
        table = np.array(runs, dtype=np.int32)
        self.beginnings, self.last = table[:, :-1], table[:, -1]

    def completed_by(self, tokens: TokenIds) -> TokenIds:
        """Return the tokens that would complete a run after ``tokens``."""
        size = self.beginnings.shape[1]
        if size > len(tokens):
            return self.last[:0]
        return self.last[(self.beginnings == tokens[len(tokens) - size :]).all(axis=1)]


class LogitsProcessors:
    """The processors of one request. ``bias`` is float32 [V], or None."""

    __slots__ = ("_ngram", "_runs", "bias")

    def __init__(self, sampling: Sampling) -> None:
        self.bias: Any = None
        if sampling.embedding_bias is not None:
            self.bias = torch.from_numpy(np.frombuffer(sampling.embedding_bias, dtype="<f4").astype(np.float32))
        self._ngram = sampling.no_repeat_ngram_size
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling.bad_words:
            by_length.setdefault(len(word), []).append(word)
        self._runs = [_Runs(words) for words in by_length.values()]

    @staticmethod
    def of(sampling: Sampling) -> LogitsProcessors | None:
        """Return the processors that ``sampling`` asks for; None if it asks for none."""
        return LogitsProcessors(sampling) if may_forbid(sampling) else None

    def forbidden(self, tokens: TokenIds) -> npt.NDArray[np.int64]:
        """Return the token ids that may not come after ``tokens`` (prompt and output), some perhaps more than once."""
        found = [runs.completed_by(tokens) for runs in self._runs]
        if self._ngram:
            found.append(_repeating(tokens, self._ngram))
        return np.concatenate(found).astype(np.int64) if found else np.empty(0, dtype=np.int64)


def may_forbid(sampling: Sampling) -> bool:
    """Return whether a request may forbid tokens that nothing else forbids."""
    return bool(sampling.bad_words or sampling.no_repeat_ngram_size or sampling.embedding_bias is not None)


def nothing_left(sampling: Sampling) -> InvalidField:
    """Return the error of a text that cannot go on because all tokens are forbidden."""
    fields = [name for name in FIELDS if getattr(sampling, name)]
    allowed = "values that leave the text a token to go on with"
    if sampling.grammar is not None:
        allowed += f" within {sampling.grammar.field}"
    return InvalidField(fields[0], " and ".join(fields), allowed)


def _repeating(tokens: TokenIds, ngram: int) -> TokenIds:
    """Return the tokens that followed the last ``ngram - 1`` of ``tokens`` at each earlier occurrence.

    ::

        ngram 3      a b c a b | ?      the last two also occur at 0: c would repeat "a b c"
    """
    length, size = len(tokens), len(tokens) - ngram + 1
    if size < 1:
        return tokens[:0]
    places = np.arange(ngram - 1, length)  # those with at least ngram - 1 tokens before them
    for back in range(1, min(ngram, NARROWED_TOKENS)):
        places = places[tokens[places - back] == tokens[length - back]]
        if not len(places):
            break
    if ngram > NARROWED_TOKENS and len(places):
        places = places[_common(tokens)[places] >= ngram - 1]
    return tokens[places]


def _common(tokens: TokenIds) -> npt.NDArray[np.int64]:
    """Return, for each place of ``tokens``, how many tokens before it equal the last ones of the text, [len(tokens)].

    This is the Z-function of the reversed tokens, which takes linear time for every text."""
    reverse = tokens[::-1].tolist()
    length = len(reverse)
    found = [0] * length
    left = right = 0  # the rightmost stretch that equals a beginning
    for at in range(1, length):
        same = min(right - at, found[at - left]) if at < right else 0
        while at + same < length and reverse[same] == reverse[at + same]:
            same += 1
        found[at] = same
        if at + same > right:
            left, right = at, at + same
    return np.array([0, *found[:0:-1]], dtype=np.int64)
