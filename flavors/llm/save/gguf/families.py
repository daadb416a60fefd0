"""The keys of a GGUF file that describe the model, as the config of transformers' class for its architecture.

Each key is honoured, or it has a value that changes nothing, or the file is refused by the key. transformers' own
reader skips the keys that it does not know, and fills in the defaults of one checkpoint; llama.cpp's count here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from .....serving.interface.errors import PackagingError, shown
from .....serving.interface.errors import reason as message
from .header import Header
from .rope import ROPE_KEYS, rope_parameters
from .unread import reason
from .values import check_model_values

PATTERN = "attention.sliding_window_pattern"
# the keys of every decoder, and the config's name for each
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# keys that change nothing at these values, whatever the architecture
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.value_scale": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "classifier.output_labels": ([],),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # none and softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),  # a remark of old converters
}


class Family(Struct, frozen=True, kw_only=True):
    """A class of transformers for one architecture of llama.cpp: which keys its config honours, and what it implies."""

    model_type: str
    fields: dict[str, str]
    epsilon: tuple[str, str]  # the key and the config's name for it
    head_dim: bool = True  # whether the config states the heads' size; else it is hidden_size / heads
    partial_rotary: bool = False
    rotary: bool = True
    derive: Callable[[Header, dict[str, Any]], dict[str, Any]] = lambda header, config: {}
    handled: tuple[str, ...] = ()  # further keys, which ``derive`` reads


def _biases(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _qwen3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in header.tensors}


def _routed(norm: bool) -> Callable[[Header, dict[str, Any]], dict[str, Any]]:
    def derive(header: Header, config: dict[str, Any]) -> dict[str, Any]:
        # llama.cpp does not read the key for these two: each has one way to weigh experts
        if header.get("expert_weights_norm", norm) is not norm:
            header.refuse("expert_weights_norm", str(norm))
        return {"norm_topk_prob": norm, "decoder_sparse_step": 1, "mlp_only_layers": []}

    return derive


def _gemma2(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    if header.get("rope.freq_base_swa", header.get("rope.freq_base", 10000.0)) != header.get("rope.freq_base", 10000.0):
        header.refuse("rope.freq_base_swa", "the value of gemma2.rope.freq_base")
    return {
        "sliding_window": header.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0) or None,
        # the file does not state the scale of the queries: the 27B differs from the others
        "query_pre_attn_scalar": _query_scalar(config, 46),
        "layer_types": _alternating(header, config, 2),
    }


def _gemma3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    windowed = bool(header.get("attention.sliding_window"))
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)}
    return {
        "sliding_window": header.get("attention.sliding_window") or config["max_position_embeddings"],
        "final_logit_softcapping": header.get("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "layer_types": _alternating(header, config, 6 if windowed else 1),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _query_scalar(config: dict[str, Any], layers_of_largest: int) -> int:
    if config["num_hidden_layers"] == layers_of_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _alternating(header: Header, config: dict[str, Any], period: int) -> list[str]:
    """Return the kinds of the layers: every ``period``-th attends to all, unless the file says otherwise."""
    count = config["num_hidden_layers"]
    stated = header.get(PATTERN, period)
    if isinstance(stated, list):
        if len(stated) != count:
            header.refuse(PATTERN, f"{count} values, one for each layer")
        windows = [bool(entry) for entry in stated]
    else:
        windows = [stated == 0 or index % stated < stated - 1 for index in range(count)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _phi3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp attends to everything in these models, whatever window the file names; the window is part of the model
    window = header.get("attention.sliding_window", 0)
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _starcoder2(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": None}


def _stablelm(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    parallel = "blk.0.ffn_norm.weight" not in header.tensors
    if header.get("use_parallel_residual", parallel) is not parallel and not parallel:
        parallel = False  # converters write True for models that have both norms; llama.cpp looks at the tensors, too
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_parallel_residual": parallel,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", fields=SIZES, epsilon=(RMS, "rms_norm_eps"), derive=_biases),
    "qwen2": Family(model_type="qwen2", fields=SIZES, epsilon=(RMS, "rms_norm_eps"), head_dim=False),
    "qwen3": Family(model_type="qwen3", fields=SIZES, epsilon=(RMS, "rms_norm_eps"), derive=_qwen3),
    "qwen2moe": Family(
        model_type="qwen2_moe",
        fields=SIZES | EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        epsilon=(RMS, "rms_norm_eps"),
        head_dim=False,
        derive=_routed(False),
        handled=("expert_weights_norm",),
    ),
    "qwen3moe": Family(
        model_type="qwen3_moe",
        fields=SIZES | EXPERTS,
        epsilon=(RMS, "rms_norm_eps"),
        derive=_routed(True),
        handled=("expert_weights_norm",),
    ),
    "gemma2": Family(
        model_type="gemma2",
        fields=SIZES,
        epsilon=(RMS, "rms_norm_eps"),
        derive=_gemma2,
        handled=(
            "attention.sliding_window",
            PATTERN,
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        ),
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        fields=SIZES,
        epsilon=(RMS, "rms_norm_eps"),
        derive=_gemma3,
        handled=(
            "attention.sliding_window",
            PATTERN,
            "final_logit_softcapping",
            "rope.freq_base_swa",
        ),
    ),
    "phi3": Family(
        model_type="phi3",
        fields=SIZES,
        epsilon=(RMS, "rms_norm_eps"),
        head_dim=False,
        partial_rotary=True,
        derive=_phi3,
        handled=("attention.sliding_window",),
    ),
    "starcoder2": Family(
        model_type="starcoder2",
        fields=SIZES,
        epsilon=(LAYER_NORM, "norm_epsilon"),
        head_dim=False,
        derive=_starcoder2,
    ),
    "stablelm": Family(
        model_type="stablelm",
        fields=SIZES,
        epsilon=(LAYER_NORM, "layer_norm_eps"),
        head_dim=False,
        partial_rotary=True,
        derive=_stablelm,
        handled=("use_parallel_residual",),
    ),
    "nemotron": Family(
        model_type="nemotron",
        fields=SIZES,
        epsilon=(LAYER_NORM, "norm_eps"),
        partial_rotary=True,
        derive=_biases,
        handled=(RMS,),  # converters write it too; the norms are layer norms
    ),
    "gpt2": Family(
        model_type="gpt2",
        fields={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
        },
        epsilon=(LAYER_NORM, "layer_norm_epsilon"),
        head_dim=False,
        rotary=False,
    ),
}


def model_config(header: Header) -> Any:
    """Build transformers' config for a GGUF file. Raises ``PackagingError`` for an architecture or a key that is not
    supported."""
    from transformers import AutoConfig

    family = FAMILIES.get(header.architecture)
    if family is None:
        raise PackagingError(
            f"model: {header.file}: general.architecture = {shown(header.architecture)} is not supported for a GGUF"
            f" file: {reason(header.architecture, sorted(FAMILIES))}"
        )
    _check_keys(header, family)
    check_model_values(header)
    fields = {name: _one(header, key) for key, name in family.fields.items() if key in header.own()}
    for key in ("context_length", "embedding_length", "block_count", "attention.head_count", family.epsilon[0]):
        header.required(key)
    heads = _one(header, "attention.head_count")
    if "attention.head_count_kv" in family.fields:
        fields.setdefault("num_key_value_heads", heads)
    fields[family.epsilon[1]] = float(header.required(family.epsilon[0]))
    head_dim = _head_dim(header, family, heads)
    if family.head_dim:
        fields["head_dim"] = head_dim
    if family.rotary:
        fields["rope_parameters"] = _rope(header, family, head_dim)
    fields |= family.derive(header, fields)
    tokens = header.values.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight", (len(tokens) if isinstance(tokens, list) else 0,))
    fields["vocab_size"] = embedding[0]
    if header.get("vocab_size", embedding[0]) != embedding[0]:
        header.refuse("vocab_size", f"{embedding[0]}, the rows of token_embd.weight")
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    for name in ("bos", "eos", "padding"):
        fields[f"{'pad' if name == 'padding' else name}_token_id"] = header.values.get(
            f"tokenizer.ggml.{name}_token_id"
        )
    try:
        return AutoConfig.for_model(family.model_type, **fields)
    except Exception as error:  # a config's class checks its fields, such as a size that the heads do not divide
        raise PackagingError(f"model: {header.file}: its keys make no {family.model_type}: {message(error)}") from None


def _check_keys(header: Header, family: Family) -> None:
    """Refuse the first key that is neither honoured nor at a value that changes nothing."""
    honoured = {
        *family.fields,
        *family.handled,
        *(ROPE_KEYS if family.rotary else ()),
        family.epsilon[0],
        "vocab_size",
        "attention.key_length",
        "attention.value_length",
    }
    for name, value in header.own().items():
        if name in honoured:
            if isinstance(value, list) and name not in family.fields and name != PATTERN:
                header.refuse(name, "one value for all layers")
            continue
        if name not in NEUTRAL:
            header.refuse(name, "a file without this key")
        # an array has a value for each layer
        for entry in value if isinstance(value, list) and NEUTRAL[name] != ([],) else [value]:
            if entry not in NEUTRAL[name]:
                header.refuse(name, " or ".join(str(allowed) for allowed in NEUTRAL[name]))


def _one(header: Header, key: str) -> Any:
    """Return the value of a size; an array, with a value for each layer, must have equal ones."""
    value = header.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        header.refuse(key, "one value for all layers")
    return value[0]


def _head_dim(header: Header, family: Family, heads: int) -> int:
    hidden = header.required("embedding_length")
    head_dim = header.get("attention.key_length", hidden // heads)
    if header.get("attention.value_length", hidden // heads) != head_dim:
        header.refuse("attention.value_length", f"{head_dim}, the size of the keys")
    if not family.head_dim and head_dim * heads != hidden:
        header.refuse("attention.key_length", f"{hidden // heads}, embedding_length / attention.head_count")
    return int(head_dim)


def _rope(header: Header, family: Family, head_dim: int) -> dict[str, Any]:
    rotary = header.get("rope.dimension_count", head_dim)
    if rotary != head_dim and not family.partial_rotary:
        header.refuse("rope.dimension_count", f"{head_dim}, the size of the heads")
    parameters = rope_parameters(header, rotary)
    return parameters | {"partial_rotary_factor": rotary / head_dim} if family.partial_rotary else parameters
