"""Which linears bear few bits worst: what an error of their outputs costs the model's loss, by its gradients.

The loss is taken to second order, its curvature by outputs to be the mean square of the gradient (the diagonal of the
empirical Fisher information, as in SqueezeLLM: Kim et al. 2024, arxiv.org/abs/2306.07629), inputs and gradients to be
independent::

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

PIECES = 16  # of texts that gradients are taken on
LENGTH = 128  # tokens of a piece: the activations of one are in memory


def squared_gradients(model: Any, linears: Sequence[nn.Module], texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of linears, the mean square [N] of the gradient of the loss of ``texts``, by their outputs and a token; zeros of
    one that the loss does not depend on, and of all where the model's code has no gradients or not finite ones, which
    is logged. The model's parameters must need none."""
    pieces = [list(texts[i * len(texts) // PIECES][:LENGTH]) for i in range(PIECES)] if texts else []
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
        logger.warning("which linears bear four bits worst cannot be told (all have them): %s", error)
        return [torch.zeros(()) for _ in linears]
    finally:
        for one in hooks:
            one.remove()
    count = max(1, sum(map(len, pieces)))
    return [one / count for one in found]


def cost_of(error: torch.Tensor, products: torch.Tensor, gradients: torch.Tensor) -> float:
    """What ``error`` [N, K] of a weight costs, in nats a token; ``products`` [K, K] is the H of calibration.py."""
    return 0.5 * float((((error @ products) * error).sum(1) * gradients).sum())


def worst(costs: Sequence[float], sizes: Sequence[int], loss: float) -> set[int]:
    """Numbers of those that cost most, weight for weight: as few as leave no more than ``loss`` to all others."""
    chosen: set[int] = set()
    for number in sorted(range(len(costs)), key=lambda i: costs[i] / sizes[i], reverse=True):
        if sum(cost for i, cost in enumerate(costs) if i not in chosen) <= loss:
            break
        chosen.add(number)
    return chosen
