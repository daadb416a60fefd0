"""The model's experts, replaced in place by ours, which have packed weights and run each expert on its tokens.

transformers 5 keeps the experts of a layer in two parameters, ``gate_up_proj`` [experts, 2 I, H] and ``down_proj``
[experts, H, I]. Stacked into one linear, they are quantised, packed and mapped like all linears. A native step
multiplies by parts of it, and so does the module here, which the model's own code calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..native.library import LANES, PANEL
from ..native.weight import NativeWeight, can_pack
from .quantization import Int8Weight
from .stored_weights import StoredLinear, stored_experts_of
from .weight_layouts import PackedWeight, PlainWeight

PARAMETERS = ("gate_up_proj", "down_proj")
KNOWN = (
    "GraniteMoeExperts",
    "GraniteMoeSharedExperts",
    "MixtralExperts",
    "OlmoeExperts",
    "PhimoeExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
)


class EngineExperts(nn.Module):
    """A module that takes the place of transformers' experts. ``packed`` is keyed by the parameters that the weights
    come from."""

    def __init__(self, experts: Any, packed: dict[str, PackedWeight]) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.packed = int(experts.num_experts), experts.act_fn, packed

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Run [T, H] through the experts ``top_k_index`` [T, k], weighted by ``top_k_weights`` [T, k].

        A token's results are summed in the order of its experts."""
        made = hidden_states.new_empty(*top_k_index.shape, hidden_states.shape[-1])
        for number in top_k_index.unique().tolist():
            tokens, ranks = torch.where(top_k_index == number)
            up, down = (_part(self.packed[name], number, self.num_experts) for name in PARAMETERS)
            gate, value = up.matmul(hidden_states[tokens]).chunk(2, dim=-1)
            made[tokens, ranks] = down.matmul(self.act_fn(gate) * value)
        made *= top_k_weights[..., None]
        return torch.stack(made.unbind(1)).sum(0)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, " + ", ".join(f"{name} {type(one).__name__}" for name, one in self.packed.items())


def _part(packed: PackedWeight, number: int, count: int) -> PackedWeight:
    """Return the weight of expert ``number`` of ``count``."""
    if isinstance(packed, NativeWeight):
        return packed.part(number, count)
    size = packed.out_features // count
    rows = slice(number * size, (number + 1) * size)
    if isinstance(packed, Int8Weight):
        return Int8Weight.of(packed.values[rows], packed.scale[rows], None, packed.dtype, is_rotated=packed.is_rotated)
    return PlainWeight(packed.dense()[rows], None)


def is_known(module: nn.Module) -> bool:
    """Return whether a module is of exactly these classes; others may use their weights in other ways."""
    return type(module).__name__ in KNOWN and type(module).__module__.startswith("transformers.models.")


def weights_of(module: Any) -> dict[str, torch.Tensor | StoredLinear]:
    """Return the experts' weights by name, each as one linear [experts * N, K]."""
    stored = stored_experts_of(module)
    return {name: stored[name] if name in stored else stacked(getattr(module, name)) for name in PARAMETERS}


def stacked(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().reshape(-1, weight.shape[-1])


def fits_natively(module: Any, like: torch.Tensor | None) -> bool:
    """Return whether our kernels take the module's weights, with each expert's in panels of its own.

    ``like`` is a parameter of the model."""
    shapes = [weight.shape for weight in weights_of(module).values()]
    whole = all(rows // module.num_experts % PANEL == 0 and width % LANES == 0 for rows, width in shapes)
    return whole and like is not None and can_pack(like)
