"""The needle test of determinism: the same request many times among others, each answer compared bit for bit.

A *needle* is a request whose answer alone is known: tokens, log probabilities and, where it asks for them, logits. The
others are its neighbours; which, how many, when they come and when they are given up is drawn at random.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ..interface.engine import Core, EngineOutput
from ..interface.events import Failed, Finished, Logits, PromptScored, TokenLogprob, Tokens
from ..interface.request import LogitsOf, ValidRequest

RESUMED_SHARE = 0.2  # of the needles: they go on as after an engine's death
COLD_SHARE = 0.5  # of the needles: their prompts are shared with nobody
GIVEN_UP = 0.01  # of the neighbours, in each step

Neighbour = Callable[[random.Random, str], ValidRequest]
"""Makes one of an id."""


@dataclass(slots=True)
class Answer:
    """The output of each sequence of a request. Equal answers are bitwise equal: floats by their bits."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    scored: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    logits: dict[tuple[LogitsOf, int], bytes] = field(default_factory=lambda: defaultdict(bytes))
    ends: dict[int, str] = field(default_factory=dict)
    failed: Failed | None = None

    def take(self, event: object) -> None:
        if isinstance(event, Tokens):
            self.tokens[event.index] += event.token_ids
            self.logprobs[event.index] += event.logprobs
        elif isinstance(event, PromptScored):
            self.scored[event.index] = event.logprobs
        elif isinstance(event, Logits):
            self.logits[event.of, event.index] += event.data
        elif isinstance(event, Finished):
            self.ends[event.index] = event.reason
        elif isinstance(event, Failed):
            self.failed = event

    def is_done(self, request: ValidRequest) -> bool:
        return self.failed is not None or len(self.ends) == len(request.sequences)

    def after(self, count: int) -> Answer:
        """Return the expected rest of a request that was resumed after ``count`` tokens of its one sequence."""
        rest = Answer(scored=self.scored, ends=self.ends)
        rest.tokens[0], rest.logprobs[0] = self.tokens[0][count:], self.logprobs[0][count:]
        for key, data in self.logits.items():
            size = len(data) // max(len(self.tokens[0]), 1)
            rest.logits[key] = data[count * size :] if key[0] == "generation" else data
        return rest


def answer(core: Core, request: ValidRequest) -> Answer:
    """Run ``request`` alone and return its output."""
    core.add(request, None)
    found = Answer()
    while not found.is_done(request):
        for _, _, event in core.step():
            found.take(event)
    return found


def again(request: ValidRequest, name: str) -> ValidRequest:
    """Return ``request`` under another id, its prompt's KV shared with the others of its kind."""
    return msgspec.structs.replace(request, request_id=name, cache_salt="needles")


@dataclass(slots=True)
class Needles:
    """``count`` answers were compared, of which ``resumed`` went on after some tokens; ``mismatches`` names the needle,
    by its place, of each that was another."""

    count: int = 0
    resumed: int = 0
    mismatches: list[int] = field(default_factory=list)


def needles(
    core: Core,
    wanted: Sequence[tuple[ValidRequest, Answer]],
    neighbour: Neighbour,
    *,
    count: int,
    at_once: int,
    seed: int = 0,
    resume: bool = True,
) -> Needles:
    """Run ``count`` needles in ``core``, each one of ``wanted`` with its answer alone, among as many neighbours.

    ``at_once`` requests run or wait at a time. Half of the needles share their prompt's KV with those before them.
    ``resume``: some go on as after the death of an engine.
    """
    chance, found = random.Random(seed), Needles()
    running: dict[str, tuple[ValidRequest, Answer, int, Answer | None]] = {}
    started = 0
    while found.count < count:
        while len(running) < at_once:
            name = f"{seed}-{started + len(running)}-{chance.random()}"
            place, expected = -1, None
            if started < count and chance.random() < 0.5:
                place, started = started % len(wanted), started + 1
                request, expected = _needle(chance, wanted[place], name, resume=resume)
            else:
                request = neighbour(chance, name)
            core.add(request, None)
            running[name] = request, Answer(), place, expected
        _take(core.step(), running)
        for name, (request, got, place, expected) in list(running.items()):
            if got.is_done(request):
                del running[name]
                if expected is not None:
                    found.count += 1
                    found.resumed += any(one.resumed_token_ids for one in request.sequences)
                    if got != expected:
                        found.mismatches.append(place)
            elif expected is None and chance.random() < GIVEN_UP:
                core.abort(name)
    for name in running:
        core.abort(name)
    while core.has_work():
        core.step()
    return found


def _take(outputs: Iterable[EngineOutput], running: dict[str, tuple[ValidRequest, Answer, int, Answer | None]]) -> None:
    for _, name, event in outputs:
        if name in running:
            running[name][1].take(event)


def _needle(
    chance: random.Random, wanted: tuple[ValidRequest, Answer], name: str, *, resume: bool
) -> tuple[ValidRequest, Answer]:
    """Return one of ``wanted`` and its expected output."""
    request, expected = again(wanted[0], name), wanted[1]
    if chance.random() < COLD_SHARE:
        request = msgspec.structs.replace(request, cache_salt=None)
    assert request.sampling is not None
    alone = len(request.sequences) == 1 and request.sampling.beams is None
    length = len(expected.tokens[0]) if alone else 0
    if not resume or length < 2 or chance.random() >= RESUMED_SHARE:
        return request, expected
    known = chance.randrange(1, length)
    sequence = msgspec.structs.replace(request.sequences[0], resumed_token_ids=tuple(expected.tokens[0][:known]))
    return msgspec.structs.replace(request, sequences=(sequence,)), expected.after(known)
