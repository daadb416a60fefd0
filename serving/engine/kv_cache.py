"""What the scheduler and the runner need of a KV cache with a prefix cache in it, whatever holds it: slots or pages.

A cache knows sequences by a number (``owner``) and by their token ids; it decides itself where their keys and values
lie and what of earlier sequences can be reused. One unit everywhere: tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .latent_attention import Projections

TokenIds = npt.NDArray[np.int32]


class PrefixKey(NamedTuple):
    """Whose KV a sequence may reuse, beside the tokens: a prefix is found only under the key it was computed under.

    ``adapter`` is what the numbers depend on (``AdapterRegistry.key_of``), ``salt`` which tenants may learn from a hit
    that the prefix was there (``ValidRequest.cache_salt``).
    """

    adapter: str
    salt: str


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's keys and values: K is [num_kv_heads, tokens, key_dim].

    ``shared``: values are the keys themselves, and kept once (``latent_attention``)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False

    @property
    def elements_per_token(self) -> int:
        """Of keys and values together."""
        return self.num_kv_heads * (self.key_dim if self.shared else self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the flat row of tokens: ``num_tokens`` of sequence ``owner`` from its position ``start`` on."""

    owner: int
    start: int
    num_tokens: int


class AttentionPlan(Protocol):
    """Everything of a step that is the same in all layers, worked out once."""

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Any = None,
    ) -> Any:
        """Store k, v ``[1, Hkv, T, D]`` and attend with q ``[1, H, T, D]`` → ``[1, T, H, Dv]``.

        ``sinks`` [H] are scores of a key that every token sees and that has no value.
        """
        ...

    def attend_latent(
        self, layer: int, q: Any, kept: Any, projections: Projections, scaling: float, window: int | None
    ) -> Any:
        """Store ``kept`` ``[1, 1, T, R + P]`` and attend with q ``[1, H, T, N + P]`` → ``[1, T, H, Dv]``."""
        ...


class KVCache(ABC):
    """Owned by the engine's thread alone."""

    num_tokens_total: int
    max_model_len: int
    dtype: Any
    block_size: int = 1  # tokens that memory is given out by

    @property
    @abstractmethod
    def num_tokens_used(self) -> int:
        """Tokens whose memory is taken by running sequences or kept for reuse."""

    @abstractmethod
    def match(self, key: PrefixKey, tokens: TokenIds) -> tuple[int, int | None]:
        """(tokens that could be reused now, owner of a running sequence worth waiting for, or None)."""

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
        """Make room for ``tokens`` and reuse the longest prefix known under ``key``, or with ``source`` what they have
        in common with that running sequence: the number of tokens already computed, no more than ``at_most`` and
        ``len(tokens) - 1``; None when there is no room now. A prefix that a running sequence holds is copied, or
        read in place. ``fixed``: how many of its tokens stay what they are, where ``copy`` may write others behind;
        None for all."""

    @abstractmethod
    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Give running sequence ``target`` the KV that ``source`` has of positions ``[start, stop)``."""

    @abstractmethod
    def grow(self, owner: int, num_tokens: int) -> bool:
        """Room for ``num_tokens`` in all; False when there is none even after evicting every idle prefix."""

    @abstractmethod
    def computed(self, owner: int, tokens: TokenIds, length: int) -> None:
        """The KV of the first ``length`` of the sequence's ``tokens`` is now valid and may be reused by others."""

    @abstractmethod
    def release(self, owner: int, *, keep: bool) -> None:
        """The sequence is over; with ``keep`` its KV stays for reuse until memory is needed."""

    @abstractmethod
    def wipe(self, owner: int) -> None:
        """Zero the KV of a sequence that produced numbers that are not finite, which masks do not contain."""

    @abstractmethod
    def forget(self, adapter: str) -> None:
        """Drop idle KV of an adapter, whatever its salt."""

    @abstractmethod
    def plan(self, rows: Sequence[Row]) -> AttentionPlan:
        """Plan one forward. Runs of one token come first and are ordered by ``decode_order``."""

    @abstractmethod
    def decode_order(self, owners: Sequence[int]) -> list[int]:
        """The order in which single-token rows are laid out; may move KV to make them contiguous."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` when the books do not add up."""

    def close(self) -> None:
        """Give the memory back."""
        return
