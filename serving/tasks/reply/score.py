"""Runs a request that compares texts. The scores are the outputs of a cross-encoder after its model's activation, or
the cosines of an encoder's vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from ...interface.engine import Engine
from ...interface.events import Embedded
from ...interface.reply import Piece, Score
from ...interface.request import Activation, ValidRequest
from .embed import EncoderRun
from .pieces import Pieces, all_pieces


def run(engine: Engine, request: ValidRequest) -> Pieces:
    """Return an iterator of one ``Score`` for each pair, then ``Done``.

    The request starts at once; closing the iterator aborts the rest. Raises the ``ServingError`` that an engine's
    ``Failed`` names, and ``DeadlineExceeded``.
    """
    stream = engine.submit(for_engine(request))
    return Pieces(all_pieces(Run(request), stream), stream)


def for_engine(request: ValidRequest) -> ValidRequest:
    """Return the request that the engine gets: an encoder embeds each text, a cross-encoder gives a number per pair."""
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


class Run(EncoderRun):
    """The run of a scoring request: a cross-encoder's scores as they arrive, or the cosines once all texts have their
    vectors."""

    def __init__(self, request: ValidRequest) -> None:
        super().__init__(request)
        assert request.scoring is not None
        self._num_queries = request.scoring.num_queries
        self._activate = ACTIVATIONS[request.scoring.activation]
        self._vectors: dict[int, npt.NDArray[np.float64]] = {}

    def take(self, event: Embedded) -> Iterator[Piece]:
        vector = np.frombuffer(event.vector, dtype="<f4").astype(np.float64)
        if self._num_queries:
            self._vectors[event.index] = vector
        else:
            yield Score(index=event.index, value=self._activate(float(vector[0])))

    def conclude(self) -> Iterator[Piece]:
        if not self._num_queries:
            return
        vectors = [_unit(self._vectors[index]) for index in range(len(self._request.sequences))]
        queries, documents = vectors[: self._num_queries], vectors[self._num_queries :]
        for index, document in enumerate(documents):
            query = queries[index if len(queries) > 1 else 0]
            yield Score(index=index, value=float(query @ document))


def _unit(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector
