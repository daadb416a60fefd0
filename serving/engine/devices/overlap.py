"""Whether a device's kernels begin while the one before still runs (``overlap_kernel.py``)."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from . import triton_support

logger = logging.getLogger(__name__)
ALIGNMENT_BYTES = 16  # bytes, of what is fetched early
CAPABILITY = (9, 0)  # Hopper, the first with programmatic dependent launch
PROGRAMS, BLOCK, LAUNCHES = 512, 256, 16  # of the trial: several waves of programs, one kernel after the other


@cache
def options(device: Any) -> dict[str, Any]:
    """Return the arguments with which each kernel that knows ``OVERLAP`` is launched on ``device``."""
    return {"OVERLAP": False} if why_not(device) else {"OVERLAP": True, "launch_pdl": True}


@cache
def why_not(device: Any) -> str:
    """Return why kernels begin only after the one before has ended; empty if they begin earlier."""
    if reason := triton_support.why_disabled(device):
        return reason
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the device has no programmatic dependent launch"
    reason = triton_support.why_wrong(lambda: _recorded(device), lambda: expected(device), 0.0, "an early launch")
    if reason:
        logger.warning("kernels begin only after the one before has ended: %s", reason)
    return reason


def chained(x: torch.Tensor, **how: Any) -> torch.Tensor:
    """Let each of ``LAUNCHES`` kernels read what the last one wrote, beginning with x [PROGRAMS * BLOCK]."""
    from . import overlap_kernel as kernel

    both = x.clone(), torch.empty_like(x)
    for launch in range(LAUNCHES):
        kernel.add_neighbours[(PROGRAMS,)](both[launch % 2], both[1 - launch % 2], BLOCK=BLOCK, **how)
    return both[LAUNCHES % 2]


def _example(device: Any) -> torch.Tensor:
    return torch.arange(PROGRAMS * BLOCK, dtype=torch.float32, device=device)


def expected(device: Any) -> torch.Tensor:
    """Compute twice what ``chained`` does, by torch."""
    x = _example(device).view(PROGRAMS, BLOCK)
    for _ in range(LAUNCHES):
        x = x.roll(-1, 0) + torch.arange(PROGRAMS, device=device)[:, None]
    return torch.cat([x.flatten(), x.flatten()])


def _recorded(device: Any) -> torch.Tensor:
    """Compute the chain as it is, and recorded."""
    how, x = {"OVERLAP": True, "launch_pdl": True}, _example(device)
    plain = chained(x, **how)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = chained(x, **how)
    graph.replay()
    return torch.cat([plain, recorded])


def fetched(weight: torch.Tensor, wanted: int) -> int:
    """Return how many weights of each row of ``weight`` [N, K] a kernel may fetch before it waits: 0 if its rows are
    not aligned."""
    aligned = weight.data_ptr() % ALIGNMENT_BYTES == weight.shape[1] * weight.element_size() % ALIGNMENT_BYTES == 0
    return wanted if aligned else 0
