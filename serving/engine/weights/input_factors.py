"""Factors of the inputs of int8 linears, which balance what activations and weights lose when they are rounded.

A row of activations x [K] is rounded to one scale, and so is each row of weights w [K]. In expectation the product is
then wrong by about ``|x| |w|`` times a constant, both rotated (quantization.py), which keeps these norms. ``x f`` and
``w / f`` have the same product for any factors f [K] but other norms; the product of the norms is least where inputs
that are large in activations and small in weights are as large in both: f = sqrt(rms of w / rms of x) for each input
(SmoothQuant: Xiao et al. 2022, arxiv.org/abs/2211.10438). Hidden states have inputs that are many times as large as
others, which a rotation only spreads. The divergence of SmolLM2-135M's probabilities from float32's is halved.

The activations are those of a few random tokens, or of texts. Factors are rounded to powers of the root of 2, so that
sums in another order give the same ones, and no input counts as much smaller than most: with other texts it may be
larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .linear import groups_of, weight_of
from .quantization import can_quantize
from .stored_weights import FACTORS

SEQUENCES, LENGTH, SEED = 2, 128, 0  # of the random tokens
FLOOR_RATIO = 0.01  # times the median of the mean squares is added to each
MAX_EXPONENT = 8.0  # factors are between 2^-8 and 2^8
STEPS_PER_OCTAVE = 2  # factors between 1 and 2: a power of two would be up to 1.4 times too large or too small
ROWS_AT_ONCE = 1024  # of weights, whose squares are summed as float64


@torch.no_grad()
def measure(model: Any, texts: Sequence[Sequence[int]] = ()) -> None:
    """Give each linear of a decoder that int8 may round its factors, by its activations on ``texts`` of token ids, or
    on random tokens."""
    if not texts:
        random, vocabulary = np.random.default_rng(SEED), int(model.get_input_embeddings().weight.shape[0])
        longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH)
        texts = random.integers(0, vocabulary, (SEQUENCES, min(LENGTH, longest))).tolist()
    groups = [modules for _, _, modules, _ in groups_of(model) if all(_has_floats(one) for one in modules)]
    found = [_Squares(weight_of(group[0])) for group in groups]
    hooks = [group[0].register_forward_pre_hook(one.add) for group, one in zip(groups, found, strict=True)]
    device = next(model.parameters()).device
    try:
        for text in texts:
            model(input_ids=torch.tensor([list(text)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for group, squares in zip(groups, found, strict=True):
        factors = balanced(squares.sums, [weight_of(module) for module in group])
        for module in group:
            module.__dict__[FACTORS] = factors


def _has_floats(module: nn.Module) -> bool:
    weight = weight_of(module)
    return not weight.is_meta and can_quantize(weight)


class _Squares:
    """The sums of the squares of a linear's inputs [K], with all tokens alike: each has a scale of its own when it is
    rounded, so its error goes with its own size."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.sums = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)

    def add(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        squares = given[0].reshape(-1, given[0].shape[-1]).double().square_()
        self.sums += (squares / squares.mean(-1, keepdim=True).clamp_min(1e-30)).sum(0)


def balanced(squares: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the factors [K] of linears [N, K] that share an input of these mean squares, float32; None if it has
    none."""
    of_weights = torch.zeros_like(squares)
    for weight in weights:
        sums = torch.stack([part.double().square_().sum(0) for part in weight.split(ROWS_AT_ONCE)]).sum(0)
        of_weights += sums / sums.sum().clamp_min(1e-30)  # linears count alike, whatever their scales
    if not bool(torch.isfinite(squares + of_weights).all() & (squares.median() > 0) & (of_weights.median() > 0)):
        return None
    exponents = 0.25 * (_floored(of_weights) / _floored(squares)).log2()
    exponents -= exponents.mean()
    return ((exponents * STEPS_PER_OCTAVE).round() / STEPS_PER_OCTAVE).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2().float()


def _floored(squares: torch.Tensor) -> torch.Tensor:
    return squares + FLOOR_RATIO * squares.median()
