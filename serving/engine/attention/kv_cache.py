"""The interface of a KV cache with prefix caching, for the scheduler and the runner, whether it has slots or pages.

A cache knows sequences by a number (``owner``) and by their token ids. It decides where their keys and values are
stored, and what can be reused from earlier sequences. All sizes are in tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

if TYPE_CHECKING:
    from .latent_attention import Projections

TokenIds = npt.NDArray[np.int32]


class PrefixKey(NamedTuple):
    """The owner of the KV that a sequence may reuse, beside the tokens: a prefix is found only under the key it was
    computed with.

    ``adapter`` is the key of the adapter that the numbers depend on (``AdapterRegistry``). ``salt`` separates tenants
    that must not learn from a hit that a prefix was there (``ValidRequest.cache_salt``).
    """

    adapter: str
    salt: str


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The heads and widths of one layer's keys and values; K is [num_kv_heads, tokens, key_dim].

    ``shared``: the values are the keys' first numbers, stored once (``latent_attention``)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False

    @property
    def elements_per_token(self) -> int:
        """Elements per token of keys and values together."""
        return self.num_kv_heads * (self.key_dim if self.shared else self.key_dim + self.value_dim)


class Row(Struct, frozen=True):
    """A run of the flat row of tokens: ``num_tokens`` tokens of sequence ``owner`` from its position ``start``."""

    owner: int
    start: int
    num_tokens: int


class AttentionArgs(NamedTuple):
    """The way in which a layer attends, whatever its queries, keys and values.

    ``window`` is how many tokens a token sees, itself included; None for all before it. ``softcap`` bounds the scores.
    ``sinks`` [H] are the scores of a key that every token sees and that has no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None

    @property
    def is_plain(self) -> bool:
        """Return whether a fused kernel computes it: scores are neither capped nor joined by sinks."""
        return self.softcap is None and self.sinks is None


class AttentionPlan(Protocol):
    """The parts of a step's attention that are the same in all layers, computed once."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: AttentionArgs) -> Any:
        """Store k, v ``[1, Hkv, T, D]`` and attend with q ``[1, H, T, D]`` → ``[1, T, H, Dv]``."""
        ...

    def attend_latent(self, layer: int, q: Any, kept: Any, projections: Projections, args: AttentionArgs) -> Any:
        """Store ``kept`` ``[1, 1, T, R + P]`` and attend with q ``[1, H, T, N + P]`` → ``[1, T, H, Dv]``.

        ``args`` have neither ``softcap`` nor ``sinks``.
        """
        ...


class KVCache(ABC):
    """A KV cache. Only the engine's thread may use it."""

    num_tokens_total: int
    max_model_len: int
    dtype: Any
    block_size: int = 1  # tokens per unit of allocation

    @property
    @abstractmethod
    def num_tokens_used(self) -> int:
        """How many tokens' memory running sequences take, or is kept for reuse."""

    @abstractmethod
    def match(self, key: PrefixKey, tokens: TokenIds) -> tuple[int, int | None]:
        """Return how many tokens could be reused now, and the owner of a running sequence worth waiting for or None."""

    @abstractmethod
    def acquire(
        self,
        owner: int,
        key: PrefixKey,
        tokens: TokenIds,
        *,
        at_most: int | None = None,
        source: int | None = None,
        fixed: int | None = None,
    ) -> int | None:
        """Make room for ``tokens`` and reuse the longest prefix known under ``key``, or, with ``source``, the prefix
        shared with that running sequence.

        Returns the number of tokens already computed, at most ``at_most`` and ``len(tokens) - 1``, or None if there is
        no room now. A prefix that a running sequence holds is copied, or read in place. ``fixed``: how many of the
        tokens never change, if ``copy`` may overwrite those after them; None for all."""

    @abstractmethod
    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Give the running sequence ``target`` the KV of ``source`` at positions ``[start, stop)``."""

    @abstractmethod
    def grow(self, owner: int, num_tokens: int) -> bool:
        """Make room for a total of ``num_tokens``; False if there is none even after evicting every idle prefix."""

    @abstractmethod
    def computed(self, owner: int, tokens: TokenIds, length: int) -> None:
        """Note that the KV of the first ``length`` of the sequence's ``tokens`` is valid; others may reuse it."""

    @abstractmethod
    def release(self, owner: int, *, keep: bool) -> None:
        """Release a sequence that has ended. With ``keep`` its KV stays for reuse until memory is needed."""

    @abstractmethod
    def wipe(self, owner: int) -> None:
        """Zero the KV of a sequence with numbers that are not finite, which masks would not keep from others."""

    @abstractmethod
    def forget(self, adapter: str) -> None:
        """Drop the idle KV of an adapter, whatever its salt."""

    @abstractmethod
    def plan(self, rows: Sequence[Row]) -> AttentionPlan:
        """Plan one forward. Runs of one token must come first, in the order of ``decode_order``."""

    @abstractmethod
    def decode_order(self, owners: Sequence[int]) -> list[int]:
        """Return the order in which to lay out single-token rows; may move KV to make them contiguous."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if the cache's accounts do not add up."""

    def close(self) -> None:
        """Free the memory."""
        return
