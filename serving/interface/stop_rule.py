"""When a sequence ends by itself: at a stop token, at a stop sequence, or at its full length.

Every part of the server uses this rule. ``count`` is always the number of tokens generated so far, including resumed
ones. A stop token counts from position ``min_tokens + 1`` on: before that the sampler gives it no probability, and if
an engine without such a sampler delivers one, it is ordinary text (vLLM's ``min_tokens``, transformers'
``min_new_tokens``). A stop sequence, like a stop string, is part of the text that it ends: it counts if the text
including it has ``min_tokens``. It is looked for only in generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from .request import Sampling

StopReason: TypeAlias = Literal["stop", "length"]


class StopRule:
    """The stop rule of one sequence.

    ``max_tokens`` is the most tokens that it may generate; ``stop_ids`` are its stop tokens. ``has_runs`` says whether
    there are stop sequences (of at most ``max_run`` tokens each), so that ``run_ending`` has to be checked as well
    as ``reason``. ``room`` is how many tokens the context has left after the prompt; None if only the request's own
    limit counts.
    """

    __slots__ = ("_min_tokens", "_runs", "has_runs", "max_run", "max_tokens", "stop_ids")

    def __init__(self, sampling: Sampling, room: int | None = None) -> None:
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self.max_tokens = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
        self._runs: dict[int, list[tuple[int, ...]]] = {}  # stop sequences by their last token, the longest first
        for run in sorted(sampling.stop_sequences, key=len, reverse=True):
            self._runs.setdefault(run[-1], []).append(run)
        self.has_runs = bool(self._runs)
        self.max_run = max(map(len, sampling.stop_sequences), default=0)

    def may_stop(self, count: int) -> bool:
        """Return whether token number ``count`` (from 1) may be a stop token."""
        return count > self._min_tokens

    def may_match(self, count: int) -> bool:
        """Return whether a stop string completed by token number ``count`` (from 1) ends the text: it needs
        ``min_tokens``."""
        return count >= self._min_tokens

    def is_stop(self, token_id: int, count: int) -> bool:
        """Return whether ``token_id``, token number ``count`` (from 1), ends the sequence."""
        return count > self._min_tokens and token_id in self.stop_ids

    def reason(self, last: int | None, count: int) -> StopReason | None:
        """Return why a sequence of ``count`` tokens that ends in ``last`` stops there; None if it goes on."""
        if count > self._min_tokens and last in self.stop_ids:
            return "stop"
        return "length" if count >= self.max_tokens else None

    def run_ending(self, output: Sequence[int] | Any, count: int) -> int:
        """Return the length of the stop sequence that ends the text at token number ``count``; 0 if there is none.

        ``output`` has at least the last tokens up to there. Of several stop sequences the longest counts.
        """
        if not len(output) or count < self._min_tokens:
            return 0
        for run in self._runs.get(int(output[-1]), ()):
            if len(run) <= len(output) and tuple(output[-len(run) :]) == run:
                return len(run)
        return 0
