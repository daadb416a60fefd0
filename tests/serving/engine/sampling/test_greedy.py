"""The token with the largest logit by Triton kernels, in its interpreter: what torch gives, without a maximum of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.sampling import greedy as module
from mlflow_llm.serving.engine.sampling.greedy import BLOCK_TOKENS, by_kernel, by_torch, greedy_tokens

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 131, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1])
def test_the_kernels_equal_torch(size: int, dtype: torch.dtype) -> None:
    """Rows of any length have torch's maximum, in a tensor whose rows are apart too."""
    logits = torch.randn(3, size + 5).to(DEVICE, dtype)[:, :size]
    assert by_kernel(logits).tolist() == by_torch(logits).tolist() == logits.argmax(-1).tolist()


def test_the_first_of_equals_wins() -> None:
    """The first of equal logits is taken, within a part of the row and in several."""
    logits = torch.zeros(2, 3 * BLOCK_TOKENS, device=DEVICE)
    logits[1, [BLOCK_TOKENS + 5, BLOCK_TOKENS + 9, 2 * BLOCK_TOKENS]] = 1.0
    assert by_kernel(logits).tolist() == [0, BLOCK_TOKENS + 5]


def test_rows_that_are_not_finite_have_no_token() -> None:
    """NaN anywhere, infinity and nothing but minus infinity give -1; some tokens of minus infinity do not matter."""
    logits = torch.zeros(5, BLOCK_TOKENS + 3, device=DEVICE)
    logits[0, BLOCK_TOKENS + 2], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :-1], logits[4, 5] = float("-inf"), 2.0
    assert by_kernel(logits).tolist() == by_torch(logits).tolist() == [-1, -1, -1, BLOCK_TOKENS + 2, 5]


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are used where they run and prove right; otherwise torch computes, with a warning that says why."""
    used = []

    def wrong(logits: Any) -> Any:
        used.append(len(logits))
        return by_torch(logits) + 1

    logits = torch.tensor([[1.0, 3.0, 2.0]], device=DEVICE)
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    module.computes_right.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(module, "by_kernel", wrong)
        assert greedy_tokens(logits).tolist() == [1]
    assert used == [6]  # the trial's example alone
    (said,) = caplog.messages
    assert said.startswith("torch finds the largest logits: the kernel differs from the reference")
    module.computes_right.cache_clear()
    assert module.is_offered(logits.device, logits.dtype)
    module.computes_right.cache_clear()
