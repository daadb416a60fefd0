"""When a sequence ends by itself: at a stop token or stop sequence, or at its full length. Every part of the server
asks this rule.

``count`` is everywhere the number of tokens generated so far, resumed ones included. A stop token counts from place
``min_tokens + 1`` on: until then the sampler gives it no probability, and one that an engine without such a sampler
delivers is ordinary text (vLLM's ``min_tokens``, transformers' ``min_new_tokens``). A stop sequence is part of the text
that it ends, as a stop string is: it counts where the text has its ``min_tokens`` with it, and is looked for in what
was generated alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from .request import Sampling

StopReason: TypeAlias = Literal["stop", "length"]


class StopRule:
    """Of one sequence. ``max_tokens`` is the most tokens it may generate, ``stop_ids`` are its stop tokens;
    ``has_runs``: whether there are stop sequences (at most ``longest_run`` tokens each), so that ``run_ending`` has to
    be asked beside ``reason``.

    ``room`` is how many tokens the context has left after the prompt; None where only the request's own limit counts.
    """

    __slots__ = ("_min_tokens", "_runs", "has_runs", "longest_run", "max_tokens", "stop_ids")

    def __init__(self, sampling: Sampling, room: int | None = None) -> None:
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self.max_tokens = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
        self._runs: dict[int, list[tuple[int, ...]]] = {}  # stop sequences by their last token, the longest first
        for run in sorted(sampling.stop_sequences, key=len, reverse=True):
            self._runs.setdefault(run[-1], []).append(run)
        self.has_runs = bool(self._runs)
        self.longest_run = max(map(len, sampling.stop_sequences), default=0)

    def may_stop(self, count: int) -> bool:
        """Whether token number ``count`` (from 1) may be a stop token."""
        return count > self._min_tokens

    def may_match(self, count: int) -> bool:
        """Whether a stop string that token number ``count`` (from 1) completes ends the text: it has ``min_tokens``."""
        return count >= self._min_tokens

    def is_stop(self, token_id: int, count: int) -> bool:
        """Whether ``token_id``, token number ``count`` (from 1), ends the sequence."""
        return count > self._min_tokens and token_id in self.stop_ids

    def reason(self, last: int | None, count: int) -> StopReason | None:
        """Why a sequence of ``count`` tokens, of which ``last`` is the last one, ends there; None where it goes on."""
        if count > self._min_tokens and last in self.stop_ids:
            return "stop"
        return "length" if count >= self.max_tokens else None

    def run_ending(self, output: Sequence[int] | Any, count: int) -> int:
        """Length of the stop sequence that ends the text where ``output``, its last tokens at least, ends at token
        number ``count``; the longest of several, 0 for none."""
        if not len(output) or count < self._min_tokens:
            return 0
        for run in self._runs.get(int(output[-1]), ()):
            if len(run) <= len(output) and tuple(output[-len(run) :]) == run:
                return len(run)
        return 0
