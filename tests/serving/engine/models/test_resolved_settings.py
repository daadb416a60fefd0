"""Settings and what they mean on this machine."""

from __future__ import annotations

import pytest
import torch

from mlflow_llm.serving.engine.models.resolved_settings import ResolvedSettings
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings


def test_auto_on_a_cpu() -> None:
    """A CPU computes in float32, and keeps keys and values in slots unless torch's kernels are to take blocks."""
    resolved = ResolvedSettings.of(EngineSettings(device="cpu"))
    assert (resolved.device.type, resolved.dtype, resolved.block_size) == ("cpu", torch.float32, None)
    assert ResolvedSettings.of(EngineSettings(device="cpu", kernels="torch", kv_block_size=8)).block_size == 8
    with pytest.raises(PackagingError, match="kv_block_size: 8 is not allowed; expected null on CPU"):
        ResolvedSettings.of(EngineSettings(device="cpu", kv_block_size=8))


def test_auto_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes in bfloat16, in blocks of 16 tokens if nobody says how many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resolved = ResolvedSettings.of(EngineSettings())
    assert (resolved.device.type, resolved.dtype, resolved.block_size) == ("cuda", torch.bfloat16, 16)
    assert ResolvedSettings.of(EngineSettings(dtype="float16", kv_block_size=32)).block_size == 32


def test_resolved_settings_stay() -> None:
    """They are computed once: what is resolved is handed on as it is."""
    resolved = ResolvedSettings.of(EngineSettings())
    assert ResolvedSettings.of(resolved) is resolved
