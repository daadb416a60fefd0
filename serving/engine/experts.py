"""The model's experts, replaced in place by ours: packed weights, each expert's multiplied by the tokens that chose it.

transformers 5 keeps the experts of a layer in two parameters, ``gate_up_proj`` [experts, 2 I, H] and ``down_proj``
[experts, H, I]. As one linear, one expert below the other, they are quantised, packed and mapped as all linears are; a
native step multiplies parts of it, and so does the model's own code here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .native.library import PANEL
from .native.weight import NativeWeight, can_pack
from .weight_layouts import PackedWeight

PARAMETERS = ("gate_up_proj", "down_proj")
KNOWN = (
    "GraniteMoeExperts",
    "GraniteMoeSharedExperts",
    "MixtralExperts",
    "OlmoeExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
)


class EngineExperts(nn.Module):
    """Stands where transformers' experts stood. Holds ``packed`` by the name of the parameter it is made of."""

    def __init__(self, count: int, activation: Any, packed: dict[str, NativeWeight]) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.packed = count, activation, packed

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """[T, H] of experts [T, k] that count for [T, k]. A token's sum is in the order of its experts."""
        made = hidden_states.new_empty(*top_k_index.shape, hidden_states.shape[-1])
        for number in top_k_index.unique().tolist():
            tokens, ranks = torch.where(top_k_index == number)
            up, down = (self.packed[name].part(number, self.num_experts) for name in PARAMETERS)
            gate, value = up.matmul(hidden_states[tokens]).chunk(2, dim=-1)
            made[tokens, ranks] = down.matmul(self.act_fn(gate) * value)
        made *= top_k_weights[..., None]
        return torch.stack(made.unbind(1)).sum(0)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, " + ", ".join(f"{name} {one.kind}" for name, one in self.packed.items())


def replaceable(module: nn.Module) -> bool:
    """Exactly these classes, of widths that can be cut into an expert's panels."""
    known = type(module).__name__ in KNOWN and type(module).__module__.startswith("transformers.models.")
    return known and all(
        weight.shape[1] % PANEL == 0 and (weight.is_meta or can_pack(stacked(weight))) for weight in _weights(module)
    )


def parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its weights by name, as one linear each."""
    for name, weight in zip(PARAMETERS, _weights(module), strict=True):
        yield name, stacked(weight)


def _weights(module: nn.Module) -> list[torch.Tensor]:
    return [getattr(module, name).detach() for name in PARAMETERS]


def stacked(weight: torch.Tensor) -> torch.Tensor:
    """[experts, N, K] as [experts * N, K]."""
    return weight.reshape(-1, weight.shape[-1])


def replaced(module: Any, packed: dict[str, PackedWeight]) -> EngineExperts:
    """What takes the place of ``module``."""
    own = {name: one for name, one in packed.items() if isinstance(one, NativeWeight)}
    assert len(own) == len(packed), "they are taken where our kernels take them"
    return EngineExperts(module.num_experts, module.act_fn, own)
