"""One sequence while the engine runs it: its tokens, how far they are computed, and what it has told its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..request import Sampling, Sequence, ValidRequest
from .kv_cache import PrefixKey, TokenIds

if TYPE_CHECKING:
    from .sampler import Sampled

HELD_TOKENS = 8  # of a reply that is not streamed: each message costs the reader's process time that the engine wants
Status = Literal["waiting", "running", "finished"]

# Legal moves; "running" goes back to "waiting" when its memory is taken for an earlier sequence (preemption).
MOVES: dict[Status, tuple[Status, ...]] = {
    "waiting": ("running", "finished"),
    "running": ("waiting", "finished"),
    "finished": (),
}


class SequenceState:
    """``num_tokens`` are known (prompt, resumed and sampled), the KV of ``num_computed`` of them exists.

    ``held`` are sampled and not told yet. ``limit`` is the most tokens the sequence may have in all. ``key``: whose
    KV it may reuse, and who may reuse its.
    """

    __slots__ = (
        "_tokens", "adapter", "arrival", "arrived_at", "first_step_at", "held", "id", "index",
        "key", "limit", "num_cached", "num_computed", "num_preemptions", "num_prompt",
        "num_resumed", "num_tokens", "prompt_scores", "provisioned", "request", "sampling", "seed", "status",
        "stop_ids",
    )  # fmt: skip

    def __init__(
        self, request: ValidRequest, index: int, *, id: int, key: PrefixKey, max_tokens: int, arrived_at: float
    ) -> None:
        source: Sequence = request.sequences[index]
        sampling = request.sampling
        if sampling is None:
            raise ValueError("a sequence to generate needs sampling parameters")
        self.request, self.index, self.id, self.key = request, index, id, key
        self.sampling: Sampling = sampling
        self.adapter = request.adapter
        self.provisioned = request.provisioned
        self.arrival = (not request.provisioned, request.priority, id)
        self.arrived_at = arrived_at
        self.first_step_at: float | None = None
        self.seed = source.seed
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.num_prompt = len(source.prompt_token_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, max_tokens)
        self.num_resumed = len(source.resumed_token_ids)
        self.num_tokens = self.num_prompt + self.num_resumed
        self._tokens = np.empty(max(self.limit, self.num_tokens) + 1, dtype=np.int32)
        self._tokens[: self.num_tokens] = source.prompt_token_ids + source.resumed_token_ids
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.held: list[Sampled] = []
        self.prompt_scores: list[Any] | None = [] if sampling.prompt_logprobs is not None else None
        self.status: Status = "waiting"

    def move(self, status: Status) -> None:
        if status not in MOVES[self.status]:
            raise RuntimeError(f"a {self.status} sequence cannot become {status}")
        self.status = status

    @property
    def tokens(self) -> TokenIds:
        """All known token ids, a view."""
        return self._tokens[: self.num_tokens]

    @property
    def output(self) -> TokenIds:
        """Sampled token ids, those resumed included, a view."""
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def may_hold(self) -> bool:
        """Whether tokens may be told a few at a time: nobody reads them as they come, no stop string may end them."""
        return not self.request.stream and not self.request.stop and len(self.held) < HELD_TOKENS

    @property
    def num_remaining(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return self.num_tokens - self.num_computed

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the sequence ends with its last token, or None when it goes on."""
        if self.num_generated == 0:
            return "length" if self.num_tokens >= self.limit else None
        if self.num_generated >= self.sampling.min_tokens and int(self._tokens[self.num_tokens - 1]) in self.stop_ids:
            return "stop"
        return "length" if self.num_tokens >= self.limit else None
