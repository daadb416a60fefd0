"""When a sequence ends by itself: at a stop token, or at its full length. Every part of the server asks this rule.

``count`` is everywhere the number of tokens generated so far, resumed ones included. A stop token counts from place
``min_tokens + 1`` on: until then the sampler gives it no probability, and one that an engine without such a sampler
delivers is ordinary text (vLLM's ``min_tokens``, transformers' ``min_new_tokens``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from .request import Sampling

StopReason: TypeAlias = Literal["stop", "length"]


class StopRule:
    """Of one sequence. ``max_tokens`` is the most tokens it may generate.

    ``room`` is how many tokens the context has left after the prompt; None where only the request's own limit counts.
    """

    __slots__ = ("_min_tokens", "_stop_ids", "max_tokens")

    def __init__(self, sampling: Sampling, room: int | None = None) -> None:
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self.max_tokens = sampling.max_tokens if room is None else min(sampling.max_tokens, room)

    def may_stop(self, count: int) -> bool:
        """Whether token number ``count`` (from 1) may be a stop token."""
        return count > self._min_tokens

    def may_match(self, count: int) -> bool:
        """Whether a stop string that token number ``count`` (from 1) completes ends the text: it has ``min_tokens``."""
        return count >= self._min_tokens

    def is_stop(self, token_id: int, count: int) -> bool:
        """Whether ``token_id``, token number ``count`` (from 1), ends the sequence."""
        return count > self._min_tokens and token_id in self._stop_ids

    def reason(self, last: int | None, count: int) -> StopReason | None:
        """Why a sequence of ``count`` tokens, of which ``last`` is the last one, ends there; None where it goes on."""
        if count > self._min_tokens and last in self._stop_ids:
            return "stop"
        return "length" if count >= self.max_tokens else None
