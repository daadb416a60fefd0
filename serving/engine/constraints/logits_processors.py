"""A request's changes to logits beside penalties: a bias for all tokens, and tokens that may not come next.

The forbidden tokens are those of transformers' ``NoBadWordsLogitsProcessor`` (except that it ignores words that are an
end of text) and ``NoRepeatNGramLogitsProcessor``, over the prompt and the output. Everything is prepared once per
request, so that a step only compares arrays of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...interface.errors import InvalidField
from ...interface.request import Sampling
from ..attention.kv_cache import TokenIds
from ..devices.transfers import to_device

ANY = -1  # in place of a token that is not known yet: whatever it is
Pairs: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
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


class _RunPairs:
    """The runs as pairs of a token that is not known yet and what may not follow it: those of at most two tokens, which
    hold after every text, and the longer ones by the last token that must be known."""

    __slots__ = ("_fixed", "_longer")

    def __init__(self, runs: Sequence[tuple[int, ...]]) -> None:
        fixed = [(run[0] if len(run) == 2 else ANY, run[-1]) for run in runs if len(run) <= 2]
        self._fixed = _columns(fixed)
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for run in runs:
            if len(run) > 2:
                self._longer.setdefault(run[-3], []).append(run)

    def after(self, tokens: TokenIds) -> Pairs:
        """Return the tokens of which one more after ``tokens`` leaves a run to be completed, and what completes it."""
        candidates = self._longer.get(int(tokens[-1])) if len(tokens) else None
        if candidates is None:
            return self._fixed
        found = [run[-2:] for run in candidates if run[:-2] == tuple(tokens[2 - len(run) :].tolist())]
        return _joined([self._fixed, _columns(found)]) if found else self._fixed


def _columns(pairs: Sequence[Sequence[int]]) -> Pairs:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def _joined(parts: Sequence[Pairs]) -> Pairs:
    previous, then = zip(*parts, strict=True)
    return np.concatenate(previous), np.concatenate(then)


class LogitsProcessors:
    """The processors of one request. ``bias`` is float32 [V], or None. ``depends_on_text``: whether other tokens may be
    forbidden after another text."""

    __slots__ = ("_device_bias", "_ngram", "_pairs", "_runs", "_words", "bias", "depends_on_text")

    def __init__(self, sampling: Sampling) -> None:
        self.bias: Any = None
        self._device_bias: Any = None
        if sampling.embedding_bias is not None:
            self.bias = torch.from_numpy(np.frombuffer(sampling.embedding_bias, dtype="<f4").astype(np.float32))
        self._ngram = sampling.no_repeat_ngram_size
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling.bad_words:
            by_length.setdefault(len(word), []).append(word)
        self._words = sampling.bad_words
        self._pairs: _RunPairs | None = None  # made when a device asks
        self._runs = [_Runs(words) for words in by_length.values()]
        self.depends_on_text = bool(self._ngram) or any(length > 1 for length in by_length)

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

    def forbidden_pairs(self, tokens: TokenIds) -> Pairs:
        """Return ``forbidden`` of ``tokens`` and one more token that is not known yet: if that is ``previous[i]``, or
        whatever it is if that is ``ANY``, ``then[i]`` may not come. An ``ANY`` in ``then`` is the unknown token."""
        if self._pairs is None:
            self._pairs = _RunPairs(self._words)
        pairs = self._pairs.after(tokens)
        if not self._ngram:
            return pairs
        previous, then = _repeating_pairs(tokens, self._ngram)
        return _joined([pairs, (previous.astype(np.int64), then.astype(np.int64))])

    def bias_on(self, device: Any) -> Any:
        """Return ``bias`` on ``device``, where it stays."""
        if self._device_bias is None or self._device_bias.device != device:
            self._device_bias = to_device(self.bias, device)
        return self._device_bias


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
    return tokens[_preceded(tokens, np.arange(ngram - 1, length), ngram - 1)]


def _repeating_pairs(tokens: TokenIds, ngram: int) -> tuple[TokenIds, TokenIds]:
    """Return ``_repeating`` of ``tokens`` and an unknown token, as ``forbidden_pairs`` does.

    ::

        ngram 3      a b c a | x ?      the last one also occurs at 0: if x is b, c would repeat "a b c"
                     a a | x ?          if x is a, another a would repeat "a a a"
    """
    length = len(tokens)
    if ngram == 1:
        return np.full(length + 1, ANY, dtype=np.int32), np.append(tokens, np.int32(ANY))
    if length < ngram - 1:
        return tokens[:0], tokens[:0]
    places = 1 + _preceded(tokens, np.arange(ngram - 2, length - 1), ngram - 2)
    previous, then = tokens[places - 1], tokens[places]
    if (tokens[length - ngram + 1 :] == tokens[-1]).all():  # the unknown token may be the end of an n-gram
        previous, then = np.append(previous, tokens[-1]), np.append(then, tokens[-1])
    return previous, then


def _preceded(tokens: TokenIds, places: Any, size: int) -> Any:
    """Return those of ``places``, with at least ``size`` tokens before them, that the text's last ``size`` tokens
    precede."""
    length = len(tokens)
    for back in range(1, min(size + 1, NARROWED_TOKENS)):
        if not len(places):
            break
        places = places[tokens[places - back] == tokens[length - back]]
    if size >= NARROWED_TOKENS and len(places):
        places = places[_common(tokens)[places] >= size]
    return places


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
