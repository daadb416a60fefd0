"""PARAMETER of a Modelfile as defaults of request fields and as engine settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from .....serving.interface.errors import PackagingError, shown
from .modelfile import Instruction

FIELDS = {  # Ollama's name → the request field, and its type
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "typical_p": ("typical_p", float),
    "seed": ("seed", int),
    "num_predict": ("max_tokens", int),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "stop": ("stop", str),
}
SETTINGS = {"num_ctx": "max_model_len", "num_thread": "threads"}
# those without a counterpart: the values at which they are off, and the reason
OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "repeat_last_n": ((-1,), "repetition_penalty is counted over the whole text"),
    "mirostat": ((0,), "Mirostat is not supported, and Ollama has removed it"),
    "mirostat_tau": ((), "Mirostat is not supported, and Ollama has removed it"),
    "mirostat_eta": ((), "Mirostat is not supported, and Ollama has removed it"),
    "tfs_z": ((1,), "tail-free sampling is not supported"),
    "penalize_newline": ((), "Ollama has removed it"),
    "num_keep": ((), "a text that is longer than the context is refused, not cut"),
    "num_batch": ((), "the engine chooses its steps itself; max_num_batched_tokens bounds them"),
    "num_gpu": ((), "all layers are on one device, which device= names"),
    "main_gpu": ((), "device= names the GPU"),
    "draft_num_predict": ((0,), "draft_model= and speculation= are the settings of drafts"),
    "low_vram": ((), "kv_cache_memory= bounds the memory"),
    "f16_kv": ((), "kv_cache_dtype= is its setting"),
    "use_mmap": ((), "weights are always mapped"),
    "use_mlock": ((), "weights are never locked in memory"),
    "numa": ((), "the operating system places memory"),
    "logits_all": ((), "logprobs of a request asks for them"),
    "vocab_only": ((), "a model has its weights"),
    "embedding_only": ((), "task= says what a model is for"),
}
INFINITE = (-1, -2)  # of num_predict: as far as the context goes, as here without max_tokens


class Parameters(Struct, frozen=True, kw_only=True):
    """The parameters of a Modelfile. ``notes`` has a line for each that has no effect here."""

    defaults: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]


def sort(instructions: Sequence[Instruction]) -> Parameters:
    """Return the parameters; the last of several counts, and of ``stop`` all. Raises ``PackagingError`` for an unknown
    name, or a value of another type."""
    defaults: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for one in instructions:
        if one.key in FIELDS:
            field, kind = FIELDS[one.key]
            value = _value(one, kind)
            if field == "stop":
                defaults[field] = [*defaults.get(field, ()), value]
            elif (one.key == "num_predict" and value in INFINITE) or (one.key == "seed" and value < 0):
                defaults.pop(field, None)  # no bound, and a seed that is drawn: as here without the field
            else:
                defaults[field] = value
        elif one.key in SETTINGS:
            settings[SETTINGS[one.key]] = _value(one, int)
        elif one.key in OTHERS:
            off, why = OTHERS[one.key]
            if _plain(one.value) not in off:
                notes[one.key] = f"PARAMETER {one.key} {one.value} has no effect here: {why}"
        else:
            known = ", ".join((*FIELDS, *SETTINGS, *OTHERS))
            raise PackagingError(
                f"line {one.line}: PARAMETER {shown(one.key)} is not one of Ollama's; expected one of {known}"
            )
    return Parameters(defaults=defaults, settings=settings, notes=list(notes.values()))


def _value(one: Instruction, kind: type[Any]) -> Any:
    if kind is str:
        return one.value
    try:
        return kind(one.value)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise PackagingError(
            f"line {one.line}: PARAMETER {one.key}: {shown(one.value)} is not allowed; expected {wanted}"
        ) from None


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
