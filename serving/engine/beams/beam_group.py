"""The beams of one prompt in the engine: sequences that step together, and are forked and dropped by the search.

To the scheduler and the cache each beam is a sequence of its own. A beam that has its logits waits (``num_remaining``
0) until the others have theirs; then the search chooses. A beam that goes on keeps its KV. Further children of it take
the places of beams that were dropped, and copy the KV after the prompt.

Within a grammar each beam has its own matcher. The matcher's mask is applied to the log probabilities without
normalising them again, so a text's score stays the one the model gives it. If a text can only end, only the tokens
that end it are allowed; if there is no such token, the text is complete as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...interface.constraint import GIVEN
from ...interface.errors import InvalidField, ServingError
from ...interface.events import FinishReason
from ...interface.request import Beams
from ..attention.kv_cache import KVCache
from ..constraints.grammar_state import DEAD_END, GrammarState
from ..constraints.grammar_tokenizer import GrammarTokenizer
from ..constraints.logits_processors import may_forbid, nothing_left
from ..native.continuations import can_continue
from ..sampling.sampler import adjust, is_adjusted, logprobs, restrict
from ..scheduling.inflight import SearchedText
from ..scheduling.sequence import SequenceGroup, SequenceState
from .beam_search import BeamSearch, Ending, Fork, Hypothesis
from .beam_texts import BeamTexts
from .group_beam_search import GroupBeamSearch


def make_search(beams: Beams, max_tokens: int, ends: tuple[int, ...]) -> BeamSearch | GroupBeamSearch:
    """Make the search that ``beams`` asks for; ``ends`` are the tokens that end a text."""
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
    """The search of one prompt. ``indexes`` are the request's sequences that its hypotheses become, best first; an
    index that the caller gives up is removed."""

    def __init__(self, group: SequenceGroup, root: SequenceState, beams: Beams, indexes: list[int]) -> None:
        self.group = group
        self.indexes = indexes
        self.width = beams.width
        self.search = make_search(beams, root.stop_rule.max_tokens, group.sampling.stop_token_ids)
        self._ends = frozenset(group.sampling.stop_token_ids)
        self._ranks = {index: rank for rank, index in enumerate(indexes)}
        self._beams = [root]  # in the search's order
        self._rows: dict[int, Any] = {}  # logits by sequence
        self._rule = root.stop_rule
        self._texts: BeamTexts | None = None
        if self._rule.has_runs:
            self._texts = BeamTexts(group.request, self._rule, None)
        self._begin: GrammarState | None = None  # the grammar's matcher at the start of a text
        self._is_empty = False  # the grammar allows nothing but the text without tokens
        self._may_rise = _may_rise(root)

    def read_texts(self, tokenizer: GrammarTokenizer) -> None:
        """Give the search the tokens' texts, which stop strings need. Called before the first step."""
        if self.group.request.stop:
            prompt = self.group.request.sequences[self.indexes[0]].prompt_token_ids
            self._texts = BeamTexts(self.group.request, self._rule, tokenizer, prompt)

    def take(self, beam: SequenceState, logits: Any) -> bool:
        """Keep the logits [V] after a beam's last token; return whether all beams have theirs now."""
        self._rows[beam.id] = logits
        return len(self._rows) == len(self._beams)

    def preempted(self) -> None:
        """Note that the beams have lost their KV, and will compute their last tokens again."""
        self._rows.clear()

    def advance(self, cache: KVCache, add: Callable[[], SequenceState]) -> list[SequenceState]:
        """Take a step of the search; return the new beams (made by ``add``), which have to be started.

        Raises ``FloatingPointError`` if logits are not finite, and ``ServingError`` if no text can go on or a limit of
        the grammar is reached.
        """
        logits = [self._rows[beam.id] for beam in self._beams]
        self._rows.clear()
        length, texts = self.search.length, self._texts
        ending = None if texts is None else partial(texts.ending, self.search)
        if isinstance(self.search, BeamSearch) and self._is_plain() and can_continue(logits):
            forks = self.search.step_native(logits, ending)
        else:
            forks = self._step(torch.stack(logits).float(), ending)
        if self.search.done and not self.search.best(1) and not self._is_empty:
            raise self._stuck()
        if texts is not None:
            texts.fork(forks, length)
        return self._fork(forks, cache, add) if forks else []

    def _is_plain(self) -> bool:
        """Return whether the model's log probabilities alone decide, and none of them is reported."""
        p = self.group.sampling
        asked = p.grammar is not None or p.logprobs is not None or p.generation_logits
        return not asked and not any(map(is_adjusted, self._beams))

    def _step(self, rows: Any, ending: Ending | None) -> Sequence[Fork]:
        """Take a step of the search from logits [beams, V] in float32."""
        scores = torch.log_softmax(rows, dim=-1)
        if not bool(torch.isfinite(scores.amax(-1)).all()):
            raise FloatingPointError("logits are not finite")
        sampling = self.group.sampling
        plain = scores.clone() if sampling.logprobs is not None else None
        if sampling.grammar is not None and not self.search.length:
            assert self._beams[0].grammar_state is not None
            self._begin = self._beams[0].grammar_state.fork()
        noted = sampling.generation_logits or plain is not None
        note = partial(self._notes, plain, rows) if noted else None
        return self.search.step(scores, note, ending, self._process)

    def _process(self, places: range, scores: Any) -> None:
        """Apply penalties, bans and each beam's grammar, in place, to the log probabilities [beams, V] of the beams at
        ``places``."""
        beams = self._beams[places.start : places.stop]
        if self.group.sampling.grammar is None:
            adjust(scores, beams)
            return
        ending = {i: scores[i].clone() for i, beam in enumerate(beams) if not self._may_go_on(beam)}
        adjust(scores, beams)
        restrict(scores, beams)
        for i, before in ending.items():
            grammar_state = beams[i].grammar_state
            scores[i] = float("-inf")
            if grammar_state is not None and not grammar_state.is_dead:
                ends = list(grammar_state.ends)
                scores[i, ends] = before[ends]
                if not ends and self.search.length:
                    self.search.complete(places[i])
                self._is_empty = not ends and not self.search.length

    def _may_go_on(self, beam: SequenceState) -> bool:
        """Return whether a beam's text can go on within the grammar. Raises ``ServingError`` if a limit is reached."""
        grammar_state = beam.grammar_state
        if grammar_state is None:
            return False
        try:
            return grammar_state.check()
        except ServingError:
            if grammar_state.is_lost:
                raise
            grammar_state.is_dead = True
            return False

    def _stuck(self) -> ServingError:
        sampling = self.group.sampling
        if sampling.grammar is not None and not may_forbid(sampling):
            return InvalidField(sampling.grammar.field, GIVEN, DEAD_END)
        return nothing_left(sampling)

    def _notes(self, scores: Any, rows: Any, chosen: list[Fork]) -> list[Any]:
        """Return, for each choice, its reported log probability and the logits it was made from; None if not asked for.
        As in sampling, log probabilities are those of the distribution before penalties."""
        parents = [fork.parent if len(rows) > 1 else 0 for fork in chosen]  # at first all beams are the prompt
        logits = [rows[parent] if self.group.sampling.generation_logits else None for parent in parents]
        if scores is None:
            return [(None, row) for row in logits]
        k = self.group.sampling.logprobs or 0
        scored = logprobs(scores[torch.tensor(parents)], [fork.token_id for fork in chosen], [k] * len(chosen))
        return list(zip(scored, logits, strict=True))

    def _fork(self, forks: Sequence[Fork], cache: KVCache, add: Callable[[], SequenceState]) -> list[SequenceState]:
        before, free = self._beams, dict(enumerate(self._beams))
        states = [beam.grammar_state for beam in before]
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
        if self._begin is not None:
            self._match(forks, states)
        return made

    def _match(self, forks: Sequence[Fork], states: list[GrammarState | None]) -> None:
        """Give each beam its position in the grammar: its parent's (``states``), advanced by its last token."""
        for place, (beam, fork) in enumerate(zip(self._beams, forks, strict=True)):
            parent = states[fork.parent]
            beam.grammar_state = None
            if parent is not None and self.search.is_alive(place):
                beam.grammar_state = parent.fork()
                beam.grammar_state.consume((fork.token_id,))

    def settled(self) -> list[SearchedText]:
        """Take the texts that are certain before the search has ended and have not been delivered yet."""
        if self._may_rise:
            return []
        num_certain = self.search.num_certain
        certain = [index for index in self.indexes if self._ranks[index] < num_certain]
        found = self._texts_of(certain, "stop") if certain else []
        self.indexes = [index for index in self.indexes if index not in certain]
        return found

    def texts(self, reason: FinishReason) -> list[SearchedText]:
        """Return the texts that are still wanted.

        If ``reason`` is "abort" or "deadline", it is the finish reason of all of them. After a deadline they are the
        best texts so far; after an abort they are empty. Otherwise each text has its own finish reason."""
        return self._texts_of(self.indexes, reason)

    def _texts_of(self, indexes: Sequence[int], reason: FinishReason) -> list[SearchedText]:
        best = self.search.best(len(self._ranks)) if reason != "abort" else []
        texts = []
        for index in indexes:
            rank = self._ranks[index]
            found = best[rank] if rank < len(best) else Hypothesis((), 0.0)
            end: FinishReason = reason
            if reason not in ("abort", "deadline"):
                end = "stop" if self._has_ended(found.token_ids) else "length"
            scored = tuple(score for score, _ in found.notes if score is not None)
            logits = tuple(row for _, row in found.notes if row is not None)
            texts.append(SearchedText(index, found.token_ids, scored, end, logits))
        return texts

    def _has_ended(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether a text is complete rather than cut off. An empty text is: it means that the search found fewer
        texts than were asked for."""
        if not token_ids or token_ids[-1] in self._ends:
            return True
        if self._texts is not None and self._texts.has_ended(token_ids):
            return True
        if self._begin is None:
            return False
        grammar_state = self._begin.fork()
        try:
            grammar_state.consume(token_ids)
        except ServingError:
            return False
        return grammar_state.is_complete


def _may_rise(sequence: SequenceState) -> bool:
    """Return whether a request's biases and penalties may make log probabilities greater than 0. A token could then
    increase a text's sum, and no text would be certain before the end of the search."""
    p, processors = sequence.sampling, sequence.processors
    if p.presence_penalty < 0.0 or p.frequency_penalty < 0.0 or any(bias > 0.0 for _, bias in p.logit_bias):
        return True
    return processors is not None and processors.bias is not None and bool((processors.bias > 0.0).any())
