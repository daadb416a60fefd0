"""The beams of one prompt in the engine: sequences that step together, and are forked and dropped as the search says.

Each beam is a sequence of its own to the scheduler and the cache. One that has its logits waits (``num_remaining`` 0)
until the others have theirs; then the search chooses. A beam that goes on keeps its KV; further children of it take the
places of beams that were dropped, and copy what comes after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..events import FinishReason
from ..request import Beams
from .beam_search import BeamSearch, Fork, Hypothesis
from .group_beam_search import GroupBeamSearch
from .inflight import SearchedText
from .kv_cache import KVCache
from .sampler import adjust, logprobs
from .sequence import SequenceGroup, SequenceState


def make_search(beams: Beams, max_tokens: int, ends: tuple[int, ...]) -> BeamSearch | GroupBeamSearch:
    """The search that ``beams`` asks for; ``ends`` are the tokens that end a text."""
    if beams.num_groups == 1:
        return BeamSearch(beams.width, max_tokens, ends, beams.length_penalty, beams.early_stopping)
    return GroupBeamSearch(
        beams.width,
        max_tokens,
        ends,
        beams.length_penalty,
        beams.early_stopping,
        num_groups=beams.num_groups,
        diversity_penalty=beams.diversity_penalty,
        filler=ends[0] if ends else 0,
    )


class BeamGroup:
    """The search of one prompt. ``indexes`` are the request's sequences that its hypotheses become, best first; those
    that the caller gives up leave it."""

    def __init__(self, group: SequenceGroup, root: SequenceState, beams: Beams, indexes: list[int]) -> None:
        self.group = group
        self.indexes = indexes
        self.width = beams.width
        self.search = make_search(beams, root.stop_rule.max_tokens, group.sampling.stop_token_ids)
        self._ends = frozenset(group.sampling.stop_token_ids)
        self._ranks = {index: rank for rank, index in enumerate(indexes)}
        self._beams = [root]  # in the search's order
        self._rows: dict[int, Any] = {}  # logits by sequence

    def take(self, beam: SequenceState, logits: Any) -> bool:
        """Keep the logits [V] after a beam's last token; whether all beams have theirs now."""
        self._rows[beam.id] = logits
        return len(self._rows) == len(self._beams)

    def preempted(self) -> None:
        """Its beams have lost their KV: they compute their last tokens again."""
        self._rows.clear()

    def advance(self, cache: KVCache, add: Callable[[], SequenceState]) -> list[SequenceState]:
        """Take a step of the search; returns beams that are new (``add`` makes them) and have to be started.

        Raises ``FloatingPointError`` where logits are not finite.
        """
        rows = torch.stack([self._rows[beam.id] for beam in self._beams]).float()
        self._rows.clear()
        scores = torch.log_softmax(rows, dim=-1)
        if not bool(torch.isfinite(scores.amax(-1)).all()):
            raise FloatingPointError("logits are not finite")
        plain = scores.clone() if self.group.sampling.logprobs is not None else None
        adjust(scores, self._beams)
        forks = self.search.step(scores, None if plain is None else lambda chosen: self._notes(plain, chosen))
        return self._fork(forks, cache, add) if forks else []

    def _notes(self, scores: Any, chosen: list[Fork]) -> list[Any]:
        """The reported log probability of each choice: of the distribution before penalties, as when sampling."""
        parents = torch.tensor([fork.parent for fork in chosen])
        k = self.group.sampling.logprobs or 0
        return logprobs(scores[parents], [fork.token_id for fork in chosen], [k] * len(chosen))

    def _fork(self, forks: Sequence[Fork], cache: KVCache, add: Callable[[], SequenceState]) -> list[SequenceState]:
        before, free = self._beams, dict(enumerate(self._beams))
        after: list[SequenceState | None] = [free.pop(fork.parent, None) for fork in forks]
        spare, made = list(free.values()), []
        for place, fork in enumerate(forks):
            if after[place] is None:
                beam = spare.pop() if spare else add()
                source = before[fork.parent]
                if beam.status == "running":
                    cache.copy(source.id, beam.id, source.num_prompt, source.num_computed)
                else:
                    made.append(beam)
                beam.become(source)
                if beam.status == "running":
                    cache.computed(beam.id, beam.tokens, beam.num_computed)
                after[place] = beam
        self._beams = [beam for beam in after if beam is not None]
        for beam, fork in zip(self._beams, forks, strict=True):
            beam.append(fork.token_id)
        return made

    def texts(self, reason: FinishReason) -> list[SearchedText]:
        """The texts that are still wanted; ``reason`` "abort" or "deadline" is theirs, and they are what is best by
        now, else each ends as it does."""
        best = self.search.best(len(self._ranks)) if reason != "abort" else []
        texts = []
        for index in self.indexes:
            rank = self._ranks[index]
            found = best[rank] if rank < len(best) else Hypothesis((), 0.0)
            end: FinishReason = reason
            if reason not in ("abort", "deadline"):
                end = "stop" if found.token_ids and found.token_ids[-1] in self._ends else "length"
            texts.append(SearchedText(index, found.token_ids, found.notes, end))
        return texts
