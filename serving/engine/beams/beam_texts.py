"""The ends of texts of a beam search: stop strings, matched on the bytes of tokens, and stop sequences.

Sampled texts are matched above the engine. A search has to know at once, because a text that has ended makes room for
another. The rule is the same: a text ends with the token that completes a stop string, all of which must come after
``min_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...interface.request import ValidRequest
from ...interface.stop_rule import StopRule
from ..constraints.grammar_tokenizer import GrammarTokenizer
from .beam_search import Fork, RunningBeams


class BeamTexts:
    """The finder of the ends of one search's texts. ``tokenizer`` may be None if there are no stop strings."""

    def __init__(
        self, request: ValidRequest, rule: StopRule, tokenizer: GrammarTokenizer | None, prompt: Sequence[int] = ()
    ) -> None:
        """Begin the texts of a search after ``prompt``."""
        assert request.sampling is not None
        self._rule = rule
        self._stops = [stop.encode() for stop in request.stop] if tokenizer is not None else []
        self._tokenizer = tokenizer
        self._shows_special = not request.skip_special_tokens
        # the text made above the engine begins in the same way (``tasks.choice``)
        plain = request.sampling.grammar is None or request.tools is not None
        self._strips = tokenizer is not None and tokenizer.strips_space and plain
        if self._strips and request.continues_prompt:
            self._strips = not any(self._bytes(i, is_first=False).strip() for i in reversed(prompt))
        self._kept = max(map(len, self._stops), default=1) - 1  # most bytes of a text that may begin a stop string
        self._tails: list[bytes] = []  # the last bytes of each beam's text

    def ending(self, search: RunningBeams, candidates: Sequence[Fork]) -> list[bool]:
        """Return, for each candidate, whether it ends its text otherwise than by a stop token."""
        return [self._ends(search, fork) for fork in candidates]

    def _ends(self, search: RunningBeams, fork: Fork) -> bool:
        count = search.length + 1
        if self._rule.has_runs:
            before = search.tokens(fork.parent)[-self._rule.max_run :] if search.length else ()
            if self._rule.run_ending((*before, fork.token_id), count):
                return True
        if not self._stops or not self._rule.may_match(count):
            return False
        tail, new = self._tail(fork, search.length), len(self._bytes(fork.token_id, is_first=not search.length))
        # search only where a stop string can end within the last token, so that many long ones stay cheap
        return any(tail.find(stop, max(0, len(tail) - new - len(stop) + 1)) >= 0 for stop in self._stops)

    def _tail(self, fork: Fork, length: int) -> bytes:
        """Return the end of a candidate's text, long enough for any stop string that its last token completes."""
        before = self._tails[fork.parent] if length else b""
        return before + self._bytes(fork.token_id, is_first=not length)

    def _bytes(self, token_id: int, *, is_first: bool) -> bytes:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if token_id in tokenizer.special_ids and not self._shows_special:
            return b""
        data = tokenizer.table[token_id] if token_id < len(tokenizer.table) else b""  # a prompt may have other ids
        return data.removeprefix(b" ") if is_first and self._strips else data

    def fork(self, forks: Sequence[Fork], length: int) -> None:
        """Make ``forks`` the beams; their parents had ``length`` tokens."""
        if not self._stops:
            return
        if not self._rule.may_match(length + 1):
            self._tails = [b""] * len(forks)
            return
        tails = [self._tail(fork, length) for fork in forks]
        self._tails = [tail[max(0, len(tail) - self._kept) :] for tail in tails]

    def has_ended(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether a text contains a stop string or ends with a stop sequence."""
        if self._rule.has_runs and self._rule.run_ending(token_ids, len(token_ids)):
            return True
        if not self._stops:
            return False
        counted = [(i, t) for i, t in enumerate(token_ids) if self._rule.may_match(i + 1)]
        text = b"".join(self._bytes(token_id, is_first=i == 0) for i, token_id in counted)
        return any(stop in text for stop in self._stops)
