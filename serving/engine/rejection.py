"""Rejection sampling of drafts that were drawn from a distribution of their own (Leviathan et al. 2023, "Fast Inference
from Transformers via Speculative Decoding").

With p the distribution that the request's own parameters make of the model's logits, and q the softmax of the draft's,
a draft x is taken with probability min(1, p(x) / q(x)); where it is not, the token is drawn from max(0, p - q). The
text is then distributed as without drafts, and more drafts are taken than by drawing as ever; but which text it is
depends on them too. It does not depend on how many of them were computed along: this is how a token is drawn at each
place up to which the text is what was drafted, wherever that place came in a step.

The uniform number that decides is drawn by (seed, position) beside those of the race (``randomness``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .randomness import exponentials, uniforms
from .sequence import Place


def is_drafted(place: Place) -> bool:
    """Whether the token there is drawn in view of a draft. Of a greedy one it is the same token either way."""
    draft = place.sampling.draft
    if draft is None or draft.logits is None or place.sampling.temperature == 0.0:
        return False
    count = place.num_generated
    return count < len(draft.token_ids) and tuple(place.output.tolist()) == draft.token_ids[:count]


def draft_of(place: Place) -> tuple[int, Any]:
    """The draft at a place where there is one, and the distribution that it was drawn from, float64 [V]."""
    draft = place.sampling.draft
    assert draft is not None
    assert draft.logits is not None
    size = len(draft.logits) // len(draft.token_ids)
    row = np.frombuffer(draft.logits, dtype="<f4", count=size // 4, offset=size * place.num_generated)
    return draft.token_ids[place.num_generated], torch.softmax(torch.from_numpy(row.astype(np.float64)), -1)


def draw(target: Any, drafted: Any, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """A token for each row of ``target`` (p) and ``drafted`` (q), both float64 [B, V] and summing to one; ``drafts``
    [B] were drawn from the latter."""
    ids = torch.tensor(drafts)[:, None]
    own, other = target.gather(1, ids)[:, 0], drafted.gather(1, ids)[:, 0]
    taken = uniforms(seeds, positions) * other < own
    rest = (target - drafted).clamp_(min=0)
    # where p and q are one distribution but for the last bits, what is left may be nothing
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    instead = (rest / exponentials(seeds, positions, target.shape[-1])).argmax(-1)
    tokens: list[int] = torch.where(taken, ids[:, 0], instead).tolist()
    return tokens
