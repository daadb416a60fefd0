"""Tokens that stand for vectors of a request's own prompt table (p-tuning) rather than words of the vocabulary.

Their ids follow those of the vocabulary::

    0 … V-1                  V … V+n-1
    the model's embedding    rows of the table

Images use the same mechanism, with ids of their own in the engine. Virtual tokens occur only in prompts: none is ever
sampled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...interface.errors import InvalidField
from ...interface.request import PromptTable

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Table:
    """A prompt table: ``vectors`` [n, hidden] of the ids from ``first_id`` on. ``digest`` identifies its content.

    If the ids are not consecutive, they are runs: run ``i`` begins with id ``firsts[i]`` (ascending), row ``rows[i]``.
    Such ids identify their vectors by themselves, and ``digest`` is empty."""

    vectors: Vectors
    first_id: int
    digest: str = ""
    firsts: npt.NDArray[np.int64] | None = None
    rows: npt.NDArray[np.int64] | None = None

    def vectors_of(self, ids: npt.NDArray[np.int64]) -> Vectors:
        """Return the vectors [k, hidden] of ``ids`` [k]."""
        if self.firsts is None or self.rows is None:
            return self.vectors[ids - self.first_id]
        run = np.searchsorted(self.firsts, ids, side="right") - 1
        return self.vectors[ids - self.firsts[run] + self.rows[run]]


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """Embeddings to insert in one step: ``vectors`` [k, hidden] of the tokens at ``places`` [k] in the flat row."""

    places: npt.NDArray[np.int64]
    vectors: Vectors

    def pointers(self, num_tokens: int) -> npt.NDArray[np.uint64]:
        """Return [num_tokens] addresses of the tokens' vectors, 0 for tokens without one; valid as long as this
        object."""
        found = np.zeros(num_tokens, dtype=np.uint64)
        width = self.vectors.strides[0]
        found[self.places] = self.vectors.ctypes.data + width * np.arange(len(self.places), dtype=np.uint64)
        return found


def table_of(given: PromptTable, hidden_size: int, first_id: int) -> Table:
    """Make the table of a request. Raises ``InvalidField`` if it does not fit the model."""
    size = given.num_tokens * hidden_size
    if given.num_tokens < 1 or len(given.data) != 4 * size:
        allowed = f"{given.num_tokens} (prompt_vocab_size) rows of {hidden_size} numbers"
        raise InvalidField("prompt_embedding_table", f"{len(given.data) // 4} numbers", allowed)
    vectors = np.frombuffer(given.data, dtype="<f4").reshape(given.num_tokens, hidden_size)
    if not np.isfinite(vectors).all():
        raise InvalidField("prompt_embedding_table", "nan or inf", "finite numbers")
    return Table(vectors, first_id, hashlib.blake2b(given.data, digest_size=16).hexdigest())


def embedding_width(model: Any) -> int:
    """Return the width of input embeddings; 0 if the model's layers also look at ids, so that vectors cannot replace
    tokens."""
    config = model.config.get_text_config()
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None or getattr(config, "hidden_size_per_layer_input", None):
        return 0
    return int(weight.shape[1])
