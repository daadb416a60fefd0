"""Where a sequence is in its grammar: which tokens may come next, and those that the grammar alone decides.

::

    sampled ──► follow ──► consume ──► complete? "stop"
                              │
                              ├──► forced tokens (fast-forward), appended without a forward of their own
                              └──► the mask of the next token (``Masks``), which the sampler puts on its row

Ends of text are no part of a grammar here: llguidance knows one token as its end, which is behind the model's
vocabulary. Where it allows that one, the request's own ends are allowed in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..constraint import GIVEN, Grammar
from ..errors import InternalError, InvalidField, ServingError
from ..request import Sampling
from ..structured.distinct_keys import Keys, KeyTokens
from ..token_bytes import TokenBytes
from .grammar_tokenizer import GrammarTokenizer
from .logits_processors import may_forbid

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = npt.NDArray[np.uint32]
"""A bit a token id, the lowest bit first, [ceil((vocab_size + 1) / 32)]; the one behind the vocabulary is the end."""

WORD = 32
DEAD_END = "a grammar with a way to a whole text, which this model's tokens can write"

LIMIT_REACHED = re.compile("too (many|complex|large)|max is|limit", re.IGNORECASE)  # in llguidance's messages


class Matching:
    """The matcher of one sequence. ``allowed`` is the mask of its next token, where ``is_known``: ``Masks`` computes it
    while the model computes that token's logits.

    ``ends`` are the token ids that end the text where the grammar may end. ``is_dead``: of a beam that has no way to go
    on, while others have.
    """

    __slots__ = ("_grammar", "_tokenizer", "allowed", "ends", "fast_forward", "is_dead", "is_known", "keys", "matcher")

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, sampling: Sampling, grammar: Grammar) -> None:
        self.matcher = matcher
        self._tokenizer, self._grammar = tokenizer, grammar
        self.ends = tuple(i for i in sampling.stop_token_ids if i in tokenizer.special_ids)
        # forced tokens have no logits: none to give out, no log probabilities, nor anything that could forbid them, and
        # a search has to know what they cost
        shown = sampling.logprobs is not None or sampling.generation_logits
        drawn = shown or sampling.beams is not None or may_forbid(sampling)
        self.fast_forward = grammar.fast_forward and not drawn
        self.allowed: Mask = np.zeros(self.num_words, dtype=np.uint32)
        self.is_known = self.is_dead = False
        self.keys = DistinctKeys(tokenizer.table, tokenizer.key_tokens) if grammar.distinct_keys else None

    def fork(self) -> Matching:
        """A copy, which goes its own way."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        other.allowed = self.allowed.copy()
        if self.keys is not None:
            other.keys = self.keys.copy()
        return other

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self._tokenizer.vocab_size // WORD + 1

    def consume(self, token_ids: Iterable[int]) -> None:
        """Raises ``ServingError`` for tokens that do not go on within the grammar."""
        tokens = list(token_ids)
        if tokens:
            self.is_known = False
            if not self.matcher.consume_tokens(tokens):
                raise self._error()
            if self.keys is not None:
                self.keys.feed(tokens)

    @property
    def is_lost(self) -> bool:
        """Whether the matcher itself has failed, as opposed to a text that has no way to go on."""
        return self.matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Whether the text can only end here."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def forced(self) -> list[int]:
        """The tokens that must come next, in the way that the tokenizer would have them; [] where there is a choice."""
        return self.matcher.compute_ff_tokens() if self.fast_forward else []

    def take(self, mask: Mask) -> None:
        """The matcher's mask of this place."""
        self.allowed, self.is_known = mask, True

    def check(self) -> bool:
        """Put the request's own ends in the place of the grammar's; False where the text can only end.

        Raises ``ServingError`` where neither a token nor the end is allowed, or a limit is reached.
        """
        if self.matcher.is_error():
            raise self._error()
        allowed = self.allowed
        if self.keys is not None:
            self.keys.forbid_repeats(allowed)
        word, bit = divmod(self._tokenizer.vocab_size, WORD)
        end = np.uint32(1 << bit)
        may_end = bool(allowed[word] & end)
        if not may_end:
            if not allowed.any():
                raise self._refused(DEAD_END)
            return True
        allowed[word] &= ~end
        if not allowed.any():
            return False
        for token_id in self.ends:
            allowed[token_id // WORD] |= np.uint32(1 << token_id % WORD)
        return True

    def stops_to_forbid(self, stop_ids: Sequence[int]) -> Sequence[int]:
        """Of the tokens that may not come yet (``min_tokens``) those that leave another choice: the ends alone where
        all that the grammar allows are stop tokens."""
        allowed = unpacked(self.allowed[None], self._tokenizer.vocab_size)[0]
        allowed[list(stop_ids)] = False
        return stop_ids if allowed.any() else self.ends

    def _error(self) -> ServingError:
        """The caller's, where the grammar leads nowhere or takes too much; else the matcher's, or ours."""
        refusal = refusal_of(self.matcher)
        if refusal is not None:
            return self._refused(refusal)
        if not self._tokenizer.writes_all:
            return self._refused(DEAD_END)
        return InternalError(f"the text cannot go on within its grammar: {short(self.matcher.get_error())}")

    def _refused(self, allowed: str) -> InvalidField:
        return InvalidField(self._grammar.field, GIVEN, allowed)


def refusal_of(matcher: LLMatcher) -> str | None:
    """What a grammar should be instead, where a matcher's error is the grammar's fault: for ``InvalidField``."""
    message = short(matcher.get_error())
    if message.startswith("NoExtension"):
        return DEAD_END
    return f"a simpler grammar: {message}" if LIMIT_REACHED.search(message) else None


class DistinctKeys:
    """What a grammar cannot say: no object of a text has a key twice."""

    __slots__ = ("_keys", "_table", "_tokens")

    def __init__(self, table: TokenBytes, tokens: KeyTokens) -> None:
        self._keys, self._table, self._tokens = Keys(), table, tokens

    def copy(self) -> DistinctKeys:
        other = copy(self)
        other._keys = self._keys.copy()
        return other

    def feed(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id < len(self._table):
                self._keys.feed(self._table[token_id])

    def forbid_repeats(self, allowed: Mask) -> None:
        def allows(token_id: int) -> bool:
            return bool(allowed[token_id // WORD] >> np.uint32(token_id % WORD) & np.uint32(1))

        for token_id in self._keys.forbidden(self._tokens, allows):
            allowed[token_id // WORD] &= ~np.uint32(1 << token_id % WORD)


def unpacked(masks: Mask, vocab_size: int) -> Any:
    """Masks [B, words] as booleans [B, vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def short(message: str) -> str:
    """What llguidance says of an error, in a line: its first one, and an expression's reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    why = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join(line[:200] for line in lines[:1] + why[:1]) or "no reason is given"
