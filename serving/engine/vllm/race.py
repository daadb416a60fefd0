"""Our race of sampling as a logits processor of vLLM, which then takes the only token that is left.

A row's token is what ``sampling.sampler`` chooses for it, so seeds, penalties, bans and grammars mean the same as in
our own engine, and a resumed text goes on as it would have. vLLM loads the class by its name in the process that
samples: in the engine process itself, or in a worker of tensor parallelism. A request brings all that a draw needs in
its ``extra_args``. Only the states of grammars are shared through ``grammar_states``, which workers cannot see.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ...interface.request import Sampling
from ...interface.stop_rule import StopRule
from ..attention.kv_cache import TokenIds
from ..constraints.grammar_state import MaskedPosition
from ..constraints.logits_processors import LogitsProcessors
from ..sampling.sampler import choose
from . import shared
from .shared import ARGUMENT

GROWTH_TOKENS = 256  # tokens by which the array of a sequence's tokens grows


class Draw(Struct, frozen=True, array_like=True):
    """The part of a request that decides its tokens. ``room``: most tokens, resumed ones included; ``key``: the name
    of its sequence."""

    key: str
    sampling: Sampling
    seed: int
    num_prompt: int
    room: int


class RacePosition:
    """The end of a sequence in vLLM's batch (``scheduling.sequence.SamplePosition``). ``output_ids`` is vLLM's list,
    which grows."""

    def __init__(self, draw: Draw, known: list[int], output_ids: list[int]) -> None:
        self.key, self.sampling, self.seed, self.num_prompt = draw.key, draw.sampling, draw.seed, draw.num_prompt
        self.stop_rule = StopRule(draw.sampling, draw.room)
        self.processors = LogitsProcessors.of(draw.sampling)
        self._output_ids = output_ids
        self._num_known = self._filled = len(known)
        self._tokens = np.empty(len(known) + GROWTH_TOKENS, dtype=np.int32)
        self._tokens[: len(known)] = known

    @property
    def grammar_state(self) -> MaskedPosition | None:
        return shared.grammar_states.get(self.key)

    @property
    def num_tokens(self) -> int:
        return self._num_known + len(self._output_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def tokens(self) -> TokenIds:
        count = self.num_tokens
        if count > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(count, dtype=np.int32)])
        self._tokens[self._filled : count] = self._output_ids[self._filled - self._num_known :]
        self._filled = count
        return self._tokens[:count]

    @property
    def output(self) -> TokenIds:
        return self.tokens[self.num_prompt :]


class RaceProcessor(LogitsProcessor):
    """The processor: it leaves a row its token alone, with a logit of 0."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._positions: dict[int, RacePosition] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._positions, batch_update, _position)

    def apply(self, logits: Any) -> Any:
        """Choose the token of each row that asks for it."""
        if not self._positions:
            return logits
        rows = sorted(self._positions)
        positions = [self._positions[row] for row in rows]
        tokens = choose(logits if len(rows) == len(logits) else logits[rows], positions)
        drawn: list[tuple[int, int]] = []
        for row, position, token in zip(rows, positions, tokens, strict=True):
            if token >= 0:
                drawn.append((row, token))
                continue
            if not shared.is_engine:  # not finite, or all are forbidden, which a worker has no way to tell
                raise FloatingPointError(f"no token can be drawn for sequence {position.key}")
            shared.failures[position.key] = token
        if drawn:  # all rows at once: on a device each write is a launch
            places, chosen = torch.tensor(drawn).to(logits.device).unbind(1)
            logits[places] = float("-inf")
            logits[places, chosen] = 0.0
        return logits


def _position(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> RacePosition | None:
    encoded = (params.extra_args or {}).get(ARGUMENT)
    if encoded is None:
        return None
    assert prompt_ids is not None, "requests have token ids"
    return RacePosition(msgspec.msgpack.decode(encoded, type=Draw), prompt_ids, output_ids)
