"""The rotary position embeddings that a GGUF file describes, in the form of a config's ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

from .....serving.interface.errors import PackagingError
from .header import Header

FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
ROPE_KEYS = (
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.alpha",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)


def rope_parameters(header: Header, rotary: int) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a config. ``rotary`` is the number of dimensions that are rotated.

    Frequencies scaled one by one (``rope_freqs.weight``, as in Llama 3.1) have the form of transformers' longrope,
    whose factors for short and long texts are then the same. Raises ``PackagingError`` for a scaling that has no form
    there.
    """
    kind = header.get("rope.scaling.type", "linear")  # llama.cpp's default; without a factor, it scales nothing
    factor = float(header.get("rope.scaling.factor", header.get("rope.scale_linear", 0.0)) or 1.0)
    if kind in ("none", ""):
        factor = 1.0
    _refuse_variants(header, kind)
    base = {"rope_theta": float(header.get("rope.freq_base", 10000.0))}
    scale = float(header.get("rope.scaling.attn_factor", 1.0))
    context = int(header.required("context_length"))
    original = int(header.get("rope.scaling.original_context_length", context) or context)
    if kind == "yarn":
        return base | _yarn(header, factor, scale, original)
    if LONG_FACTORS in header.tensors or SHORT_FACTORS in header.tensors:
        short, long = _factors(header, SHORT_FACTORS, rotary), _factors(header, LONG_FACTORS, rotary)
        return base | _each(short, long, scale, original, context)
    if kind == "longrope":
        header.refuse("rope.scaling.type", f"the tensors {SHORT_FACTORS} and {LONG_FACTORS} beside it")
    if FREQUENCIES in header.tensors:
        factors = [value * factor for value in _factors(header, FREQUENCIES, rotary)]
        return base | _each(factors, factors, scale, context, context)
    if scale != 1.0:
        factors = [factor] * (rotary // 2)
        return base | _each(factors, factors, scale, context, context)
    if factor != 1.0:
        return base | {"rope_type": "linear", "factor": factor}
    return base | {"rope_type": "default"}


def _refuse_variants(header: Header, kind: str) -> None:
    if kind not in ("none", "", "linear", "yarn", "longrope"):
        header.refuse("rope.scaling.type", "none, linear, yarn or longrope")
    if header.get("rope.scaling.alpha", 0.0) not in (0.0, 1.0):
        header.refuse("rope.scaling.alpha", "0.0 or 1.0 (NTK scaling is in rope.freq_base)")
    if kind != "yarn":
        for name, neutral in (("yarn_ext_factor", (0.0, -1.0)), ("yarn_attn_factor", (1.0, -1.0))):
            if header.get(f"rope.scaling.{name}", neutral[0]) not in neutral:
                header.refuse(f"rope.scaling.{name}", f"{neutral[0]}, as the scaling's type is {kind or 'none'}")
        return
    if header.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        header.refuse("rope.scaling.yarn_ext_factor", "1.0")
    if header.get("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        header.refuse("rope.scaling.yarn_log_multiplier", "0.0")
    if found := [name for name in ROPE_TENSORS if name in header.tensors]:
        header.refuse("rope.scaling.type", f"a file without {found[0]}")


def _yarn(header: Header, factor: float, scale: float, original: int) -> dict[str, Any]:
    attention = float(header.get("rope.scaling.yarn_attn_factor", -1.0))
    if attention < 0:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention * scale,
        "beta_fast": float(header.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(header.get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _each(short: list[float], long: list[float], scale: float, original: int, context: int) -> dict[str, Any]:
    """Return the form that has a factor for each frequency."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": context / original,
        "attention_factor": scale,
        "original_max_position_embeddings": original,
    }


def _factors(header: Header, name: str, rotary: int) -> list[float]:
    factors = header.factors.get(name)
    if factors is None:
        raise PackagingError(f"model: {header.file} lacks the tensor {name}")
    if len(factors) != rotary // 2:
        raise PackagingError(
            f"model: {header.file}: {name} holds {len(factors)} factors; expected {rotary // 2}, one for each frequency"
        )
    return factors
