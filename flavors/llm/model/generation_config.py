"""The sampling defaults in a model's ``generation_config.json``, as request fields.

As in vLLM, values in the file become the model's defaults; the values that transformers assumes for missing settings do
not. ``do_sample: false`` means greedy decoding. Settings without a counterpart here stay in the packaged file, and a
warning names them when the model is logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....serving.dialects.fields.defaults import defaults_of
from ....serving.dialects.fields.fields import nearest
from ....serving.interface.errors import InvalidField, PackagingError, shown

FILE = "generation_config.json"
# transformers' name → the request field of the same meaning
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
OWN = frozenset(FIELDS.values())
# Settings that are read elsewhere (token ids), meant for another program, or about the file itself.
IGNORED = frozenset(
    [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "return_legacy_cache",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "do_sample",
        "disable_compile",
        "compile_config",
        "prefill_chunk_size",
        "chat_format",
        "trust_remote_code",
        "remove_invalid_values",
        "renormalize_logits",
        "low_memory",
    ]
)
# Values at which a setting without a counterpart is off.
OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "max_length": (20,),  # transformers writes this if none is set
    "early_stopping": (False,),
    "token_healing": (False,),
    "guidance_scale": (1.0,),
}


def read(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``(defaults, rest)`` from the file in ``model_dir``: request fields, and settings that have no effect here.

    Raises ``PackagingError`` if the file is not a JSON object.
    """
    file = model_dir / FILE
    if not file.is_file():
        return {}, {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise PackagingError(f"model: {FILE} is not valid JSON") from None
    if not isinstance(values, dict):
        raise PackagingError(f"model: {FILE} is not a JSON object")
    return divided(values)


def of_caller(values: Any) -> dict[str, Any]:
    """Return the caller's defaults in ``values``, a dict or a ``transformers.GenerationConfig``, as request fields.

    Keys may be transformers' names or those of request fields. Raises ``PackagingError`` for another type, for a value
    that its field does not accept, or for a setting that has no effect here.
    """
    values = values.to_diff_dict() if hasattr(values, "to_diff_dict") else values
    if not isinstance(values, Mapping):
        raise PackagingError(f"generation_config: {shown(values)} is not allowed; expected a dict of sampling defaults")
    found, rest = divided(dict(values))
    for name, value in rest.items():
        if (refused := _refusal(name, value)) is not None:
            raise PackagingError(f"generation_config: {refused.message}")
        known = (*FIELDS, "do_sample")
        near = nearest(str(name), known)
        hint = f"did you mean {near!r}?" if near else "expected one of " + ", ".join(known)
        raise PackagingError(f"generation_config: {name}: {shown(value)} has no effect here; {hint}")
    return found


def without_effect(name: str, value: Any) -> str:
    """Describe a setting that has no effect here, with what is allowed if it is the value that is refused."""
    refused = _refusal(name, value)
    return f"{name}={shown(value)}" if refused is None else refused.message


def divided(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide settings by transformers' names into request fields and the settings that have no effect here."""
    found: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in values.items():
        field = _field(name)
        if value is None or str(name).startswith("_"):
            continue
        if field is None:
            if name not in IGNORED and not _is_off(value, OFF.get(name, ())):
                rest[name] = value
        elif _refusal(name, value) is None:
            found[field] = value
        else:
            rest[name] = value
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return found, rest


def _field(name: str) -> str | None:
    return FIELDS.get(name, name if name in OWN else None)


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    return value in off or value in ([], {}, "")


def _refusal(name: str, value: Any) -> InvalidField | None:
    """Return the error for a value that its field does not accept, under the name that the setting has here."""
    field = _field(name)
    if field is None:
        return None
    try:
        defaults_of({field: value})("completions")
    except InvalidField as error:
        error.rename(name + (error.param or field).removeprefix(field))
        return error
    return None
