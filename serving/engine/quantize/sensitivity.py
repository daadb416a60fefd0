"""Estimate each layer's quantisation sensitivity: the loss caused by an error of a linear's outputs, by its gradients.

The loss is approximated to second order, with the mean square of the gradient as the curvature by outputs (the diagonal
of the empirical Fisher information, as in SqueezeLLM: Kim et al. 2024, arxiv.org/abs/2306.07629), and inputs and
gradients assumed independent::

    cost of a linear = 1/2 sum over outputs n of  mean(gradient_n ** 2) * (error H error^T)_nn
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

NUM_PIECES = 16  # pieces of text on which gradients are computed
PIECE_TOKENS = 128  # the activations of one piece are in memory


def squared_gradients(model: Any, linears: Sequence[nn.Module], texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return for each linear the mean square [N], by output and token, of the gradient of the loss on ``texts``.

    It is zeros for a linear that the loss does not depend on and, with a log message, for all of them if the model's
    code has no gradients or they are not finite. The model's parameters must not require gradients."""
    pieces = [list(texts[i * len(texts) // NUM_PIECES][:PIECE_TOKENS]) for i in range(NUM_PIECES)] if texts else []
    pieces = [piece for piece in pieces if len(piece) > 1]
    found = [torch.zeros(()) for _ in linears]

    def watch(number: int) -> Any:
        def add(gradient: torch.Tensor) -> None:
            found[number] = found[number] + gradient.detach().float().flatten(0, -2).square().sum(0)

        def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(add)

        return hook

    hooks = [one.register_forward_hook(watch(number)) for number, one in enumerate(linears)]
    hooks.append(
        model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].detach().requires_grad_(True))
    )
    try:
        with torch.enable_grad():
            for piece in pieces:
                tokens = torch.tensor([piece])
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                F.cross_entropy(logits.float(), tokens[0, 1:], reduction="sum").backward()
        if not all(bool(torch.isfinite(one).all()) for one in found):
            raise RuntimeError("gradients are not finite")
    except RuntimeError as error:
        logger.warning("layer sensitivity could not be estimated; all layers get 4 bits: %s", error)
        return [torch.zeros(()) for _ in linears]
    finally:
        for one in hooks:
            one.remove()
    count = max(1, sum(map(len, pieces)))
    return [one / count for one in found]


def cost_of(error: torch.Tensor, products: torch.Tensor, gradients: torch.Tensor) -> float:
    """Return the cost of ``error`` [N, K] of a weight, in nats per token; ``products`` [K, K] is the H of
    calibration.py."""
    return 0.5 * float((((error @ products) * error).sum(1) * gradients).sum())


def worst(costs: Sequence[float], sizes: Sequence[int], loss: float) -> set[int]:
    """Return the numbers of the linears with the highest cost per weight: as few as leave at most ``loss`` to all
    others."""
    chosen: set[int] = set()
    for number in sorted(range(len(costs)), key=lambda i: costs[i] / sizes[i], reverse=True):
        if sum(cost for i, cost in enumerate(costs) if i not in chosen) <= loss:
            break
        chosen.add(number)
    return chosen
