"""The trial of an attention kernel over blocks: by what heads it supports, and by an example beside its reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...devices import triton_support

logger = logging.getLogger(__name__)
MAX_HEAD_DIM = 256  # supported by the kernels
MAX_GROUP_HEADS = 64  # query heads per KV head
TOLERANCE = {torch.float32: 1e-3}  # relative to the largest value; 0.02 for half precision

Probe = Callable[[Any, Any, int, int, int, int], str]
"""A function that tries a kernel: device, dtype, block size, heads per KV head, key and value dimension → why not."""


def why_not(
    k: Any, v: Any, group: int, probe: Probe, max_head_dim: int = MAX_HEAD_DIM, max_group: int = MAX_GROUP_HEADS
) -> str:
    """Return why a kernel does not run over blocks like ``k`` and ``v`` with ``group`` query heads per KV head; "" if
    it does."""
    if reason := triton_support.why_disabled(k.device):
        return reason
    if max(k.shape[-1], v.shape[-1]) > max_head_dim or group > max_group:
        return f"head size {k.shape[-1]} with {group} query heads per KV head exceeds what the kernel supports"
    return probe(k.device, k.dtype, k.shape[1], group, k.shape[-1], v.shape[-1])


def why_wrong(compute: Callable[[], Any], reference: Callable[[], Any], dtype: Any, instead: str) -> str:
    """Return why a kernel is not used, by an example in ``dtype``, and log it with what happens ``instead``."""
    tolerance = TOLERANCE.get(dtype, 0.02)
    reason = triton_support.why_wrong(compute, reference, tolerance, "the kernel")
    if reason:
        logger.warning("%s: %s", instead, reason)
    return reason
