"""The iterator over a reply's pieces, and the whole reply assembled from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from ...interface.engine import EventStream
from ...interface.errors import ServingError, from_kind
from ...interface.events import Event, Failed
from ...interface.reply import (
    CallDelta,
    Choice,
    Delta,
    Done,
    Ended,
    LogitRows,
    Piece,
    Reply,
    ReplyCall,
    Score,
    Step,
    TextLogprob,
    TextLogprobs,
    Usage,
    Vector,
)
from ...interface.request import LogitsOf


class Pieces:
    """An iterator of pieces that closes the engine's stream at the end, on an error and when it is garbage-collected.

    It is not a plain generator, because closing a generator that has not started would leave the engine running.
    """

    def __init__(self, pieces: Iterator[Piece], stream: EventStream, run: Run | None = None) -> None:
        """Take the pieces and the stream they come from.

        ``run`` makes the pieces; it is given if the code that delivers the stream's events may feed it directly.
        """
        self._pieces = pieces
        self.stream, self.run = stream, run

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except BaseException:  # StopIteration too, because nothing follows it
            self.stream.close()
            raise

    def close(self) -> None:
        """Abort the sequences that still run. May be called more than once."""
        self.stream.close()

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Run(Protocol):
    """A run that turns a request's events into pieces of the reply.

    Call ``begin``, then ``feed`` for each event until ``is_complete`` or the end of the stream, then ``end``. Each may
    raise a ``ServingError``.
    """

    @property
    def is_complete(self) -> bool:
        """Whether no further event is needed."""
        ...

    def begin(self) -> Iterator[Piece]:
        """Return the pieces that are known before the first event: an echoed prompt."""
        ...

    def feed(self, event: Event) -> Iterable[Piece]:
        """Return the pieces that one event makes certain."""
        ...

    def end(self) -> Iterator[Piece]:
        """Return the last pieces: ``Done`` with the usage. Raises ``InternalError`` if the engine left a text open."""
        ...


def all_pieces(run: Run, stream: EventStream) -> Iterator[Piece]:
    """Yield every piece of a reply as the stream's events arrive. Raises the same errors as ``run``."""
    yield from run.begin()
    for event in stream:
        yield from run.feed(event)
        if run.is_complete:
            break
    yield from run.end()


def failure(event: Failed) -> ServingError:
    """Return the error that an engine's ``Failed`` names."""
    error = from_kind(event.kind, event.message, param=event.param)
    error.retry_after = event.retry_after
    return error


def gather(pieces: Iterable[Piece]) -> Reply:
    """Return the whole reply assembled from its pieces."""
    choices: dict[int, Gathered] = {}
    vectors: dict[int, bytes] = {}
    scores: dict[int, float] = {}
    done = Done(usage=Usage(prompt_tokens=0))
    for piece in pieces:
        if isinstance(piece, Delta):
            choices.setdefault(piece.index, Gathered()).add(piece)
        elif isinstance(piece, Ended):
            choices.setdefault(piece.index, Gathered()).ended = piece
        elif isinstance(piece, LogitRows):
            choices.setdefault(piece.index, Gathered()).rows.append(piece)
        elif isinstance(piece, Vector):
            vectors[piece.index] = piece.data
        elif isinstance(piece, Score):
            scores[piece.index] = piece.value
        elif isinstance(piece, Step):
            choices.setdefault(piece.index, Gathered()).steps.append(piece)
        else:
            done = piece
    return Reply(
        choices=tuple(choices[index].choice(index) for index in sorted(choices)),
        vectors=tuple(vectors[index] for index in sorted(vectors)),
        scores=tuple(scores[index] for index in sorted(scores)),
        usage=done.usage,
        completed=done.completed,
        trace=done.trace,
    )


class Gathered:
    """The pieces of one choice."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.steps: list[Step] = []
        self.rows: list[LogitRows] = []
        self.ended: Ended | None = None

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def choice(self, index: int) -> Choice:
        ended = self.ended or Ended(index=index, finish_reason="abort")
        return Choice(
            index=index,
            text="".join(delta.text for delta in self.deltas),
            reasoning="".join(delta.reasoning for delta in self.deltas),
            calls=self.calls,
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
            token_ids=tuple(token for delta in self.deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in self.deltas for entry in delta.logprobs),
            text_logprobs=self._text_logprobs(),
            steps=tuple(self.steps),
            token_logprobs=tuple(score for delta in self.deltas for score in delta.token_logprobs),
            context_logits=self._logits("context"),
            generation_logits=self._logits("generation"),
        )

    def _logits(self, of: LogitsOf) -> bytes:
        return b"".join(rows.data for rows in self.rows if rows.of == of)

    def _text_logprobs(self) -> tuple[TextLogprob, ...]:
        if not any(delta.logprobs for delta in self.deltas):
            return ()
        found = TextLogprobs()
        return (*(entry for delta in self.deltas for entry in found.add(delta)), *found.rest())

    @property
    def calls(self) -> tuple[ReplyCall, ...]:
        """The calls so far; the last one may be incomplete."""
        found: dict[int, list[CallDelta]] = {}
        for delta in self.deltas:
            for call in delta.calls:
                found.setdefault(call.index, []).append(call)
        return tuple(
            ReplyCall(
                id=parts[0].id or "",
                name=parts[0].name or "",
                arguments="".join(part.arguments for part in parts),
                custom=parts[0].custom,
            )
            for _, parts in sorted(found.items())
        )
