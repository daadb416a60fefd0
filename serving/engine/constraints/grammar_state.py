"""A sequence's position in its grammar: which tokens may come next, and which ones the grammar forces.

::

    sampled ──► follow ──► consume ──► complete? "stop"
                              │
                              ├──► forced tokens (fast-forward), appended without a forward of their own
                              └──► the mask of the next token (``BitmaskWorker``), which the sampler applies to its row

Ends of text are not part of a grammar here. llguidance has a single end token, which comes after the model's
vocabulary. Whenever it allows that token, the request's own end tokens are allowed instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...interface.constraint import GIVEN, Grammar
from ...interface.errors import InternalError, InvalidField, ServingError
from ...interface.request import Sampling
from ...model_files.token_bytes import TokenBytes
from ...structured.distinct_keys import Keys, KeyTokens
from .grammar_tokenizer import GrammarTokenizer
from .logits_processors import may_forbid

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = npt.NDArray[np.uint32]
"""One bit per token id, lowest bit first, [ceil((vocab_size + 1) / 32)]; the bit after the vocabulary is the end."""

WORD_BITS = 32
DEAD_END = "a grammar that leads to a complete text, which this model's tokens can write"

LIMIT_REACHED = re.compile("too (many|complex|large)|max is|limit", re.IGNORECASE)  # in llguidance's messages


class MaskedPosition:
    """The tokens that may come at one position of a text within a grammar.

    ``allowed`` is the mask. ``ends`` are the token ids that end the text if the grammar may end here, ``keys`` the keys
    that the text's objects have so far."""

    __slots__ = ("_grammar", "_tokenizer", "allowed", "ends", "keys")

    def __init__(
        self, tokenizer: GrammarTokenizer, grammar: Grammar, ends: tuple[int, ...], keys: DistinctKeys | None
    ) -> None:
        self._tokenizer, self._grammar, self.ends, self.keys = tokenizer, grammar, ends, keys
        self.allowed: Mask = np.zeros(self.num_words, dtype=np.uint32)

    @property
    def num_words(self) -> int:
        """The number of words in a mask."""
        return self._tokenizer.vocab_size // WORD_BITS + 1

    def check(self) -> bool:
        """Replace the grammar's end by the request's own ends; False if the text can only end.

        Raises ``ServingError`` if neither a token nor the end is allowed.
        """
        allowed = self.allowed
        if self.keys is not None:
            self.keys.forbid_repeats(allowed)
        word, bit = divmod(self._tokenizer.vocab_size, WORD_BITS)
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
            allowed[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        return True

    def stops_to_forbid(self, stop_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens to forbid before ``min_tokens``: all ``stop_ids``, or only the ends if the grammar allows
        nothing but stop tokens."""
        allowed = unpacked(self.allowed[None], self._tokenizer.vocab_size)[0]
        allowed[list(stop_ids)] = False
        return stop_ids if allowed.any() else self.ends

    def _refused(self, allowed: str) -> InvalidField:
        return InvalidField(self._grammar.field, GIVEN, allowed)


class GrammarState(MaskedPosition):
    """The matcher of one sequence, and its position in the grammar.

    The mask of the position is valid if ``is_mask_valid``; ``BitmaskWorker`` computes it during the forward that
    computes the token's logits. ``is_dead``: the sequence is a beam that cannot continue, while others can."""

    __slots__ = ("ahead", "fast_forward", "is_dead", "is_mask_valid", "matcher")

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, sampling: Sampling, grammar: Grammar) -> None:
        keys = DistinctKeys(tokenizer.table, tokenizer.key_tokens) if grammar.distinct_keys else None
        ends = tuple(i for i in sampling.stop_token_ids if i in tokenizer.special_ids)
        super().__init__(tokenizer, grammar, ends, keys)
        self.matcher = matcher
        # Forced tokens have no logits. There would be none to report, no log probabilities and nothing that bans could
        # apply to, and a beam search has to know the tokens' scores.
        shown = sampling.logprobs is not None or sampling.generation_logits
        drawn = shown or sampling.beams is not None or may_forbid(sampling)
        self.fast_forward = grammar.fast_forward and not drawn
        self.is_mask_valid = self.is_dead = False
        self.ahead: DraftedGrammarState | None = None  # the positions after this step's drafts

    def fork(self) -> GrammarState:
        """Return an independent copy."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        other.allowed = self.allowed.copy()
        if self.keys is not None:
            other.keys = self.keys.copy()
        return other

    def consume(self, token_ids: Iterable[int]) -> None:
        """Advance by ``token_ids``. Raises ``ServingError`` if the grammar does not allow them."""
        tokens = list(token_ids)
        if tokens:
            self.is_mask_valid, self.ahead = False, None
            if not self.matcher.consume_tokens(tokens):
                raise self._error()
            if self.keys is not None:
                self.keys.feed(tokens)

    @property
    def is_lost(self) -> bool:
        """Return whether the matcher itself has failed, as opposed to a text that cannot continue."""
        return self.matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Return whether the text can only end here."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would split them; [] if there is a choice."""
        return self.matcher.compute_ff_tokens() if self.fast_forward else []

    def take(self, mask: Mask) -> None:
        """Set ``mask``, computed by the matcher, as that of this position."""
        self.allowed, self.is_mask_valid = mask, True

    def check(self) -> bool:
        """See ``MaskedPosition.check``; also raises if a limit is reached."""
        if self.matcher.is_error():
            raise self._error()
        return super().check()

    def draft(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts`` are allowed, up to where the grammar forces a token or ends the text.

        ``ahead`` then has the positions after them. The state itself does not advance."""
        walker = self.matcher.deep_copy()
        may_come = drawn = 0
        for token_id in drafts:
            if walker.try_consume_tokens([token_id]) != 1:
                break
            may_come += 1
            if walker.is_stopped() or (self.fast_forward and walker.compute_ff_tokens()):
                break
            drawn += 1
        self.ahead = DraftedGrammarState(self, drafts[:drawn]) if may_come else None
        return may_come

    def new_position(self, keys: DistinctKeys | None) -> MaskedPosition:
        """Make a later position of the same text."""
        return MaskedPosition(self._tokenizer, self._grammar, self.ends, keys)

    def _error(self) -> ServingError:
        """Return the matcher's error: the caller's fault if the grammar has a dead end or is too complex, else
        internal."""
        refusal = refusal_of(self.matcher)
        if refusal is not None:
            return self._refused(refusal)
        if not self._tokenizer.writes_all:
            return self._refused(DEAD_END)
        return InternalError(f"the text cannot go on within its grammar: {short(self.matcher.get_error())}")


class DraftedGrammarState:
    """The positions after the ``drafts`` of one step, found by a copy of the sequence's matcher, which does not advance
    itself.

    ``positions`` are set once ``compute`` has found their masks. They stop before the first position at which the text
    can only end or cannot continue."""

    __slots__ = ("_drafts", "_origin", "positions")

    def __init__(self, origin: GrammarState, drafts: Sequence[int]) -> None:
        self._origin, self._drafts = origin, drafts
        self.positions: list[MaskedPosition] | None = None

    def compute(self) -> None:
        """Compute the positions. May run on another thread if nothing else uses the sequence's matcher meanwhile."""
        if self.positions is not None:  # found by a step that failed and is run again
            return
        matcher, keys = self._origin.matcher.deep_copy(), self._origin.keys
        positions: list[MaskedPosition] = []
        for token_id in self._drafts:
            if not matcher.consume_tokens([token_id]):
                break
            keys = None if keys is None else keys.after(token_id)
            position = self._origin.new_position(keys)
            matcher.unsafe_compute_mask_ptr(position.allowed.ctypes.data, position.allowed.nbytes)
            if matcher.is_error() or not _may_go_on(position):
                break
            positions.append(position)
        self.positions = positions


def _may_go_on(position: MaskedPosition) -> bool:
    """Return whether a token can be sampled at ``position``. If not, the text finds that out when it gets there."""
    try:
        return position.check()
    except ServingError:
        return False


def refusal_of(matcher: LLMatcher) -> str | None:
    """Return what ``InvalidField`` says is expected, if a matcher's error is the grammar's fault; else None."""
    message = short(matcher.get_error())
    if message.startswith("NoExtension"):
        return DEAD_END
    return f"a simpler grammar: {message}" if LIMIT_REACHED.search(message) else None


class DistinctKeys:
    """A rule that grammars cannot express: no object of a text has the same key twice."""

    __slots__ = ("_keys", "_table", "_tokens")

    def __init__(self, table: TokenBytes, tokens: KeyTokens) -> None:
        self._keys, self._table, self._tokens = Keys(), table, tokens

    def copy(self) -> DistinctKeys:
        other = copy(self)
        other._keys = self._keys.copy()
        return other

    def after(self, token_id: int) -> DistinctKeys:
        """Return a copy that has been fed ``token_id``."""
        other = self.copy()
        other.feed((token_id,))
        return other

    def feed(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id < len(self._table):
                self._keys.feed(self._table[token_id])

    def forbid_repeats(self, allowed: Mask) -> None:
        def allows(token_id: int) -> bool:
            return bool(allowed[token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & np.uint32(1))

        for token_id in self._keys.forbidden(self._tokens, allows):
            allowed[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)


def unpacked(masks: Mask, vocab_size: int) -> Any:
    """Return bitmasks [B, words] as booleans [B, vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def short(message: str) -> str:
    """Return llguidance's error message in one line: its first line, and the reason if a regular expression has one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    why = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join(line[:200] for line in lines[:1] + why[:1]) or "no reason is given"
