"""Runs a request that compares texts: numbers of a cross-encoder as its model means them, or the cosine of the vectors
that an encoder gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from ..engine.interface import Engine
from ..errors import DeadlineExceeded, InternalError
from ..events import Embedded, Event, Failed, Finished
from ..reply import Done, Piece, Score, Usage
from ..request import Activation, ValidRequest
from .pieces import Pieces, all_pieces, failure


def run(engine: Engine, request: ValidRequest) -> Pieces:
    """One ``Score`` a pair, then ``Done``. The request starts at once; closing aborts the rest.

    Raises the ``ServingError`` that an engine's ``Failed`` names, and ``DeadlineExceeded``.
    """
    stream = engine.submit(for_engine(request))
    return Pieces(all_pieces(Run(request), stream), stream)


def for_engine(request: ValidRequest) -> ValidRequest:
    """What an engine does of it: an encoder embeds each text, a cross-encoder gives a number a pair."""
    assert request.scoring is not None
    task = "embeddings" if request.scoring.num_queries else request.task
    return msgspec.structs.replace(request, task=task, scoring=None)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


ACTIVATIONS: Mapping[Activation, Callable[[float], float]] = {
    "identity": lambda value: value,
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
}


class Run:
    """One request's texts or pairs, fed with events (``pieces.Run``)."""

    def __init__(self, request: ValidRequest) -> None:
        assert request.scoring is not None
        self._request = request
        self._num_queries = request.scoring.num_queries
        self._activate = ACTIVATIONS[request.scoring.activation]
        self._missing = set(range(len(request.sequences)))
        self._vectors: dict[int, npt.NDArray[np.float64]] = {}

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
            raise InternalError("the engine answered a request for scores with tokens")
        self._missing.discard(event.index)
        vector = np.frombuffer(event.vector, dtype="<f4").astype(np.float64)
        if self._num_queries:
            self._vectors[event.index] = vector
        else:
            yield Score(index=event.index, value=self._activate(float(vector[0])))

    def end(self) -> Iterator[Piece]:
        if self._missing:
            raise InternalError("the engine ended the request without finishing it")
        if self._num_queries:
            yield from self._compared()
        yield Done(usage=Usage(prompt_tokens=self._request.num_prompt_tokens))

    def _compared(self) -> Iterator[Piece]:
        vectors = [_unit(self._vectors[index]) for index in range(len(self._request.sequences))]
        queries, documents = vectors[: self._num_queries], vectors[self._num_queries :]
        for index, document in enumerate(documents):
            query = queries[index if len(queries) > 1 else 0]
            yield Score(index=index, value=float(query @ document))


def _unit(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector
