"""A decode step over fixed buffers never waits for a value and never copies from the host, so it can be recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_reads import HostReads
from tiny_models import FAMILIES, MORE_FAMILIES, make_model, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.forward.decode_graphs import GraphedForward
from mlflow_llm.serving.engine.models.fused import rotary
from mlflow_llm.serving.engine.models.verification import SelfTest
from mlflow_llm.serving.interface.settings import EngineSettings

interpreter = pytest.importorskip("triton.runtime.interpreter")


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine choose what it chooses on CUDA. Kernels compute nothing here: what matters is which
    calls of torch are left beside them."""
    if torch.cuda.is_available():
        pytest.skip("steps are recorded there, which refuses the same")
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    monkeypatch.setattr(triton_support, "why_wrong", lambda *trial: "")
    monkeypatch.setattr(rotary, "install", lambda model: 0)  # only its example tells which functions it may replace
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **options: None)
    monkeypatch.setattr(SelfTest, "check", lambda *args, **options: None)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_a_decode_step_reads_nothing_to_the_host(family: str, tmp_path: Path) -> None:
    """No operation of a padded decode step reads a value to the host or makes a tensor there."""
    model = make_model((FAMILIES | MORE_FAMILIES)[family]())
    settings = EngineSettings(
        max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory=1 << 22, kernels="torch", kv_block_size=16
    )
    core = EngineCore(save_bundle(model, tmp_path), settings)
    forward: Any = core.parts.runner.step_forward
    assert isinstance(forward, GraphedForward)
    reads = HostReads()
    with torch.inference_mode():
        forward.steps[2].compute()  # as before a recording: kernels are tried
        with reads.noted():
            forward.steps[2].compute()
    core.close()
    assert not reads.found


def test_what_a_device_cannot_record_is_noticed() -> None:
    """Reading a value, a result sized by values, and a tensor made on the host are each noted with their place; what a
    device does by itself is not."""
    x, mask, reads = torch.arange(4.0), torch.tensor([True, False, True, False]), HostReads()

    def noted(call: Any) -> list[str]:
        reads.found.clear()
        with reads.noted():
            call()
        return [line.split(" in ")[0] for line in reads.found]

    for call in (x[:1].item, x.tolist, mask.nonzero, lambda: x[mask], lambda: torch.tensor([1.0]), x.cpu, x.unique):
        assert noted(call), call
    assert noted(lambda: 1 if x[0] > 0 else 2)
    assert "test_host_reads.py" in reads.found[0]
    assert not noted(lambda: torch.where(mask, x, 2.0).topk(2).values[torch.arange(2)].repeat_interleave(2).sum())
