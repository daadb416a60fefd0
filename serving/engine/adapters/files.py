"""Read a peft adapter directory without peft, torch or pickle, and check that it fits the base model.

    adapter_config.json         peft_type, r, lora_alpha, rank_pattern, alpha_pattern, use_rslora, target_modules …
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

A key that changes the result but is not applied here is refused by name. Keys that only affect training are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...interface.errors import PackagingError, shown
from ...model_files.adapter_contents import FILES
from ...sandbox import POOL, Ended, Exceeded, Limits, NoProcess, Refused
from ..weights.config_bounds import read_header

CONFIG, WEIGHTS = FILES
PREFIX = "base_model.model."
WITHIN = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")  # a decoder within a larger model
FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight$")
MORE = {  # tensors beside A and B, of shape [out], that are present if the configuration asks for them
    "magnitude": re.compile(r"^(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?$"),
    "lora_bias": re.compile(r"^(?P<module>.+)\.lora_B(\.default)?\.bias$"),
    "bias": re.compile(r"^(?P<module>.+)\.base_layer\.bias$"),
}
NAME_ALONE = re.compile(r"\^?[\w.-]+\$?")  # a pattern of this form cannot backtrack
MAX_HERE = 100_000  # most comparisons of a pattern with a module name made in this process
PATTERNS = Limits(seconds=5.0, memory=256 << 20, output=16 << 20)
MAX_NUMBER = 1e9
# Config keys that change the forward pass, each with the values that mean "not used".
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "bias": (None, "lora_only", "none"),
}


# These initialisations also change the base weights. Converting to plain LoRA when peft saves resets the key.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")
PROMPT = "prompt_embeddings"
PROMPT_CONFIG: dict[str, tuple[Any, ...]] = {
    "num_transformer_submodules": (None, 1),
    "task_type": (None, "CAUSAL_LM"),
    "modules_to_save": (None, []),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """One adapted linear: the shapes of its factors, and ``scaling``, which multiplies ``B @ A``.

    ``more`` maps the kinds of ``MORE`` to the keys of the tensors [out] beside A and B."""

    a_key: str
    b_key: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    scaling: float
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.a_shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A readable adapter. ``modules`` is keyed by the base model's module names; ``rank`` is the largest of theirs.

    ``prompt`` is the (tokens, width) of a learned prompt; an adapter that has one has no modules."""

    path: Path
    rank: int
    modules: dict[str, AdapterModule]
    prompt: tuple[int, int] | None = None
    base_model: str | None = None

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS


def read_adapter(path: str | Path) -> AdapterFiles:
    """Read the configuration and the safetensors header.

    Raises ``PackagingError``, which names the adapter and the fault."""
    folder = Path(path)
    config = _read_config(folder)
    if config.get("peft_type") in PROMPT_TYPES:
        return _read_prompt(folder, config)
    _refuse_unsupported(folder.name, config)
    shapes = read_safetensors_header(folder)
    modules = _pair_factors(folder.name, config, shapes)
    rank = max(module.rank for module in modules.values())
    base = config.get("base_model_name_or_path")
    return AdapterFiles(path=folder, rank=rank, modules=modules, base_model=base if isinstance(base, str) else None)


def of_decoder(adapter: AdapterFiles, base_linear_shapes: Mapping[str, tuple[int, int]]) -> AdapterFiles:
    """Return ``adapter`` with modules named as the decoder alone names them, if it was trained on a vision-language
    model around that decoder: ``model.language_model.layers.0…`` is ``model.layers.0…``."""
    modules = {
        name if name in base_linear_shapes else WITHIN.sub("model.", name): module
        for name, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def check_fits(
    adapter: AdapterFiles,
    base_linear_shapes: Mapping[str, tuple[int, int]],
    head: str | None = None,
    *,
    width: int = 0,
) -> None:
    """Raise ``PackagingError`` if ``adapter`` does not fit linears of these (out, in) shapes.

    ``head`` is the module name of the output head. An adapter on it is refused, because a step computes the head only
    for the last token of each sequence. ``width`` is the width of the vectors that may stand for tokens, or 0 if the
    base takes none.
    """
    name = adapter.path.name
    if adapter.prompt is not None and adapter.prompt[1] != width:
        taken = f"vectors of width {width}" if width else "none"
        raise PackagingError(
            f"adapter {name!r}: its prompt has vectors of width {adapter.prompt[1]}; the base takes {taken}"
        )
    for module, factors in adapter.modules.items():
        if head is not None and module == head:
            raise PackagingError(
                f"adapter {name!r}: module {module!r} is the output head, which adapters cannot target"
            )
        shape = base_linear_shapes.get(module)
        if shape is None:
            raise PackagingError(f"adapter {name!r}: the base model has no linear module {module!r}")
        wanted = (factors.b_shape[0], factors.a_shape[1])
        if wanted != shape:
            raise PackagingError(
                f"adapter {name!r}: module {module!r} adapts the shape {wanted}, but the base's is {shape} (out, in)"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PackagingError(f"adapter {folder.name!r}: no {CONFIG}; expected a directory in peft's layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PackagingError(f"adapter {folder.name!r}: {CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise PackagingError(f"adapter {folder.name!r}: {CONFIG} holds no JSON object")
    return config


def _read_prompt(folder: Path, config: Mapping[str, Any]) -> AdapterFiles:
    """Read a learned prompt (prompt tuning, Lester et al. 2021; p-tuning, Liu et al. 2021). peft saves the output of
    the prompt encoder, not the encoder."""
    name = folder.name
    shapes = read_safetensors_header(folder)
    for key, allowed in PROMPT_CONFIG.items():
        if config.get(key) not in allowed:
            raise PackagingError(f"adapter {name!r}: {key}={shown(config[key])} is not supported")
    if strange := shapes.keys() - {PROMPT}:
        raise PackagingError(f"adapter {name!r}: tensor {shown(min(strange))} is not supported; expected only {PROMPT}")
    shape = shapes.get(PROMPT, ())
    if len(shape) != 2 or shape[0] < 1 or shape[0] != config.get("num_virtual_tokens"):
        said = f"num_virtual_tokens is {shown(config.get('num_virtual_tokens'))}"
        raise PackagingError(f"adapter {name!r}: {PROMPT} has the shape {shape}, but {said}")
    return AdapterFiles(path=folder, rank=0, modules={}, prompt=(shape[0], shape[1]))


def _refuse_unsupported(name: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise PackagingError(
            f"adapter {name!r}: peft type {shown(config.get('peft_type'))} is not supported; expected 'LORA', "
            "'PROMPT_TUNING' or 'P_TUNING'"
        )
    for key, unused in REFUSED.items():
        if config.get(key) not in unused:
            raise PackagingError(
                f"adapter {name!r}: {key}={shown(config[key])} is not supported; expected {unused[-1]!r}"
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(BASE_CHANGING_INITS):
        raise PackagingError(
            f"adapter {name!r}: init_lora_weights={shown(init)} changes the base weights; save it converted to plain "
            "LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def read_safetensors_header(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes by key. Raises ``PackagingError``, which names the adapter."""
    if not (folder / WEIGHTS).is_file():
        raise PackagingError(f"adapter {folder.name!r}: no {WEIGHTS}; other formats are not read when serving")
    try:
        return read_header(folder / WEIGHTS)
    except PackagingError as error:
        raise PackagingError(f"adapter {folder.name!r}: {error}") from None


def _pair_factors(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, AdapterModule]:
    keys: dict[str, dict[str, str]] = {}
    more: dict[str, dict[str, str]] = {}
    wanted = _more_wanted(config)
    for key in shapes:
        match = FACTOR.match(key.removeprefix(PREFIX))
        if match is None and (found := _more(key, wanted)) is not None:
            more.setdefault(found[0], {})[found[1]] = key
            continue
        if match is None:
            raise PackagingError(
                f"adapter {name!r}: tensor {shown(key)} is not supported; expected lora_A and lora_B of linears"
            )
        keys.setdefault(match["module"], {})[match["side"]] = key
    if not keys:
        raise PackagingError(f"adapter {name!r}: {WEIGHTS} holds no LoRA weights")
    ranks = _by_pattern(name, config, "rank_pattern", list(keys), _number(name, config, "r", 8))
    alphas = _by_pattern(name, config, "alpha_pattern", list(keys), _number(name, config, "lora_alpha", 8))
    modules = {
        module: _module(name, module, sides, shapes, ranks[module], alphas[module], bool(config.get("use_rslora")))
        for module, sides in keys.items()
    }
    return _with_more(name, modules, more, shapes, wanted) if wanted else modules


def _more_wanted(config: Mapping[str, Any]) -> set[str]:
    """Return the kinds of ``MORE`` that the configuration asks for."""
    asked = {
        "magnitude": config.get("use_dora"),
        "lora_bias": config.get("lora_bias"),
        "bias": config.get("bias") == "lora_only",
    }
    return {kind for kind, given in asked.items() if given}


def _more(key: str, wanted: set[str]) -> tuple[str, str] | None:
    """Return the (module, kind) of a tensor beside A and B, or None."""
    for kind in wanted:
        match = MORE[kind].match(key.removeprefix(PREFIX))
        if match is not None:
            return match["module"], kind
    return None


def _with_more(
    name: str,
    modules: dict[str, AdapterModule],
    more: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    wanted: set[str],
) -> dict[str, AdapterModule]:
    """Return ``modules`` with the tensors that they have beside A and B."""
    if strangers := more.keys() - modules.keys():
        raise PackagingError(f"adapter {name!r}: module {min(strangers)!r} has a tensor, but no lora_A and lora_B")
    for module, entry in modules.items():
        keys = more.get(module, {})
        for kind in wanted - {"bias"} - keys.keys():  # a linear need not have a bias
            raise PackagingError(f"adapter {name!r}: module {module!r} lacks its {kind}")
        for key in keys.values():
            if shapes[key] != (entry.b_shape[0],):
                wanted_shape = (entry.b_shape[0],)
                raise PackagingError(f"adapter {name!r}: {shown(key)} has the shape {shapes[key]}, not {wanted_shape}")
    return {module: replace(entry, more=more.get(module, {})) for module, entry in modules.items()}


def _module(
    name: str,
    module: str,
    sides: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    rank: float,
    alpha: float,
    rslora: bool,
) -> AdapterModule:
    if set(sides) != {"A", "B"}:
        raise PackagingError(f"adapter {name!r}: module {module!r} has only lora_{min(sides)}")
    a, b = shapes[sides["A"]], shapes[sides["B"]]
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise PackagingError(f"adapter {name!r}: module {module!r} has factors of incompatible shapes {a} and {b}")
    if a[0] != rank:
        raise PackagingError(f"adapter {name!r}: module {module!r} has rank {a[0]}, but its configuration says {rank}")
    scaling = alpha / math.sqrt(rank) if rslora else alpha / rank
    return AdapterModule(
        a_key=sides["A"], b_key=sides["B"], a_shape=(a[0], a[1]), b_shape=(b[0], b[1]), scaling=float(scaling)
    )


def _number(name: str, config: Mapping[str, Any], key: str, default: float) -> float:
    return _checked_number(name, key, config.get(key, default), rank=key == "r")


def _checked_number(name: str, key: str, value: Any, *, rank: bool) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    if not known or (rank and not (isinstance(value, int) and value > 0)):
        wanted = "an integer above 0" if rank else "a number"
        raise PackagingError(f"adapter {name!r}: {CONFIG}: {key}: {shown(value)} is not allowed; expected {wanted}")
    found: float = value
    return found


def _by_pattern(
    name: str, config: Mapping[str, Any], key: str, modules: Sequence[str], default: float
) -> dict[str, float]:
    """Apply peft's rule to each module: the first pattern that matches the end of its dotted name counts."""
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise PackagingError(f"adapter {name!r}: {CONFIG}: {key}: {shown(given)} is not allowed; expected an object")
    rank = key == "rank_pattern"
    values = [_checked_number(name, f"{key}[{shown(p)}]", value, rank=rank) for p, value in given.items()]
    if not values:
        return dict.fromkeys(modules, default)
    return {
        module: values[found] if found >= 0 else default
        for module, found in zip(modules, _matches(name, key, list(given), modules), strict=True)
    }


def _matches(name: str, key: str, patterns: list[str], modules: Sequence[str]) -> list[int]:
    """Return the index of each module's pattern, -1 for none.

    Patterns that are plain names, which nearly all adapters have, are matched here. Any other pattern may backtrack
    for ever, so it is matched in a process that can be killed.
    """
    if len(patterns) * len(modules) <= MAX_HERE and all(map(NAME_ALONE.fullmatch, patterns)):
        compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
        return [next((i for i, one in enumerate(compiled) if one.match(module)), -1) for module in modules]
    try:
        found: list[int] = POOL.run("match", PATTERNS, patterns=patterns, names=list(modules))
    except Refused as error:
        raise PackagingError(f"adapter {name!r}: {CONFIG}: {key}: {error.reason}") from None
    except (Exceeded, Ended, NoProcess) as error:
        raise PackagingError(f"adapter {name!r}: {CONFIG}: {key}: its regular expressions took {error}") from None
    return found
