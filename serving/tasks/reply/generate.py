"""Runs a chat or completions request on an engine and turns its events into pieces: text, finish reasons, usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...interface.engine import Engine, EventStream
from ...interface.errors import DeadlineExceeded, InternalError
from ...interface.events import DraftCounts, Embedded, Event, Failed, Finished, Logits, PromptScored, Timed, Tokens
from ...interface.guardrails import NO_RULES, TextRules
from ...interface.reply import Delta, Done, Piece, Step, Usage
from ...interface.request import ValidRequest
from ..prompt.text import TextModel
from .choice import ChoiceText
from .guarded_run import GuardedRun
from .parsed_choice import ParsedChoice
from .pieces import Pieces, all_pieces, failure, gather

__all__ = ["OnTokens", "Pieces", "gather", "run"]

OnTokens = Callable[[int, int], None]


def run(
    engine: Engine,
    request: ValidRequest,
    text: TextModel,
    on_tokens: OnTokens | None = None,
    rules: TextRules = NO_RULES,
) -> Pieces:
    """Return an iterator of the pieces of one reply as ``rules`` leave them, ``Done`` last.

    The request starts at once; closing the iterator aborts the sequences that still run. ``on_tokens(index, count)`` is
    called before each piece that counts tokens is yielded, so that a ledger never lags behind the caller. Raises the
    ``ServingError`` that an engine's ``Failed`` names, and ``DeadlineExceeded``.
    """
    stream = engine.submit(request)
    made = Run(request, text, stream, on_tokens)
    if not rules.is_empty:  # which have to see every piece
        return Pieces(all_pieces(GuardedRun(made, stream, rules), stream), stream)
    return Pieces(all_pieces(made, stream), stream, made)


def _ignore(index: int, count: int) -> None:
    pass


def _pieces(choice: ChoiceText, event: Tokens | Timed | PromptScored | Logits) -> Iterator[Piece]:
    if isinstance(event, Tokens):
        return choice.push(event)
    if isinstance(event, Timed):
        return _steps(event)
    return choice.scored(event) if isinstance(event, PromptScored) else choice.logits(event)


def _steps(event: Timed) -> Iterator[Piece]:
    for step in event.steps:
        yield Step(index=event.index, waited=step.waited, elapsed=step.elapsed, batch_size=step.batch_size)


class Run:
    """The run of one request, fed with events by ``pieces.all_pieces`` or by an event loop.

    ``_open`` has the indexes of choices whose text is not complete, ``_reported`` of those that the engine has ended.
    """

    __slots__ = ("_cached", "_drafts", "_on_tokens", "_open", "_reported", "_request", "_stream", "choices")

    def __init__(
        self, request: ValidRequest, text: TextModel, stream: EventStream, on_tokens: OnTokens | None = None
    ) -> None:
        self._request = request
        self._on_tokens = on_tokens or _ignore
        self._stream = stream
        kind = ChoiceText if request.read_as is None else ParsedChoice
        self.choices = [kind(request, index, text) for index in range(len(request.sequences))]
        self._open = set(range(len(self.choices)))
        self._reported: set[int] = set()
        self._cached = [0] * len(self.choices)
        self._drafts = DraftCounts()

    def begin(self) -> Iterator[Piece]:
        for choice in self.choices:
            yield from choice.begin()

    def feed(self, event: Event) -> Iterable[Piece]:
        if type(event) is Tokens:  # nearly all are, and most of them are plain
            text = self.read(event)
            if text is not None:
                count = len(event.token_ids)
                return (Delta(index=event.index, text=text, num_tokens=count, token_ids=event.token_ids),)
        if isinstance(event, Failed):
            raise failure(event)
        return self._on_event(event)

    def read(self, event: Tokens) -> str | None:
        """Return the text of ``event``, and count its tokens, if the event has only text.

        Return None, and change nothing, if it has to go through ``feed``.
        """
        text = self.choices[event.index].read(event) if event.index in self._open else None
        if text is not None:
            self._on_tokens(event.index, len(event.token_ids))
        return text

    def end(self) -> Iterator[Piece]:
        if self._open:
            raise InternalError("the engine ended the request without finishing it")
        completed = max(self._request.created, int(time.time()))  # the clock may have been set back
        yield Done(usage=self._usage(), completed=completed)

    def _on_event(self, event: Tokens | Timed | PromptScored | Logits | Finished | Embedded) -> Iterator[Piece]:
        if isinstance(event, Embedded):
            raise InternalError("the engine answered a generating request with a vector")
        choice = self.choices[event.index]
        if isinstance(event, Finished):
            self._reported.add(event.index)
            self._cached[event.index] = event.num_cached_tokens
            if event.drafts is not None:
                self._drafts += event.drafts
            if event.index in self._open:
                yield from self._end(choice, event)
        elif event.index in self._open:
            for piece in _pieces(choice, event):
                self._count(piece)
                yield piece
            if choice.matched is not None:
                self._open.discard(event.index)
                self._stream.finish(event.index)

    def _end(self, choice: ChoiceText, event: Finished) -> Iterator[Piece]:
        reason: Any = event.reason
        if reason == "deadline":
            if not self._request.truncate_on_timeout:
                raise DeadlineExceeded("timeout: the request's time limit passed before it was complete")
            reason = "length"
        for piece in choice.end(reason):
            self._count(piece)
            yield piece
        self._open.discard(event.index)

    def _count(self, piece: Piece) -> None:
        if isinstance(piece, Delta) and piece.num_tokens:
            self._on_tokens(piece.index, piece.num_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether every text is complete and the engine has reported the end of every sequence."""
        return not self._open and len(self._reported) == len(self.choices)

    def _usage(self) -> Usage:
        """Return the usage.

        Each prompt counts once. Cached tokens are those of each prompt's first choice, because later choices find in
        the cache what the first one has put there.
        """
        drafts, sampling = self._drafts, self._request.sampling
        predicts = sampling is not None and sampling.draft is not None
        return Usage(
            prompt_tokens=self._request.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(self._cached[:: self._request.n]),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
            draft_tokens=drafts.proposed,
            accepted_draft_tokens=drafts.accepted,
            accepted_prediction_tokens=drafts.predicted_accepted if predicts else None,
            rejected_prediction_tokens=drafts.predicted - drafts.predicted_accepted if predicts else None,
        )
