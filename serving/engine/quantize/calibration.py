"""Calibrated quantization of weights: a model's own activations tell what an error of a weight costs.

Inputs and weights are multiplied by a Hadamard matrix first (quantization.py), which makes their numbers more alike.
For linears that share an input, with ``H`` the mean of x x^T over the calibration tokens, x being rotated:

1. Each input has a factor, ``mean |x| ** a``, that moves from the activations into the weights. The ``a`` that leaves
   the least error is chosen (AWQ: Lin et al. 2023, arxiv.org/abs/2306.00978).
2. Columns are rounded one after the other, and the later columns compensate for the error of each rounding (GPTQ:
   Frantar et al. 2022, arxiv.org/abs/2210.17323). A group's scale and zero point are chosen when the group is reached,
   from the clipped range that leaves the least error.
3. Sweeps over all columns set each value, and the scale of each group, to what leaves the least error given all others
   (coordinate descent: QuantEase, Behdin et al. 2023, arxiv.org/abs/2309.01885). They help because the first columns
   were rounded before the errors of the later ones were known.

Weights of eight bits have one scale per output and take only the second step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...interface.errors import PackagingError
from ..native.library import GROUP_SIZE
from ..weights.linear import weight_of
from ..weights.quantization import MAX_LEVEL as MAX_BYTE_LEVEL
from ..weights.quantization import quantize_rows, rotated
from ..weights.stored_weights import factors_of

MAX_LEVEL = 15  # values are 0..15
COLUMNS_AT_ONCE = 64  # rounded before the others are told of their errors
EXPONENTS = tuple(i / 8 for i in range(8))
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
DAMPINGS = (0.01, 0.1, 1.0)  # times the mean of H's diagonal; the first that makes H invertible is used
BYTE_DAMPINGS = (0.1, 1.0)  # of weights of eight bits, whose errors are small: H of a sample is trusted less
NUM_SWEEPS = 3
MIN_SCALE = 2.0**-14  # the smallest scale: the smallest float16 that keeps full precision
MAX_HESSIAN_BYTES = 1 << 30  # bytes of the matrices H that are collected in one run over the tokens,
MODEL_DIVISOR = 8  # or this part of the model's bytes: each run computes all of it
SEQUENCES, LENGTH, SEED = 16, 128, 0


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K] quantised by group: weight = (values - zero) * scale * inputs.

    ``values`` uint8 [N, K] of 0..15, ``scale`` float16 and ``zero`` uint8 [N, K / GROUP_SIZE], ``inputs`` float32
    [K]."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    inputs: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the parts as they are stored (stored_weights.py): two values per byte, scales, zero points,
        factors."""
        pairs = self.values.view(len(self.values), -1, 2)
        return pairs[..., 0] | pairs[..., 1] << 4, self.scale, self.zero, self.inputs.clone()


def own_text(model: Any) -> list[list[int]]:
    """Return the token ids of texts that the model samples by itself, so they are of the kinds and languages that it
    knows. They are the same each time."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    config = model.config.get_text_config()
    first = getattr(config, "bos_token_id", None)
    length = min(LENGTH, int(getattr(config, "max_position_embeddings", None) or LENGTH))
    begin = torch.randint(0, vocabulary, (SEQUENCES, 1), generator=generator)
    known = first is not None and 0 <= first < vocabulary
    tokens = torch.cat([torch.full_like(begin, first), begin], -1) if known else begin
    # transformers calls it "cache" since 5.24
    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    given = tokens
    while tokens.shape[1] < length:
        out = model(input_ids=given, use_cache=True, **{kept: cache})
        cache = getattr(out, kept)
        probabilities = out.logits[:, -1].float().softmax(-1)
        if not bool(torch.isfinite(probabilities).all()):
            raise PackagingError("quantize: the model computes logits that are not finite, so it cannot be calibrated")
        given = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, given], -1)
    return [row.tolist() for row in tokens]


Linears = Sequence[nn.Module]


def inputs_of(
    model: Any, groups: Sequence[Linears], texts: Sequence[Sequence[int]], *, alike: bool = False
) -> Iterator[tuple[Linears, torch.Tensor, torch.Tensor]]:
    """Yield each group of linears that share an input with its ``H`` [K, K] and ``mean |x|`` [K] over ``texts``, of
    rotated inputs, times their factors (input_factors.py) if they have any.

    ``alike``: all tokens count alike in H, whatever the size of their inputs. A text's first token has inputs a hundred
    times as large as others in some layers, and would alone decide which errors matter."""
    waiting = list(groups)
    maximum = max(MAX_HESSIAN_BYTES, sum(p.numel() * p.element_size() for p in model.parameters()) // MODEL_DIVISOR)
    while waiting:
        taken: list[Linears] = []
        room = maximum
        while waiting and (not taken or room > 0):
            taken.append(waiting.pop(0))
            room -= 4 * _width(taken[-1][0]) ** 2
        for group, found in zip(taken, _collected(model, [group[0] for group in taken], texts, alike), strict=True):
            yield group, found.products / max(found.count, 1), found.sizes / max(found.count, 1)


def _width(linear: nn.Module) -> int:
    return weight_of(linear).shape[1]


@dataclass(slots=True)
class _Inputs:
    products: torch.Tensor
    sizes: torch.Tensor
    alike: bool
    count: int = 0

    def add(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        x, factors = given[0].reshape(-1, given[0].shape[-1]), factors_of(module)
        x = rotated(x if factors is None else x * factors)
        self.sizes += x.abs().sum(0)
        if self.alike:
            x = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20)
        self.products += x.t() @ x
        self.count += len(x)


def _collected(model: Any, linears: Linears, texts: Sequence[Sequence[int]], alike: bool) -> list[_Inputs]:
    found = [_Inputs(torch.zeros(k, k), torch.zeros(k), alike) for k in map(_width, linears)]
    hooks = [one.register_forward_pre_hook(inputs.add) for one, inputs in zip(linears, found, strict=True)]
    body = getattr(model, model.base_model_prefix, model)  # without the head, for which nothing is collected
    try:
        for text in texts:
            body(input_ids=torch.tensor([list(text)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def quantised(weights: Sequence[torch.Tensor], products: torch.Tensor, sizes: torch.Tensor) -> list[GroupedWeight]:
    """Quantise rotated weights [N, K] that share an input, and therefore its factors."""
    whole = torch.cat(list(weights))
    factors = _best_factors(whole, products, sizes)
    whole = whole * factors
    largest = whole.abs().max().clamp_min(1e-30)  # brings the scales into float16's range, whatever the model
    factors = factors / largest
    products = products / factors[:, None] / factors
    whole = whole / largest
    made = _swept(whole, products, _rounded(whole, products, _inverse(products), 1 / factors))
    rows = [len(weight) for weight in weights]
    values, scale, zero = ([part.clone() for part in one.split(rows)] for one in (made.values, made.scale, made.zero))
    return [GroupedWeight(values[i], scale[i], zero[i], made.inputs) for i in range(len(rows))]


def rounded_to_bytes(weight: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a rotated weight [N, K] to int8 [N, K] and float32 scales [N, 1], with the scales of ``quantize_rows``.

    Columns compensate for the errors of those before them (GPTQ)."""
    _, scale = quantize_rows(weight)

    def rounded(column: torch.Tensor) -> Rounding:
        found = (column / scale[:, 0]).round().clamp(-MAX_BYTE_LEVEL, MAX_BYTE_LEVEL)
        return found, found * scale[:, 0]

    values = _compensated(weight, _inverse(products, BYTE_DAMPINGS), COLUMNS_AT_ONCE, lambda first, block: rounded)
    return values.to(torch.int8), scale


Rounding = tuple[torch.Tensor, torch.Tensor]
"""A column's values [N], and the weights [N] that they stand for."""


def _compensated(
    weight: torch.Tensor,
    inverse: torch.Tensor,
    columns_at_once: int,
    rounded_by: Callable[[int, torch.Tensor], Callable[[torch.Tensor], Rounding]],
) -> torch.Tensor:
    """Round a weight [N, K] column by column, the later ones compensating for the errors of the earlier; return the
    values as floats.

    ``rounded_by(first, block)`` gives what rounds the columns of ``block`` [N, columns_at_once], which begins at
    ``first`` and has taken up all errors before it."""
    left, values = weight.clone(), torch.empty_like(weight)
    for first in range(0, weight.shape[1], columns_at_once):
        last = min(first + columns_at_once, weight.shape[1])
        block = left[:, first:last].clone()
        wrong, rounded = torch.empty_like(block), rounded_by(first, block)
        for i in range(last - first):
            k = first + i
            values[:, k], stands_for = rounded(block[:, i])
            wrong[:, i] = (block[:, i] - stands_for) / inverse[k, k]
            block[:, i:] -= wrong[:, i : i + 1] * inverse[k, k:last]
        left[:, last:] -= wrong @ inverse[first:last, last:]
    return values


def _best_factors(weight: torch.Tensor, products: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    best, chosen = float("inf"), torch.ones_like(sizes)
    for exponent in EXPONENTS:
        factors = sizes.clamp_min(1e-5) ** exponent
        factors = factors / (factors.max() * factors.min()).sqrt()
        scaled = weight * factors
        scaled = scaled / scaled.abs().max().clamp_min(1e-30)
        grouped = scaled.view(len(weight), -1, GROUP_SIZE)
        scale, zero = _range(grouped, 1.0)
        wrong = (_values(grouped, scale, zero) - zero) * scale - grouped
        wrong = wrong.view_as(weight) / factors * (weight * factors).abs().max()
        error = float(((wrong @ products) * wrong).sum())
        if error < best:
            best, chosen = error, factors
    return chosen


def _range(x: torch.Tensor, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point of groups [.., GROUP_SIZE], rounded as they are stored."""
    maximum, minimum = x.amax(-1, keepdim=True).clamp_min(0) * clip, x.amin(-1, keepdim=True).clamp_max(0) * clip
    scale = ((maximum - minimum) / MAX_LEVEL).clamp_min(MIN_SCALE).half().float()
    return scale, (-minimum / scale).round().clamp(0, MAX_LEVEL)


def _values(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((x / scale).round() + zero).clamp(0, MAX_LEVEL)


def _clipped(x: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point [N, 1] of a group [N, GROUP_SIZE] with the least error by ``importance``."""
    scale, zero = _range(x, CLIPS[0])
    best = torch.full_like(scale, float("inf"))
    for clip in CLIPS:
        tried = _range(x, clip)
        wrong = (((_values(x, *tried) - tried[1]) * tried[0] - x) ** 2 * importance).sum(-1, keepdim=True)
        better = wrong < best
        best = torch.where(better, wrong, best)
        scale, zero = torch.where(better, tried[0], scale), torch.where(better, tried[1], zero)
    return scale, zero


def _inverse(products: torch.Tensor, dampings: Sequence[float] = DAMPINGS) -> torch.Tensor:
    """Return the upper Cholesky factor of H's inverse, which says how the columns after k compensate for an error at
    k."""
    mean = products.diagonal().double().mean().clamp_min(1e-12)
    for damping in dampings:
        damped = products.double() + torch.eye(len(products), dtype=torch.float64) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
    return torch.eye(len(products))  # the inputs say nothing, so each weight is rounded by itself


def _rounded(
    weight: torch.Tensor, products: torch.Tensor, inverse: torch.Tensor, inputs: torch.Tensor
) -> GroupedWeight:
    rows, columns = weight.shape
    scales, zeros = torch.empty(rows, columns // GROUP_SIZE), torch.empty(rows, columns // GROUP_SIZE)
    importance = products.diagonal()

    def rounded_by(first: int, group: torch.Tensor) -> Callable[[torch.Tensor], Rounding]:
        scale, zero = (one[:, 0] for one in _clipped(group, importance[first : first + GROUP_SIZE]))
        scales[:, first // GROUP_SIZE], zeros[:, first // GROUP_SIZE] = scale, zero

        def rounded(column: torch.Tensor) -> Rounding:
            found = _values(column, scale, zero)
            return found, (found - zero) * scale

        return rounded

    values = _compensated(weight, inverse, GROUP_SIZE, rounded_by).to(torch.uint8)
    return GroupedWeight(values, scales.half(), zeros.to(torch.uint8), inputs.float())


def _swept(weight: torch.Tensor, products: torch.Tensor, made: GroupedWeight) -> GroupedWeight:
    """Improve the values and scales of ``made`` to reduce ``(made - weight) H (made - weight)^T``.

    Tensors are [K, N] here, so that a column of the weight is contiguous."""
    wanted, values = weight.t().contiguous(), made.values.t().float().contiguous()
    scales, zeros = made.scale.t().float().contiguous(), made.zero.t().float().contiguous()
    mean = products.diagonal().mean().clamp_min(1e-12)
    damped = products / mean + torch.eye(len(products)) * DAMPINGS[0]
    grouped = (values.view(len(zeros), GROUP_SIZE, -1) - zeros[:, None]) * scales[:, None]
    slope = damped @ (grouped.view_as(wanted) - wanted)  # slope of the error at each value
    for _ in range(NUM_SWEEPS):
        for group, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
            rows = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            moved = _group_swept(values[rows], scale, zero, slope[rows].clone(), damped[rows, rows])
            slope.addmm_(damped[:, rows], moved)
    scale = scales.t().contiguous().half()
    return GroupedWeight(values.t().contiguous().to(torch.uint8), scale, made.zero, made.inputs)


def _group_swept(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, slope: torch.Tensor, products: torch.Tensor
) -> torch.Tensor:
    """Change ``values`` [GROUP_SIZE, N] and ``scale`` [N] in place; return their shifts [GROUP_SIZE, N]."""
    centred = values - zero
    curve = (centred * (products @ centred)).sum(0)
    step = torch.where(curve > 0, (slope * centred).sum(0) / curve, 0.0)
    rescaled = (scale - step).clamp(MIN_SCALE, 1.0).half().float()  # weights are at most 1
    moved = centred * (rescaled - scale)
    slope += products @ moved
    scale.copy_(rescaled)
    for i in range(GROUP_SIZE):
        found = ((centred[i] - slope[i] / (products[i, i] * scale)).round() + zero).clamp(0, MAX_LEVEL)
        change = (found - values[i]) * scale
        values[i] = found
        moved[i] += change
        slope[i + 1 :] += products[i, i + 1 :, None] * change
    return moved
