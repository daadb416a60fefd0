"""Kernels that begin while the one before still runs: the trial, and what decides whether they do."""

from __future__ import annotations

import pytest
import torch

from mlflow_llm.serving.engine.devices import overlap, triton_support

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CPU = torch.device("cpu")


def test_each_kernel_reads_what_the_one_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's chain gives what torch computes, so an early read would be noticed."""
    monkeypatch.setattr(overlap, "PROGRAMS", 5)
    monkeypatch.setattr(overlap, "LAUNCHES", 4)
    x = torch.arange(5.0 * overlap.BLOCK, device=DEVICE)
    found = overlap.chained(x, OVERLAP=False)
    wanted = x.view(5, overlap.BLOCK)
    for _ in range(4):
        wanted = wanted.roll(-1, 0) + torch.arange(5, device=DEVICE)[:, None]
    assert torch.equal(found, wanted.flatten())
    assert torch.equal(overlap.expected(DEVICE), torch.cat([found, found]))


def test_without_such_a_device_kernels_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, and where only Triton's interpreter runs, kernels are launched one after the other."""
    for enabled, reason in ((False, "there is no CUDA device"), (True, "no programmatic dependent launch")):
        monkeypatch.setattr(triton_support, "enabled", lambda device, enabled=enabled: enabled)
        overlap.why_not.cache_clear()
        overlap.options.cache_clear()
        assert reason in overlap.why_not(CPU)
        assert overlap.options(CPU) == {"OVERLAP": False}
    overlap.why_not.cache_clear()
    overlap.options.cache_clear()


@pytest.mark.skipif(not CUDA, reason="needs a device")
def test_the_trial_passes_on_hopper() -> None:
    """From compute capability 9.0 on, kernels begin early, also when recorded."""
    if torch.cuda.get_device_capability() < overlap.CAPABILITY:
        pytest.skip("the device has no programmatic dependent launch")
    assert overlap.why_not(DEVICE) == ""


def test_only_aligned_rows_are_fetched() -> None:
    """Rows that do not begin at multiples of 16 bytes are not fetched early."""
    weight = torch.zeros(4, 65, dtype=torch.float16)
    assert overlap.fetched(weight[:, :64].contiguous(), 512) == 512
    assert overlap.fetched(weight, 512) == 0
    assert overlap.fetched(torch.zeros(4 * 64 + 1, dtype=torch.float16)[1:].view(4, 64), 512) == 0
