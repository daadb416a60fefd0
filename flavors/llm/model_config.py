"""The settings saved with a model, in MLflow's ``model_config``.

MLflow lets a caller override only keys that were saved, so every tunable is saved with its value: each field of
``EngineSettings``, ``default_adapter`` (the adapter of requests that name none) and ``defaults`` (request fields used
where a request says nothing).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import Struct

from ...serving.dialects import REFUSED_FIELDS
from ...serving.errors import InvalidField, PackagingError, shown
from ...serving.settings import EngineSettings
from .signature import request_fields

CONTENT = ("messages", "prompt", "input", "model", "adapter", "stream", "stream_options")
NOT_DEFAULTS = frozenset([*CONTENT, *REFUSED_FIELDS])


class ModelConfig(Struct, frozen=True, kw_only=True):
    settings: EngineSettings = EngineSettings()
    default_adapter: str | None = None
    defaults: dict[str, Any] = {}

    def to_dict(self) -> dict[str, Any]:
        """Flat, as MLflow stores it: every key is present, so every key may be overridden."""
        own = {"default_adapter": self.default_adapter, "defaults": dict(self.defaults)}
        return msgspec.to_builtins(self.settings) | own


def parse(*layers: dict[str, Any] | str | Path | None) -> ModelConfig:
    """One configuration from several; a later one wins. Each is a dict or the path of a YAML file.

    Raises ``PackagingError`` for an unknown key, a value of a wrong type, or a default that is no request field.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= _as_dict(layer)
    default_adapter = merged.pop("default_adapter", None)
    defaults = merged.pop("defaults", None) or {}
    if default_adapter is not None and not isinstance(default_adapter, str):
        raise PackagingError(f"default_adapter: {shown(default_adapter)} is not allowed; expected a name")
    return ModelConfig(settings=_settings(merged), default_adapter=default_adapter, defaults=_defaults(defaults))


def _settings(values: dict[str, Any]) -> EngineSettings:
    known = EngineSettings.__struct_fields__
    if unknown := sorted(values.keys() - set(known)):
        allowed = ", ".join([*known, "default_adapter", "defaults"])
        raise PackagingError(f"model_config: {unknown[0]!r} is not a setting; expected one of {allowed}")
    try:
        return EngineSettings.read(values)
    except InvalidField as error:
        raise PackagingError(error.message) from None


def _defaults(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise PackagingError(f"defaults: {shown(values)} is not allowed; expected a dict of request fields")
    allowed = set(request_fields()) - NOT_DEFAULTS
    if unknown := sorted(str(key) for key in values if key not in allowed):
        raise PackagingError(
            f"defaults: {unknown[0]!r} cannot have a default; expected request fields such as max_tokens, temperature"
        )
    return values


def _as_dict(layer: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    if layer is None:
        return {}
    if isinstance(layer, str | Path):
        try:
            layer = yaml.safe_load(Path(layer).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise PackagingError(f"model_config: {error}") from None
    if not isinstance(layer, dict):
        raise PackagingError(f"model_config: {shown(layer)} is not allowed; expected a dict or the path of a YAML file")
    return layer
