"""Runs an embeddings request on an engine; its pieces are the vectors, shortened and renormalised, and the usage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...interface.engine import Engine
from ...interface.errors import DeadlineExceeded, InternalError
from ...interface.events import Embedded, Event, Failed, Finished
from ...interface.reply import Done, Piece, Usage, Vector
from ...interface.request import ValidRequest
from .pieces import Pieces, all_pieces, failure


def run(engine: Engine, request: ValidRequest) -> Pieces:
    """Return an iterator of one ``Vector`` per input, as they arrive, then ``Done``.

    The request starts at once; closing the iterator aborts the rest. Raises the ``ServingError`` that an engine's
    ``Failed`` names, and ``DeadlineExceeded``.
    """
    stream = engine.submit(request)
    return Pieces(all_pieces(Run(request), stream), stream)


class EncoderRun:
    """The run of one request for whose inputs the engine returns one vector each.

    ``pieces.all_pieces`` or an event loop (``aio`` in ``flavors``) feeds it with events.
    """

    def __init__(self, request: ValidRequest) -> None:
        self._request = request
        self._missing = set(range(len(request.sequences)))

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def begin(self) -> Iterator[Piece]:
        return iter(())

    def feed(self, event: Event) -> Iterator[Piece]:
        if isinstance(event, Failed):
            raise failure(event)
        if isinstance(event, Finished):
            if event.reason == "deadline":
                raise DeadlineExceeded("timeout: the request's time limit passed before it was complete")
            return
        if not isinstance(event, Embedded):
            raise InternalError(f"the engine answered a request of task {self._request.task} with tokens")
        self._missing.discard(event.index)
        yield from self.take(event)

    def take(self, event: Embedded) -> Iterator[Piece]:
        """Return the pieces that one input's vector makes certain."""
        raise NotImplementedError

    def conclude(self) -> Iterator[Piece]:
        """Return the pieces that become certain once all vectors have arrived."""
        return iter(())

    def end(self) -> Iterator[Piece]:
        if self._missing:
            raise InternalError("the engine ended the request without finishing it")
        yield from self.conclude()
        yield Done(usage=Usage(prompt_tokens=self._request.num_prompt_tokens))


class Run(EncoderRun):
    """The run of an embeddings request: each input's vector as it arrives."""

    def take(self, event: Embedded) -> Iterator[Piece]:
        yield Vector(index=event.index, data=shortened(event.vector, self._request.dimensions))


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """Return the first ``dimensions`` values of a float32 vector, rescaled to length 1; None leaves it unchanged."""
    if dimensions is None:
        return vector
    kept = np.frombuffer(vector, dtype="<f4")[:dimensions].astype(np.float64)
    norm = float(np.linalg.norm(kept))
    return (kept / norm if norm > 0 else kept).astype("<f4").tobytes()
