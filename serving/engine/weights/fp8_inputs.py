"""Inputs of fp8 linears that are quantised by the kernel that computes them, instead of by one of their own.

A kernel of norms or gates (``models/fused/``) calls ``offer`` with its result. A product of many rows in float8 that is
given this very tensor takes its quantised rows. If there are none, it asks the module to make them from then on::

    norm ── x, offered by the norm ──→ q, k, v       quantise x, and ask the norm
    norm ── x with its rows in float8 ──→ q, k, v    take them

So nothing is assumed about who reads what, and the self-test at load is enough for every module to be asked. The bits
are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

INPUT = "_engine_input"  # attribute of a tensor
ASKED = "_engine_quantizes"  # attribute of a module


@dataclass(frozen=True, slots=True)
class Offered:
    """The module that computed a tensor [..., K], and its rows in float8 [T, K] with their scales [T, 1], or None."""

    module: Any
    rows: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class Buffers:
    """Tensors that a kernel writes rows in float8 to, ``q`` and ``scale``; any if it is not asked to."""

    q: torch.Tensor
    scale: torch.Tensor
    are_written: bool = field(default=False)


def buffers(module: Any, out: torch.Tensor, many: int) -> Buffers:
    """Return where ``module``'s kernel quantises ``out`` [..., K]: nowhere if it was not asked to, or if there are not
    more than ``many`` rows."""
    size = out.shape[-1]
    rows = out.numel() // size
    if rows <= many or ASKED not in module.__dict__:
        return Buffers(out, out)
    q = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=out.device)
    return Buffers(q.view(torch.uint8), torch.empty(rows, 1, device=out.device), are_written=True)


def offer(module: Any, out: torch.Tensor, made: Buffers) -> torch.Tensor:
    """Return ``out``, marked as computed by ``module``, with the rows that its kernel made."""
    rows = (made.q.view(torch.float8_e4m3fn), made.scale) if made.are_written else None
    setattr(out, INPUT, Offered(module, rows))
    return out


def passed_on(x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return ``flat``, a view [T, K] of ``x``, with what ``x`` is marked with."""
    if flat is not x and (known := getattr(x, INPUT, None)) is not None:
        setattr(flat, INPUT, known)
    return flat


def take(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rows of ``x`` in float8 and their scales; None if they were not made, which they will be next time if
    a module offered ``x``."""
    known: Offered | None = getattr(x, INPUT, None)
    if known is None:
        return None
    if known.rows is None:
        known.module.__dict__[ASKED] = True
    return known.rows
