"""The kind of value that each key of a GGUF file must have: a wrong one refuses the file by the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .header import Header

MAX_COUNT = 2**31 - 1


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_COUNT


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_list(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(entry) is kind for entry in value)


Kind = tuple[Callable[[Any], bool], str]
COUNT: Kind = (_is_count, "a whole number of at least 1")
POSITIVE: Kind = (_is_positive, "a number above 0")
NUMBER: Kind = (_is_number, "a number of at least 0")
FINITE: Kind = (_is_finite, "a number")
TEXT: Kind = (_is_text, "a text")
ID: Kind = (_is_id, "the id of a token")
TEXTS: Kind = (_is_list(str), "a list of texts")
WHOLE_NUMBERS: Kind = (_is_list(int), "a list of whole numbers")
NUMBERS: Kind = (_is_list(float), "a list of numbers")

# of keys that describe the model, without their prefix; an array has a value for each layer
OF_THE_MODEL: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
            "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
            "expert_feed_forward_length", "expert_shared_feed_forward_length", "rope.dimension_count",
        ),
        COUNT,
    ),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor"), POSITIVE),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), NUMBER),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "rope.scale_linear"), NUMBER),
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), NUMBER),
    **dict.fromkeys(("rope.scaling.original_context_length", "attention.sliding_window"), NUMBER),
    "rope.scaling.yarn_attn_factor": FINITE,  # -1.0 leaves it to llama.cpp
    "rope.scaling.type": TEXT,
}  # fmt: skip
OF_THE_TOKENIZER: dict[str, Kind] = {
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"), TEXT),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), TEXTS),
    "tokenizer.ggml.token_type": WHOLE_NUMBERS,
    "tokenizer.ggml.scores": NUMBERS,
    **{f"tokenizer.ggml.{name}_token_id": ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}


def check_model_values(header: Header) -> None:
    """Refuse the first key that describes the model and has a value of the wrong kind. Raises ``PackagingError``."""
    for name, value in header.own().items():
        fits, expected = OF_THE_MODEL.get(name, (None, ""))
        entries = value if isinstance(value, list) and value else [value]
        if fits is not None and not all(fits(entry) for entry in entries):
            header.refuse(name, expected)


def check_tokenizer_values(header: Header) -> None:
    """Refuse the first key of the tokenizer that has a value of the wrong kind. Raises ``PackagingError``."""
    for key, value in header.values.items():
        fits, expected = OF_THE_TOKENIZER.get(key, (None, ""))
        if key.startswith("tokenizer.chat_template."):
            fits, expected = TEXT
        if fits is not None and not fits(value):
            header.refuse_key(key, expected)
    count = len(header.values.get("tokenizer.ggml.tokens") or ())
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if len(header.values.get(key) or [0] * count) != count:
            header.refuse_key(key, f"{count} values, one for each token")
