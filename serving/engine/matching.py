"""Where a sequence is in its grammar: which tokens may come next, and those that the grammar alone decides.

::

    sampled ──► follow ──► consume ──► complete? "stop"
                              │
                              ├──► forced tokens (fast-forward), appended without a forward of their own
                              └──► look: the mask of the next token, which the sampler puts on its row

Ends of text are no part of a grammar here: llguidance knows one token as its end, which is behind the model's
vocabulary. Where it allows that one, the request's own ends are allowed in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InternalError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = npt.NDArray[np.uint32]
"""A bit a token id, the lowest bit first, [ceil((vocab_size + 1) / 32)]; the one behind the vocabulary is the end."""

WORD = 32


class Matching:
    """The matcher of one sequence. ``allowed`` is the mask of its next token, after ``look``.

    ``ends`` are the token ids that end the text where the grammar may end.
    """

    __slots__ = ("_matcher", "_vocab_size", "allowed", "ends", "fast_forward")

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], fast_forward: bool) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.ends = tuple(ends)
        self.fast_forward = fast_forward
        self.allowed: Mask = np.zeros(vocab_size // WORD + 1, dtype=np.uint32)

    def consume(self, token_ids: Iterable[int]) -> None:
        """Raises ``InternalError`` for tokens that do not go on within the grammar."""
        tokens = list(token_ids)
        if tokens and not self._matcher.consume_tokens(tokens):
            raise self._error()

    @property
    def is_complete(self) -> bool:
        """Whether the text can only end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self) -> list[int]:
        """The tokens that must come next, in the way that the tokenizer would have them; [] where there is a choice."""
        return self._matcher.compute_ff_tokens() if self.fast_forward else []

    def look(self) -> bool:
        """Take the mask of the next token into ``allowed``; False where the text can only end.

        Raises ``InternalError`` where neither a token nor the end is allowed.
        """
        allowed = self.allowed
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise self._error()
        word, bit = divmod(self._vocab_size, WORD)
        end = np.uint32(1 << bit)
        may_end = bool(allowed[word] & end)
        allowed[word] &= ~end
        if not allowed.any():
            if may_end:
                return False
            raise InternalError("the grammar allows no token here")
        if may_end:
            for token_id in self.ends:
                allowed[token_id // WORD] |= np.uint32(1 << token_id % WORD)
        return True

    def stops_to_forbid(self, stop_ids: Sequence[int]) -> Sequence[int]:
        """Of the tokens that may not come yet (``min_tokens``) those that leave another choice: the ends alone where
        all that the grammar allows are stop tokens."""
        allowed = unpacked(self.allowed[None], self._vocab_size)[0]
        allowed[list(stop_ids)] = False
        return stop_ids if allowed.any() else self.ends

    def _error(self) -> InternalError:
        return InternalError(f"the text cannot go on within its grammar: {short(self._matcher.get_error())}")


def unpacked(masks: Mask, vocab_size: int) -> Any:
    """Masks [B, words] as booleans [B, vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def short(message: str) -> str:
    """What llguidance says of an error, in a line: its first one, and an expression's reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    why = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join(line[:200] for line in lines[:1] + why[:1]) or "no reason is given"
