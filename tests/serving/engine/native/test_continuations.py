"""The best continuations of beams by the native kernels, beside log_softmax and topk."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mlflow_llm.serving.engine.beams.beam_search import BeamSearch
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.native.continuations import best_continuations, can_continue

pytestmark = pytest.mark.skipif(library.library() is None, reason="needs the native kernels")


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("size", [1, 5, 16, 40, 777, 4096])
@pytest.mark.parametrize("beams", [1, 3])
def test_continuations_equal_topk(size: int, beams: int) -> None:
    """Places and sums equal topk's, with forbidden tokens and dead beams."""
    generator = torch.Generator().manual_seed(size * beams)
    logits = 5 * torch.randn(beams, size, generator=generator)
    logits[torch.rand(beams, size, generator=generator) < 0.1] = -math.inf
    logits[:, 0] = 1.5
    scores = torch.tensor([-0.5, -1e9, -2.5][:beams])
    found = best_continuations(list(logits), scores.numpy(), 8)
    sums = (torch.log_softmax(logits.double(), -1) + scores[:, None].double()).reshape(-1)
    expected = torch.topk(sums, min(8, len(sums)))
    finite = torch.isfinite(expected.values) & (expected.values > -1e8)
    count = int(finite.sum())
    assert found.places[:count].tolist() == expected.indices[finite].tolist()
    assert found.sums[:count] == pytest.approx(expected.values[finite].numpy(), abs=1e-5)
    assert len(found.sums) == min(8, beams * size)
    assert len(set(found.places.tolist())) == len(found.places)


@pytest.mark.usefixtures("instructions")
def test_equal_logits_are_ordered_by_token() -> None:
    """Equal logits are ordered by token id."""
    found = best_continuations([torch.zeros(100), torch.zeros(100)], np.zeros(2, np.float32), 5)
    assert found.places.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_values_that_are_not_finite_are_an_error(bad: float, place: int) -> None:
    """A NaN or an infinity in any row, and a row without a possible token, are errors."""
    row = torch.zeros(40)
    row[place if bad > 0 or bad != bad else slice(None)] = bad
    with pytest.raises(FloatingPointError):
        best_continuations([torch.zeros(40), row], np.zeros(2, np.float32), 4)


def test_a_search_goes_the_same_way() -> None:
    """A search has the same forks and hypotheses with native continuations and with torch."""
    one, two = (BeamSearch(4, 12, (3, 7), 0.7, "heuristic") for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    rows = 3 * torch.randn(1, 300, generator=generator)
    while not one.done:
        assert can_continue(list(rows))
        assert one.step_native(list(rows)) == two.step(torch.log_softmax(rows, -1))
        rows = 3 * torch.randn(4, 300, generator=generator)
    assert two.done
    assert [text.token_ids for text in one.best(4)] == [text.token_ids for text in two.best(4)]
    assert [text.score for text in one.best(4)] == pytest.approx([text.score for text in two.best(4)], abs=1e-5)


def test_other_types_and_strides_are_left_to_torch() -> None:
    """Rows of bfloat16 or with gaps are left to torch."""
    assert not can_continue([torch.zeros(8, dtype=torch.bfloat16)])
    assert not can_continue([torch.zeros(16)[::2]])
