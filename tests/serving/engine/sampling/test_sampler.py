"""The sampler: draws as its parameters say, independently for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import sequence_of
from tiny_models import request_of

from mlflow_llm.serving.engine.sampling.randomness import exponentials
from mlflow_llm.serving.engine.sampling.sampler import sample
from mlflow_llm.serving.engine.scheduling.sequence import SequenceState

DRAWS = 4000


def sequence(seed: int = 0, output: tuple[int, ...] = (), **more: Any) -> SequenceState:
    request = request_of("r", (1, 2), seed=seed, resumed=output, **{"max_tokens": 50, "temperature": 1.0, **more})
    return sequence_of(request)


def frequencies(logits: Any, **more: Any) -> Any:
    """Return how often each token is drawn over ``DRAWS`` seeds."""
    rows = logits[None].expand(DRAWS, -1)
    drawn = [s.token_id for s in sample(rows, [sequence(seed, **more) for seed in range(DRAWS)])]
    return np.bincount(drawn, minlength=len(logits)) / DRAWS


def kept(p: Any, places: list[int]) -> Any:
    """Return the distribution ``p`` with all but ``places`` cut away."""
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


def test_typical_p_keeps_tokens_near_the_entropy() -> None:
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


def test_times_are_exponential_and_depend_on_seed_position_and_token() -> None:
    """Times have the exponential distribution's mean and quantiles at rate one, and differ by seed and position."""
    times = exponentials([3, 3, 2**64 - 1], [7, 8, 7], 20001).numpy()
    assert (times > 0).all()
    assert np.isfinite(times).all()
    for row in times:
        assert abs(row.mean() - 1) < 0.05
        np.testing.assert_allclose(np.quantile(row, [0.05, 0.5, 0.95]), -np.log1p([-0.05, -0.5, -0.95]), rtol=0.1)
    assert np.abs(np.corrcoef(times) - np.eye(3)).max() < 0.05
    np.testing.assert_array_equal(exponentials([3], [7], 20001).numpy()[0], times[0])


def test_draws_do_not_depend_on_the_last_bits_of_logits() -> None:
    """Logits that differ as they do between batches give the same tokens, from a flat distribution too."""
    torch.manual_seed(0)
    logits = torch.randn(20000)
    shaken = logits + torch.randn(20000) * 2e-5
    sequences = [sequence(seed) for seed in range(200)]
    drawn = [[s.token_id for s in sample(row[None].expand(200, -1), sequences)] for row in (logits, shaken)]
    assert sum(a != b for a, b in zip(*drawn, strict=True)) <= 1
