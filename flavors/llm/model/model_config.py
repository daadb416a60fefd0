"""The settings saved with a model, in MLflow's ``model_config``.

MLflow lets a caller override only keys that were saved, so every tunable is saved with its value: each field of
``EngineSettings``, ``default_adapter`` (the adapter for requests that name none), ``output`` (the form of what
``predict`` returns), ``defaults`` (values for request fields that a request leaves out) and ``generation_config``
(values from the model's own ``generation_config.json``, for fields that ``defaults`` leaves out too).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import Struct

from ....serving.dialects.fields.defaults import NO_DEFAULT, check_defaults, request_defaults
from ....serving.dialects.fields.fields import nearest
from ....serving.interface.errors import InvalidField, PackagingError, shown
from ....serving.interface.settings import GRANTED, EngineSettings
from .generation_config import of_caller
from .request_fields import request_fields

REPLY = "reply"
OUTPUTS = (REPLY, "text", "embedding")  # what ``predict`` returns of a reply
Layer = dict[str, Any] | str | Path | None
NOT_INHERITED = GRANTED  # whoever names a base must ask for its code to run; naming it is not enough


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The parsed configuration of a model."""

    settings: EngineSettings = EngineSettings()
    default_adapter: str | None = None
    output: str = REPLY
    defaults: dict[str, Any] = {}
    generation_config: dict[str, Any] = {}

    @property
    def request_defaults(self) -> dict[str, Any]:
        """The defaults of request fields. A null in ``defaults`` removes one of the model's own defaults."""
        return request_defaults(self.generation_config, self.defaults)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as MLflow stores it: flat, with every key present so that each can be overridden."""
        own = {"default_adapter": self.default_adapter, "output": self.output, "defaults": dict(self.defaults)}
        return msgspec.to_builtins(self.settings) | own | {"generation_config": dict(self.generation_config)}


OTHER_NAMES = {  # arguments of mlflow.transformers.log_model
    "transformers_model": "model",
    "torch_dtype": "dtype",
    "example_no_conversion": "input_example",
    "inference_config": "generation_config",
    "model_card": "metadata",
    "processor": "tokenizer",
}


def parse(*layers: Layer) -> ModelConfig:
    """Combine several layers into one configuration; later layers override earlier ones.

    A layer is a dict or the path of a YAML file. Raises ``PackagingError`` for an unknown key, a value of the wrong
    type, or a default for something that is not a request field.
    """
    merged = merge(*layers)
    default_adapter = merged.pop("default_adapter", None)
    output = merged.pop("output", None) or REPLY
    defaults = merged.pop("defaults", None) or {}
    own = merged.pop("generation_config", None)
    if default_adapter is not None and not isinstance(default_adapter, str):
        raise PackagingError(f"default_adapter: {shown(default_adapter)} is not allowed; expected a name")
    if output not in OUTPUTS:
        raise PackagingError(f"output: {shown(output)} is not allowed; expected one of {', '.join(OUTPUTS)}")
    return ModelConfig(
        settings=_settings(merged),
        default_adapter=default_adapter,
        output=output,
        defaults=_defaults(defaults),
        generation_config={} if own is None else of_caller(own),
    )


def merge(*layers: Layer) -> dict[str, Any]:
    """Merge the keys of all layers; for each key the last layer that has it wins. Raises ``PackagingError``."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= _as_dict(layer)
    return merged


def over_base(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an adapter that is logged over a base: those ``saved`` with the base, overridden by ``given``.

    A key in ``given`` replaces the base's, even with null. ``defaults`` are replaced field by field, and ``{}`` removes
    them all. A ``generation_config`` of null counts as not given. Both dicts have the form that ``parse`` takes.
    """
    below = {key: value for key, value in saved.items() if key not in NOT_INHERITED}
    merged = below | given
    if given.get("defaults"):
        merged["defaults"] = (below.get("defaults") or {}) | given["defaults"]
    if given.get("generation_config") is None:
        merged["generation_config"] = below.get("generation_config")
    return merged


def _settings(values: dict[str, Any]) -> EngineSettings:
    known = EngineSettings.__struct_fields__
    if unknown := sorted(values.keys() - {*known, *EngineSettings.ALIASES, *EngineSettings.DROPPED}):
        allowed = [*known, "default_adapter", "output", "defaults", "generation_config"]
        near = nearest(str(unknown[0]), allowed)
        hint = f"did you mean {near!r}? " if near else ""
        if unknown[0] in OTHER_NAMES:
            hint = f"{OTHER_NAMES[unknown[0]]} is its name here; "
        raise PackagingError(
            f"model_config: {unknown[0]!r} is not a setting; {hint}expected one of {', '.join(allowed)}"
        )
    try:
        return EngineSettings.read(values)
    except InvalidField as error:
        raise PackagingError(error.message) from None


def _defaults(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise PackagingError(f"defaults: {shown(values)} is not allowed; expected a dict of request fields")
    allowed = set(request_fields()) - set(NO_DEFAULT)
    if unknown := sorted(str(key) for key in values if key not in allowed):
        raise PackagingError(
            f"defaults: {unknown[0]!r} cannot have a default; expected request fields such as max_tokens, temperature"
        )
    try:
        check_defaults(values)
    except InvalidField as error:
        raise PackagingError(error.message) from None
    return values


def _as_dict(layer: Layer) -> dict[str, Any]:
    if layer is None:
        return {}
    if isinstance(layer, str | Path):
        try:
            layer = yaml.safe_load(Path(layer).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())[:300]
            raise PackagingError(f"model_config: {shown(str(layer))} cannot be read: {why}") from None
    if not isinstance(layer, dict):
        raise PackagingError(f"model_config: {shown(layer)} is not allowed; expected a dict or the path of a YAML file")
    return layer
