"""peft's adapter directory, read without peft, torch or pickle: what it holds and whether it fits a base.

    adapter_config.json         peft_type, r, lora_alpha, rank_pattern, alpha_pattern, use_rslora, target_modules …
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

Whatever changes the result and is not applied here is refused by name. Keys that only steer training are not looked at.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PackagingError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PREFIX = "base_model.model."
FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight$")
# Config keys that change the forward pass; each with the values that mean "not used".
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "bias": (None, "none"),
}


# These initialisations change the base weights too; peft's conversion on saving (to plain LoRA) resets the key.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """One adapted linear: the shapes of its factors and the factor ``scaling`` on ``B @ A``."""

    a_key: str
    b_key: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    scaling: float

    @property
    def rank(self) -> int:
        return self.a_shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A readable LoRA adapter. ``modules`` is by the base model's module name; ``rank`` is the largest."""

    path: Path
    rank: int
    modules: dict[str, AdapterModule]
    base_model: str | None = None

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS


def read_adapter(path: str | Path) -> AdapterFiles:
    """Read the configuration and the safetensors header. Raises ``PackagingError`` naming the adapter and the fault."""
    folder = Path(path)
    config = _read_config(folder)
    _refuse_unsupported(folder.name, config)
    shapes = read_safetensors_header(folder)
    modules = _pair_factors(folder.name, config, shapes)
    rank = max(module.rank for module in modules.values())
    base = config.get("base_model_name_or_path")
    return AdapterFiles(path=folder, rank=rank, modules=modules, base_model=base if isinstance(base, str) else None)


def check_fits(
    adapter: AdapterFiles, base_linear_shapes: Mapping[str, tuple[int, int]], head: str | None = None
) -> None:
    """Raise ``PackagingError`` where ``adapter`` does not fit linears of these (out, in) shapes.

    ``head`` is the output head's module name: an adapter on it is refused, because a step computes the head for the
    last token of each sequence only.
    """
    name = adapter.path.name
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
                f"adapter {name!r}: module {module!r} adapts a shape {wanted}, the base's is {shape} (out, in)"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PackagingError(f"adapter {folder.name!r}: no {CONFIG}; expected a directory in peft's layout") from None
    except (OSError, ValueError) as error:
        raise PackagingError(f"adapter {folder.name!r}: {CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise PackagingError(f"adapter {folder.name!r}: {CONFIG} holds no JSON object")
    return config


def _refuse_unsupported(name: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise PackagingError(f"adapter {name!r}: peft type {config.get('peft_type')!r} is not supported, 'LORA' is")
    for key, unused in REFUSED.items():
        if config.get(key) not in unused:
            raise PackagingError(f"adapter {name!r}: {key}={config[key]!r} is not supported; expected {unused[-1]!r}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(BASE_CHANGING_INITS):
        raise PackagingError(
            f"adapter {name!r}: init_lora_weights={init!r} changes the base weights; save it converted to plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )


def read_safetensors_header(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by key. The header is 8 bytes of little-endian length, then JSON (safetensors' format)."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return {key: tuple(value["shape"]) for key, value in header.items() if key != "__metadata__"}
    except FileNotFoundError:
        raise PackagingError(
            f"adapter {folder.name!r}: no {WEIGHTS}; other formats are not read when serving"
        ) from None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise PackagingError(f"adapter {folder.name!r}: {WEIGHTS} cannot be read: {error}") from None


def _pair_factors(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, AdapterModule]:
    keys: dict[str, dict[str, str]] = {}
    for key in shapes:
        match = FACTOR.match(key.removeprefix(PREFIX))
        if match is None:
            raise PackagingError(
                f"adapter {name!r}: tensor {key!r} is not supported; expected lora_A and lora_B of linears"
            )
        keys.setdefault(match["module"], {})[match["side"]] = key
    if not keys:
        raise PackagingError(f"adapter {name!r}: {WEIGHTS} holds no LoRA weights")
    return {module: _module(name, module, config, sides, shapes) for module, sides in keys.items()}


def _module(
    name: str, module: str, config: Mapping[str, Any], sides: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> AdapterModule:
    if set(sides) != {"A", "B"}:
        raise PackagingError(f"adapter {name!r}: module {module!r} has lora_{min(sides)} alone")
    a, b = shapes[sides["A"]], shapes[sides["B"]]
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise PackagingError(f"adapter {name!r}: module {module!r} has factors of shapes {a} and {b} that do not join")
    if a[0] != rank:
        raise PackagingError(f"adapter {name!r}: module {module!r} has rank {a[0]}, its configuration says {rank}")
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return AdapterModule(
        a_key=sides["A"], b_key=sides["B"], a_shape=(a[0], a[1]), b_shape=(b[0], b[1]), scaling=float(scaling)
    )


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """peft's rule: the first key that is a regular expression for the end of the module's dotted name."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
