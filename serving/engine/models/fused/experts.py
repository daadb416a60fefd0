"""Runs the experts of a mixture by kernels of ours in steps of few tokens, so that decode steps can be recorded.

transformers multiplies the experts of a step in groups, whose sizes its code for other types than bfloat16 reads on the
host. Ours reads nothing there. A module is recognised by its parts, and kept as it is if the kernels give something
else than its own code on an example. Steps of more tokens run by its own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...devices import triton_support
from ...weights import fp8

logger = logging.getLogger(__name__)
MAX_TOKENS = 512  # of a step; more are prompts, whose products are larger than what a program has room for
FEW_TOKENS = 4  # hardly ever two tokens of one expert
BLOCK_M = 16
CHUNK_PAIRS = 128  # pairs that are looked through at a time
COMBINED_COLUMNS = 512  # columns of a program that sums
TOLERANCE = {torch.float32: 1e-4}  # relative to the example's largest value; 0.02 for 16-bit types
GATES = {"SiLU": "SILU", "SiLUActivation": "SILU", "GELUTanh": "GELU", "PytorchGELUTanh": "GELU"}
EXAMPLES = (3, 20)  # tokens: by themselves, and in groups of more than BLOCK_M


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of the kernels' programs."""

    n: int
    k: int
    warps: int = 4
    stages: int = 3

    def within(self, width: int) -> int:
        """Return ``k``, but no more than a row of ``width`` needs."""
        return min(self.k, max(1 << (width - 1).bit_length(), 16))


FEW_UP, FEW_DOWN = Blocks(4, 1024), Blocks(2, 1024)  # many programs with long loads, the fastest of 14 on an H100
GROUPED_UP, GROUPED_DOWN = Blocks(32, 128), Blocks(32, 128)


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a mixture: ``up`` has each expert's gate and up, ``down`` its other weight.

    ``steps``: elements of ``up`` from an expert to the next, from a column to the next, along K, and from a gate to its
    up; ``down_steps`` the same without the last. ``bias_steps``: of a bias, from a column to the next, and from gate to
    up. ``has_identity``: experts beyond ``count`` return their token. ``up_scale`` and ``down_scale`` float32 [experts,
    columns] are of weights in float8."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    count: int
    width: int
    steps: tuple[int, int, int, int]
    down_steps: tuple[int, int, int]
    bias_steps: tuple[int, int]
    gate: str
    alpha: float = 0.0
    limit: float = 0.0
    has_identity: bool = False
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, module: Any) -> Experts | None:
        """Return the experts of ``module``; None if it has other parts."""
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not all(isinstance(one, nn.Parameter) and one.dim() == 3 and one.is_floating_point() for one in (up, down)):
            return None
        assert isinstance(up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        biases = getattr(module, "gate_up_proj_bias", None), getattr(module, "down_proj_bias", None)
        alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
        if alpha is not None and limit is not None:  # gpt-oss: [experts, in, out], gates and ups in turn
            count, width, hidden = down.shape
            if up.shape != (count, hidden, 2 * width) or any(one is None for one in biases):
                return None
            steps, down_steps = (up.stride(0), 2, up.stride(1), 1), (down.stride(0), 1, down.stride(1))
            if not (up.is_contiguous() and down.is_contiguous()):
                return None
            return cls(
                up, down, biases[0], biases[1], count, width, steps, down_steps, (2, 1), "CLAMPED",
                float(alpha), float(limit),
            )  # fmt: skip
        gate = GATES.get(type(getattr(module, "act_fn", None)).__name__)
        count, hidden, width = down.shape
        if gate is None or any(one is not None for one in biases) or up.shape[1:] != (2 * width, hidden):
            return None
        if up.stride(2) != 1 or down.stride(2) != 1 or len(up) < count:
            return None
        steps = (up.stride(0), up.stride(1), 1, width * up.stride(1))
        down_steps = (down.stride(0), down.stride(1), 1)
        identity = bool(getattr(module, "zero_expert_num", 0))
        return cls(up, down, None, None, count, width, steps, down_steps, (1, width), gate, has_identity=identity)

    def takes(self, x: Any, ids: Any, scores: Any) -> bool:
        """Return whether the kernels compute this step: tokens [T, hidden], and for each its experts and scores."""
        return (
            x.dim() == ids.dim() == scores.dim() == 2
            and len(x) == len(ids) == len(scores)
            and 0 < len(x) <= MAX_TOKENS
            and ids.shape == scores.shape
            and (x.dtype == self.up.dtype or self.up_scale is not None)
        )

    def quantized(self) -> Experts | None:
        """Return the same in float8, with a scale for each output of an expert; None if it has another layout."""
        if self.up_bias is not None or self.has_identity:
            return None
        (up, up_scale), (down, down_scale) = map(_quantized, (self.up, self.down))
        steps = (up.stride(0), up.stride(1), 1, self.width * up.stride(1))
        down_steps = (down.stride(0), down.stride(1), 1)
        return replace(
            self, up=up, down=down, steps=steps, down_steps=down_steps, up_scale=up_scale, down_scale=down_scale
        )

    @contextmanager
    def floats(self, module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Let ``module`` have its weights as floats meanwhile."""
        kept = {name: module._parameters[name] for name in ("gate_up_proj", "down_proj")}
        for name, values, scale in (
            ("gate_up_proj", self.up, self.up_scale),
            ("down_proj", self.down, self.down_scale),
        ):
            assert scale is not None
            floats = values.to(dtype).mul_(scale[..., None].to(dtype))
            module._parameters[name] = nn.Parameter(floats, requires_grad=False)
        try:
            yield
        finally:
            module._parameters.update(kept)

    def _bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights as the kernels read them."""
        if self.up_scale is None:
            return self.up, self.down
        return self.up.view(torch.uint8), self.down.view(torch.uint8)

    def _decoding(self, dtype: torch.dtype, *, rows: bool) -> str:
        if self.up_scale is None:
            return ""
        way = fp8.decoding(self.up.device, dtype)
        return "packed" if rows and way == "native" and dtype == torch.bfloat16 else way  # as products of one row do

    def compute(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Run x [T, hidden] through the experts ``ids`` [T, k], and return their sum weighted by ``scores`` [T, k]."""
        x, ids, scores = x.contiguous(), ids.contiguous(), scores.contiguous()
        return self.few(x, ids, scores) if len(x) <= FEW_TOKENS else self.grouped(x, ids, scores)

    def few(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, ups: Blocks = FEW_UP, downs: Blocks = FEW_DOWN
    ) -> torch.Tensor:
        """Compute tokens by themselves."""
        from . import experts_kernel as kernel

        (tokens, hidden), top = x.shape, ids.shape[1]
        (up, down), way = self._bytes(), self._decoding(x.dtype, rows=True)
        made = torch.empty(tokens * top, self.width, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        kernel.few_up[(tokens * top, -(-self.width // ups.n))](
            x, ids, up, x if self.up_scale is None else self.up_scale, x if self.up_bias is None else self.up_bias,
            made, hidden, self.width, self.count, *self.steps, *self.bias_steps, self.alpha,
            self.limit, TOP=top, GATE=getattr(kernel, self.gate),
            DECODE=way, HAS_BIAS=self.up_bias is not None, BLOCK_N=ups.n, BLOCK_K=ups.within(hidden),
            num_warps=ups.warps, num_stages=ups.stages,
        )  # fmt: skip
        kernel.few_down[(tokens, -(-hidden // downs.n))](
            x, made, ids, scores, down, x if self.down_scale is None else self.down_scale,
            x if self.down_bias is None else self.down_bias, out, self.width, hidden, self.count, *self.down_steps,
            TOP=top, IDENTITY=self.has_identity, DECODE=way, HAS_BIAS=self.down_bias is not None, BLOCK_N=downs.n,
            BLOCK_K=downs.within(self.width), num_warps=downs.warps, num_stages=downs.stages,
        )  # fmt: skip
        return out

    def grouped(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        scores: torch.Tensor,
        ups: Blocks = GROUPED_UP,
        downs: Blocks = GROUPED_DOWN,
    ) -> torch.Tensor:
        """Compute tokens by their experts."""
        from . import experts_kernel as kernel

        (tokens, hidden), top = x.shape, ids.shape[1]
        pairs = tokens * top
        (up, down), way = self._bytes(), self._decoding(x.dtype, rows=False)
        made = torch.empty(pairs, self.width, dtype=x.dtype, device=x.device)
        each = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        kernel.grouped_up[(pairs, -(-self.width // ups.n))](
            x, ids, up, x if self.up_scale is None else self.up_scale, x if self.up_bias is None else self.up_bias,
            made, hidden, self.width, self.count, *self.steps, *self.bias_steps, self.alpha,
            self.limit, pairs, TOP=top, GATE=getattr(kernel, self.gate),
            DECODE=way, HAS_BIAS=self.up_bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=ups.n, BLOCK_K=ups.k,
            CHUNK=CHUNK_PAIRS, num_warps=ups.warps, num_stages=ups.stages,
        )  # fmt: skip
        kernel.grouped_down[(pairs, -(-hidden // downs.n))](
            made, ids, down, x if self.down_scale is None else self.down_scale,
            x if self.down_bias is None else self.down_bias, each, self.width, hidden,
            self.count, *self.down_steps, pairs, DECODE=way, HAS_BIAS=self.down_bias is not None, BLOCK_M=BLOCK_M,
            BLOCK_N=downs.n, BLOCK_K=downs.k, CHUNK=CHUNK_PAIRS, num_warps=downs.warps, num_stages=downs.stages,
        )  # fmt: skip
        kernel.combine[(tokens, -(-hidden // COMBINED_COLUMNS))](
            x, each, ids, scores, out, hidden, self.count, TOP=top, IDENTITY=self.has_identity, BLOCK=COMBINED_COLUMNS,
        )  # fmt: skip
        return out


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` [experts, N, K] in float8, and scales [experts, N]. An expert at a time needs little room."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[:2], device=weight.device)
    for number, one in enumerate(weight.detach()):
        own, factor = fp8.quantize_rows(one.float())
        values[number], scale[number] = own, factor[:, 0]
    return values, scale


def install(model: nn.Module, *, in_fp8: bool = False) -> int:
    """Bind the kernels in the experts for which they are right; return how many (0 if the device runs none). With
    ``in_fp8`` their weights are made float8, if the kernels are right for these too."""
    if not triton_support.enabled(next(model.parameters()).device):
        return 0
    reasons: dict[tuple[Any, ...], str] = {}
    floats: dict[tuple[Any, ...], str] = {}  # why weights stay floats
    count = 0
    for module in model.modules():
        if not hasattr(module, "gate_up_proj") or not isinstance(getattr(module, "down_proj", None), nn.Parameter):
            continue
        experts = Experts.of(module)
        key = type(module), *(() if experts is None else (experts.up.shape, experts.up.dtype))
        if key not in reasons:
            reasons[key] = "its experts have another form" if experts is None else _why_not(module.forward, experts)
        if experts is not None and not reasons[key]:
            own = module.forward
            if in_fp8:
                experts, own = _in_fp8(module, experts, floats)
            object.__setattr__(module, "forward", partial(forward, experts, own))
            count += 1
    for (kind, *_), reason in reasons.items():
        if reason:
            logger.warning("torch, not our kernels, computes %s: %s", kind.__name__, reason)
    for (kind, *_), reason in floats.items():
        if reason:
            logger.warning("%s keeps its weights as floats: %s", kind.__name__, reason)
    return count


def _in_fp8(
    module: nn.Module, experts: Experts, floats: dict[tuple[Any, ...], str]
) -> tuple[Experts, Callable[..., Any]]:
    """Make the weights of ``module`` float8, and return its experts and its own code for them. If that is not right, it
    stays as it is, and the reason is in ``floats``."""
    own, dtype = module.forward, experts.up.dtype
    key = type(module), experts.up.shape, dtype
    if floats.get(key):
        return experts, own
    made = experts.quantized()
    if made is None:
        floats[key] = "experts with biases, or that return their token, are not supported in fp8"
        return experts, own

    def by_floats(*given: Any, **named: Any) -> Any:
        with made.floats(module, dtype):
            return own(*given, **named)

    if key not in floats:
        floats[key] = _why_not(by_floats, made, dtype)
        if floats[key]:
            for name, weight in (("gate_up_proj", experts.up), ("down_proj", experts.down)):
                module._parameters[name] = nn.Parameter(weight.detach(), requires_grad=False)
            return experts, own
    for name, values in (("gate_up_proj", made.up), ("down_proj", made.down)):
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
    return made, by_floats


def forward(experts: Experts, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Compute a step by the kernels if they take it, else by the module's ``own`` code."""
    if len(given) == 3 and not named and experts.takes(*given):
        return experts.compute(*given)
    return own(*given, **named)


def _why_not(own: Callable[..., Any], experts: Experts, dtype: torch.dtype | None = None) -> str:
    """Return why the kernels are not used, by examples beside the module's own code; empty if they agree."""
    device, dtype, make = experts.up.device, dtype or experts.up.dtype, torch.Generator().manual_seed(0)
    hidden, top = experts.down.numel() // (experts.count * experts.width), min(experts.count, 2)
    for tokens in EXAMPLES:
        x = torch.randn(tokens, hidden, generator=make).to(device, dtype)
        ids = torch.rand(tokens, experts.count + experts.has_identity, generator=make).topk(top).indices
        if tokens > BLOCK_M:
            ids[:, 0] = 0  # more than a program takes
            ids[:, 1:] = ids[:, 1:].clamp_min(1)
        ids, scores = ids.to(device), torch.rand(tokens, top, generator=make).to(device, dtype)
        reason = triton_support.why_wrong(
            partial(experts.compute, x, ids, scores),
            partial(own, x, ids, scores),
            TOLERANCE.get(dtype, 0.02),
            "the kernel",
        )
        if reason:
            return reason
    return ""
