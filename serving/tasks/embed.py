"""Runs an embeddings request on an engine: vectors cut and renormalised, and the usage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..engine.interface import Engine
from ..errors import DeadlineExceeded, InternalError
from ..events import Embedded, Event, Failed, Finished
from ..reply import Done, Piece, Usage, Vector
from ..request import ValidRequest
from .pieces import Pieces, all_pieces, failure


def run(engine: Engine, request: ValidRequest) -> Pieces:
    """One ``Vector`` an input as they come, then ``Done``. The request starts at once; closing aborts the rest.

    Raises the ``ServingError`` that an engine's ``Failed`` names, and ``DeadlineExceeded``.
    """
    stream = engine.submit(request)
    return Pieces(all_pieces(Run(request), stream), stream)


class EncoderRun:
    """One request's inputs, of which an engine gives a vector each, fed with events by ``pieces.all_pieces`` or by an
    event loop (``flavors``' ``aio``)."""

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
        """What one input's vector makes certain."""
        raise NotImplementedError

    def conclude(self) -> Iterator[Piece]:
        """What is certain when all are there."""
        return iter(())

    def end(self) -> Iterator[Piece]:
        if self._missing:
            raise InternalError("the engine ended the request without finishing it")
        yield from self.conclude()
        yield Done(usage=Usage(prompt_tokens=self._request.num_prompt_tokens))


class Run(EncoderRun):
    """A vector an input, as they come."""

    def take(self, event: Embedded) -> Iterator[Piece]:
        yield Vector(index=event.index, data=shortened(event.vector, self._request.dimensions))


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """The first ``dimensions`` values of a float32 vector, scaled to length 1 again; as it is where None."""
    if dimensions is None:
        return vector
    kept = np.frombuffer(vector, dtype="<f4")[:dimensions].astype(np.float64)
    norm = float(np.linalg.norm(kept))
    return (kept / norm if norm > 0 else kept).astype("<f4").tobytes()
