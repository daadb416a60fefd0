"""Norms and gated MLPs by kernels in Triton: what the model's own code gives, or left as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_model

from mlflow_llm.serving.engine import fused_modules, triton_here

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = torch.arange(3, 20)[None]


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "on", lambda device: True)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 2 * 3 + 1), ("qwen3", 2 * 5 + 1), ("phi3", 2 * 2 + 1), ("gemma2", 0)],
    ids=["norms and gates", "norms of heads", "gates in one linear are left", "other norms and gates are left"],
)
@torch.inference_mode()
def test_models_give_the_same(family: str, count: int) -> None:
    """As many modules as there are of the known kinds run by kernels, and the logits are the model's."""
    model = make_model(FAMILIES[family]()).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    wanted = model(IDS.to(DEVICE)).logits
    assert fused_modules.install(model) == count
    torch.testing.assert_close(model(IDS.to(DEVICE)).logits, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_kernel_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """On CPU nothing is replaced; where a kernel raises, the model's own code stays, with a warning."""
    model = make_model(FAMILIES["llama"]())
    assert fused_modules.install(model) == 0
    monkeypatch.setattr(triton_here, "on", lambda device: True)

    def broken(self: Any, x: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused_modules, "norm_forward", broken)
    monkeypatch.setattr(fused_modules, "gated_forward", broken)
    assert fused_modules.install(model) == 0
    assert "the kernel does not run: no compiler" in caplog.text
