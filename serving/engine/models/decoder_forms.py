"""The decoders that a native step runs, and what it has to be told about their form.

A form says where the parts are in transformers' module. Numbers (windows, scalings, multipliers, caps) are read from
the model itself. Everything here is checked against the model's own logits when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..native.adapters import GATE, MEMBERS
from ..native.library import GELU, GELU_TANH, SILU

# A layer's norms: before the attention, after it, before the MLP, after it.
Norms = tuple[str | None, str | None, str | None, str | None]
BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
BEHIND: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH: Norms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ACTIVATIONS = {
    "SiLUActivation": SILU,
    "SiLU": SILU,
    "GELUTanh": GELU_TANH,
    "NewGELUActivation": GELU_TANH,
    "GELUActivation": GELU,
}


ONE_FOR_ALL: Sequence[str] = ("", "", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """The form of a layer's experts. ``shared``: gate, up and down of the MLP that all tokens pass through beside their
    experts, and the linear that weights it; "" for a missing part. ``sparsemixer``: a token's experts are chosen
    one after the other, each weighted among the remaining ones (SparseMixer)."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: Sequence[str] = ONE_FOR_ALL
    sparsemixer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a decoder. ``members``: a layer's linears q, k, v, o, gate, up, down; "" if an earlier one contains
    its columns, or for a gate that the MLP does not have. ``norm_offset`` is added to the weights of norms.
    ``positions``: a table of learned positions. ``experts``: the form of the layers that have experts."""

    body: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    norm: str = "norm"
    norms: Norms = BEFORE
    norm_offset: float = 0.0
    eps: str = "rms_norm_eps"
    members: Sequence[str] = MEMBERS
    gated: bool = True
    activation: str = "mlp.act_fn"
    experts: ExpertForm | None = None

    @property
    def attention(self) -> str:
        return self.members[0].partition(".")[0]

    def experts_of(self, layer: Any) -> ExpertForm | None:
        """Return the form of the layer's experts; None if its MLP is the same for all tokens."""
        return self.experts if self.experts is not None and at(layer, self.experts.experts) is not None else None

    def members_of(self, layer: Any) -> tuple[str, ...]:
        """Return the layer's linears, in the order of ``MEMBERS``."""
        routed = self.experts_of(layer)
        return tuple(self.members) if routed is None else (*self.members[:GATE], *routed.shared)

    def activation_of(self, layer: Any) -> str:
        """Return the class name of the layer's activation."""
        routed = self.experts_of(layer)
        return type(at(layer, self.activation if routed is None else f"{routed.experts}.act_fn")).__name__


LLAMA = Form()
JOINED = ("self_attn.qkv_proj", "", "", "self_attn.o_proj", "mlp.gate_up_proj", "", "mlp.down_proj", "")
UNGATED = (*MEMBERS[:GATE], "mlp.c_fc", "", "mlp.c_proj", "")
GPT2 = Form(
    body="transformer",
    layers="h",
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    norms=("ln_1", None, "ln_2", None),
    eps="layer_norm_epsilon",
    members=("attn.c_attn", "", "", "attn.c_proj", "mlp.c_fc", "", "mlp.c_proj", ""),
    gated=False,
    activation="mlp.act",
)
GEMMA = Form(norms=BOTH, norm_offset=1.0)
ROUTED = Form(experts=ExpertForm())
QWEN2_MOE = ExpertForm(
    shared=(*(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")), "mlp.shared_expert_gate")
)
GRANITE_MOE = ExpertForm(router="block_sparse_moe.router", experts="block_sparse_moe.experts")

FORMS = {
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": LLAMA,
    "SmolLM3DecoderLayer": LLAMA,
    "GraniteDecoderLayer": LLAMA,
    "MinistralDecoderLayer": LLAMA,
    "SeedOssDecoderLayer": LLAMA,
    "GPT2Block": GPT2,
    "Starcoder2DecoderLayer": Form(members=UNGATED, eps="norm_epsilon", gated=False, activation="mlp.act"),
    "Phi3DecoderLayer": Form(members=JOINED, activation="mlp.activation_fn"),
    "Olmo2DecoderLayer": Form(norms=BEHIND),
    "Olmo3DecoderLayer": Form(norms=BEHIND),
    "GemmaDecoderLayer": Form(norm_offset=1.0),
    "Gemma2DecoderLayer": GEMMA,
    "Gemma3DecoderLayer": GEMMA,
    "MixtralDecoderLayer": ROUTED,
    "OlmoeDecoderLayer": ROUTED,
    "PhimoeDecoderLayer": Form(experts=ExpertForm(router="mlp.router", sparsemixer=True)),
    "Qwen2MoeDecoderLayer": Form(experts=QWEN2_MOE),
    "Qwen3MoeDecoderLayer": ROUTED,
    "GraniteMoeDecoderLayer": Form(experts=GRANITE_MOE),
    "GraniteMoeSharedDecoderLayer": Form(
        experts=replace(GRANITE_MOE, shared=("shared_mlp.input_linear", "", "shared_mlp.output_linear", ""))
    ),
}


def form_of(model: nn.Module) -> Form | None:
    """Return the form of ``model``; None if a native step does not know its layers."""
    for form in {id(form): form for form in FORMS.values()}.values():
        layers = getattr(getattr(model, form.body, None), form.layers, None)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        names = {type(layer).__name__ for layer in layers}
        ours = all(type(layer).__module__.startswith("transformers.models.") for layer in layers)
        if len(names) == 1 and ours and FORMS.get(names.pop()) is form:
            return form
    return None


def at(module: Any, path: str) -> Any:
    """Return the attribute at a dotted path; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
