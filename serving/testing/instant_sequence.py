"""One sequence of the instant engine: its next token is a hash of the adapter, the seed and the tokens so far."""

from __future__ import annotations

import hashlib
from array import array

from ..request import ValidRequest

MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """One round of splitmix64 over ``state`` and ``value``: uint64 in, uint64 out."""
    z = (state ^ (value * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def digest(token_ids: tuple[int, ...]) -> int:
    """64 bits of a whole prompt, at C's speed: one of a million tokens must not stop the loop."""
    return int.from_bytes(hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest())


class InstantSequence:
    """A prompt and what was made of it so far; ``state`` is the hash of all its tokens."""

    __slots__ = ("done", "index", "num_cached", "num_generated", "num_resumed", "num_tokens", "started_at", "state")

    def __init__(self, request: ValidRequest, index: int) -> None:
        source = request.sequences[index]
        self.index = index
        self.done = False
        self.started_at = 0.0
        self.num_cached = 0
        self.num_generated = self.num_resumed = len(source.resumed_token_ids)
        self.num_tokens = len(source.prompt_token_ids) + self.num_generated
        greedy = request.sampling is None or request.sampling.temperature == 0
        self.state = mix(0 if greedy else source.seed + 1, len(request.adapter or ""))
        for character in request.adapter or "":
            self.state = mix(self.state, ord(character))
        self.state = mix(self.state, digest(source.prompt_token_ids))
        for token_id in source.resumed_token_ids:
            self.state = mix(self.state, token_id)

    def next(self, vocab_size: int) -> int:
        token_id = self.state % vocab_size
        self.state = mix(self.state, token_id)
        self.num_generated += 1
        self.num_tokens += 1
        return token_id
