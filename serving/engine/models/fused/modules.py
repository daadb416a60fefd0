"""Runs a model's norms and gated MLPs by our own kernels, on devices that can run them.

The modules are recognised by their names in transformers and by their parts. Each is tried on an example first, and
left as it is if the kernel gives something else (Gemma's norms add one to their weights) or does not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...devices import overlap, triton_support
from ...weights import fp8_inputs
from ...weights.fp8 import Fp8Weight
from . import residuals

logger = logging.getLogger(__name__)
MAX_NORM_WIDTH = 1 << 14  # a row stays in registers
MAX_GATE_WIDTH = 1 << 15  # the same, where the row is quantised too
BLOCK_COLUMNS = 1024
TOLERANCE = {torch.float32: 1e-5}  # relative to the example's largest value; 0.02 for 16-bit types


def install(model: nn.Module) -> int:
    """Replace the modules' code; return how many modules and layers use kernels now (0 if the device runs none)."""
    like = next(model.parameters())
    if not triton_support.enabled(like.device):
        return 0
    refused: set[type] = set()
    count = 0
    for module in model.modules():
        forward = _forward_for(module)
        if forward is None or type(module) in refused:
            continue
        if _agrees(module, forward, like):
            object.__setattr__(module, "forward", MethodType(forward, module))
            count += 1
        else:
            refused.add(type(module))
    if refused:
        logger.info("torch, not our kernels, computes %s", ", ".join(sorted(kind.__name__ for kind in refused)))
    return count + residuals.install(model)


def _forward_for(module: nn.Module) -> Callable[[Any, Any], Any] | None:
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    if name.endswith("RMSNorm") and weight is not None and hasattr(module, "variance_epsilon"):
        return norm_forward if weight.dim() == 1 and len(weight) <= MAX_NORM_WIDTH else None
    parts = ("gate_proj", "up_proj", "down_proj")
    if name.endswith("MLP") and all(isinstance(getattr(module, part, None), nn.Linear) for part in parts):
        return gated_forward if type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation") else None
    return None


def _agrees(module: Any, forward: Callable[[Any, Any], Any], like: torch.Tensor) -> bool:
    """Return whether ``forward`` computes what the module does, on an example. Linears may have stored weights instead
    of parameters (``stored_weights.py``)."""
    gate = getattr(module, "gate_proj", None)
    weight = like if isinstance(gate, nn.Linear) else module.weight
    size = gate.in_features if isinstance(gate, nn.Linear) else len(weight)
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        wanted, found = module(x).float(), forward(module, x).float()
    except Exception as error:  # from Triton's compiler or the driver
        logger.warning("%s: the kernel does not run: %s", type(module).__name__, " ".join(str(error).split())[:300])
        return False
    return bool((found - wanted).abs().max() <= TOLERANCE.get(weight.dtype, 0.02) * wanted.abs().max())


def norm_forward(self: Any, hidden_states: Any) -> Any:
    """Compute a norm [..., N] → [..., N], in the type that the module's own code gives."""
    from . import kernels

    if (normed := residuals.normed(self, hidden_states)) is not None:
        return normed
    size = hidden_states.shape[-1]
    x = hidden_states.contiguous()
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, self.weight.dtype), device=x.device)
    rows = x.numel() // size
    padded = 1 << (size - 1).bit_length()
    made = fp8_inputs.buffers(self, out, Fp8Weight.few)
    kernels.rms_norm[(rows,)](
        x,
        self.weight,
        out,
        made.q,
        made.scale,
        self.variance_epsilon,
        N=size,
        PADDED=padded,
        QUANTIZE=made.are_written,
        **overlap.options(x.device),
    )
    return fp8_inputs.offer(self, out, made)


def gated_forward(self: Any, x: Any) -> Any:
    """Compute a gated MLP [..., N] → [..., N]."""
    from . import kernels

    gate, up = view_rows(self.gate_proj(x)), view_rows(self.up_proj(x))
    rows, size = gate.shape
    out = torch.empty(rows, size, dtype=gate.dtype, device=gate.device)
    made = fp8_inputs.buffers(self, out, Fp8Weight.few if size <= MAX_GATE_WIDTH else rows)
    block = 1 << (size - 1).bit_length() if made.are_written else BLOCK_COLUMNS
    kernels.silu_gate[(rows, -(-size // block))](
        gate, up, out, made.q, made.scale, size, gate.stride(0), up.stride(0),
        BLOCK=block, QUANTIZE=made.are_written, num_warps=min(max(block // 1024, 4), 16),
        **overlap.options(gate.device),
    )  # fmt: skip
    return self.down_proj(fp8_inputs.offer(self, out.view(*x.shape[:-1], size), made))


def view_rows(x: torch.Tensor) -> torch.Tensor:
    """View [..., N] as [T, N], copied only if its rows are not contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
