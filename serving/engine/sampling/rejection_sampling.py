"""Rejection sampling of drafts that were drawn from a distribution of their own.

The method is from Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Let p be the
distribution that the request's parameters make of the model's logits, and q the softmax of the draft's logits. A draft
x is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from max(0, p - q). The text is then
distributed as without drafts, and more drafts are accepted than by ordinary drawing. Which text results depends on the
drafts too, but not on how many of them were computed in one step: a token is drawn this way at every place up to which
the text agrees with the draft, wherever in a step that place came.

The uniform number that decides is drawn by (seed, position), independently of those of the race (``randomness``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..scheduling.sequence import SamplePosition
from .randomness import exponentials, uniforms


def is_drafted(place: SamplePosition) -> bool:
    """Return whether rejection sampling draws the token at ``place``. A greedy token is the same either way."""
    draft = place.sampling.draft
    if draft is None or draft.logits is None or place.sampling.temperature == 0.0:
        return False
    count = place.num_generated
    return count < len(draft.token_ids) and tuple(place.output.tolist()) == draft.token_ids[:count]


def draft_of(place: SamplePosition) -> tuple[int, Any]:
    """Return the draft at a place that has one, and the distribution that it was drawn from, float64 [V]."""
    draft = place.sampling.draft
    assert draft is not None
    assert draft.logits is not None
    size = len(draft.logits) // len(draft.token_ids)
    row = np.frombuffer(draft.logits, dtype="<f4", count=size // 4, offset=size * place.num_generated)
    return draft.token_ids[place.num_generated], torch.softmax(torch.from_numpy(row.astype(np.float64)), -1)


def draw(target: Any, drafted: Any, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Draw a token for each row of ``target`` (p) and ``drafted`` (q).

    Both are float64 [B, V] and sum to one; ``drafts`` [B] were drawn from the latter.
    """
    ids = torch.tensor(drafts)[:, None]
    own, other = target.gather(1, ids)[:, 0], drafted.gather(1, ids)[:, 0]
    taken = uniforms(seeds, positions) * other < own
    rest = (target - drafted).clamp_(min=0)
    # if p and q differ in their last bits only, nothing may be left of p - q
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    instead = (rest / exponentials(seeds, positions, target.shape[-1])).argmax(-1)
    tokens: list[int] = torch.where(taken, ids[:, 0], instead).tolist()
    return tokens
