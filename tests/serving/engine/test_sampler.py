"""The sampler draws what its parameters say, each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import request_of

from mlflow_llm.serving.engine.randomness import uniforms
from mlflow_llm.serving.engine.sampler import sample
from mlflow_llm.serving.engine.sequence import SequenceState

DRAWS = 4000


def sequence(seed: int = 0, output: tuple[int, ...] = (), **more: Any) -> SequenceState:
    request = request_of("r", (1, 2), seed=seed, resumed=output, **{"max_tokens": 50, "temperature": 1.0, **more})
    return SequenceState(request, 0, id=0, key="", max_tokens=256, arrived_at=0.0)


def frequencies(logits: Any, **more: Any) -> Any:
    """How often each token is drawn over ``DRAWS`` seeds."""
    rows = logits[None].expand(DRAWS, -1)
    drawn = [s.token_id for s in sample(rows, [sequence(seed, **more) for seed in range(DRAWS)])]
    return np.bincount(drawn, minlength=len(logits)) / DRAWS


def kept(p: Any, places: list[int]) -> Any:
    """The distribution ``p`` with all but ``places`` cut away."""
    cut = np.zeros_like(p)
    cut[places] = p[places]
    return cut / cut.sum()


LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0])
P = torch.softmax(LOGITS, -1).double().numpy()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, P),
        ({"temperature": 2.0}, torch.softmax(LOGITS / 2, -1).numpy()),
        ({"top_k": 2}, kept(P, [1, 3])),
        ({"top_p": 0.6}, kept(P, [1, 3])),
        ({"top_k": 3, "top_p": 0.6}, kept(P, [1])),
        ({"top_k": 1000}, P),
        ({"min_p": 0.3}, kept(P, [1, 3])),
        ({"min_p": 0.3, "top_k": 5}, kept(P, [1, 3])),
        ({"logit_bias": ((1, -100.0),)}, kept(P, [0, 2, 3, 4, 5])),
        ({"min_tokens": 3, "stop_token_ids": (1, 3)}, kept(P, [0, 2, 4, 5])),
        ({"temperature": 0.0}, kept(P, [1])),
        ({"temperature": 0.0, "logit_bias": ((1, -100.0),)}, kept(P, [3])),
        ({"output": (1, 1), "temperature": 0.0, "frequency_penalty": 0.6}, kept(P, [3])),
        ({"output": (1, 1), "temperature": 0.0, "presence_penalty": 0.6}, kept(P, [1])),
        ({"output": (1,), "temperature": 0.0, "repetition_penalty": 2.5}, kept(P, [3])),
    ],
)
def test_frequencies_are_the_distribution(parameters: dict[str, Any], expected: Any) -> None:
    """Over many seeds tokens come as often as their probability after all adjustments."""
    found = frequencies(LOGITS, **parameters)
    assert np.all(found[expected == 0] == 0)
    assert np.abs(found - expected).max() < 0.03


def test_typical_keeps_what_is_near_the_entropy() -> None:
    """typical_p keeps tokens in the order of |surprise - entropy| until their mass is reached."""
    surprise = -np.log(P)
    order = np.argsort(np.abs(surprise - (P * surprise).sum()))
    mass = np.cumsum(P[order])
    places = order[: int(np.searchsorted(mass, 0.5)) + 1].tolist()
    found = frequencies(LOGITS, typical_p=0.5)
    assert np.abs(found - kept(P, places)).max() < 0.03


def test_top_p_beyond_the_candidates() -> None:
    """A flat distribution over many tokens is cut at the right place although it needs a full sort."""
    logits = torch.linspace(0, 0.001, 5000)
    tokens = {sample(logits[None], [sequence(seed, top_p=0.9)])[0].token_id for seed in range(300)}
    assert min(tokens) >= 490
    assert min(tokens) < 1000


def test_rows_do_not_influence_one_another() -> None:
    """A row gives the same token alone and among rows with other parameters; logits stay as they were."""
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 7},
        {"typical_p": 0.9},
        {"temperature": 0.0},
        {"min_p": 0.1, "repetition_penalty": 1.3},
    ]
    logits = torch.randn(len(kinds), 3000, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sequences = [sequence(i, output=(5, 6), **kind) for i, kind in enumerate(kinds)]
    together = sample(logits, sequences)
    assert torch.equal(logits, before)
    for i, one in enumerate(sequences):
        assert sample(logits[i : i + 1], [one]) == [together[i]]


def test_numbers_that_are_not_finite_are_reported() -> None:
    """NaN and infinite rows give token -1 and leave the others alone."""
    logits = torch.stack([LOGITS, LOGITS * float("nan"), LOGITS])
    found = [s.token_id for s in sample(logits, [sequence(temperature=0.0), sequence(), sequence(temperature=0.0)])]
    assert found == [1, -1, 1]


def test_uniforms_are_uniform_and_depend_on_both() -> None:
    """Numbers fill [0, 1) evenly over seeds and over positions, and are uncorrelated between neighbours."""
    for u in (
        uniforms(np.arange(20000), np.full(20000, 3)),
        uniforms(np.full(20000, 2**64 - 1, dtype=np.uint64), np.arange(20000)),
    ):
        assert 0 <= u.min() < u.max() < 1
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi squared, 19 degrees: 1 in 10,000
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
