"""Read a saved model back: its ``Bundle``, checked against the manifest, and its configuration.

For files on this machine this does not import MLflow, which would take seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from ....serving.interface.bundle import Bundle
from ....serving.interface.errors import PackagingError, reason, shown
from . import manifest as manifests
from . import model_config as configs
from . import templates
from .base_model import fetch_base
from .manifest import Manifest, Verify
from .names import FLAVOR_NAME, MLMODEL, MODEL_CONFIG, PYFUNC


def read_bundle(root: Path, verify: Verify | None = None, *, weights: bool = True) -> Bundle:
    """Return the parts of the saved model under ``root``, including those of its base.

    With ``weights=False`` the weight files may be missing; such a bundle serves for the tokenizer and the templates.
    Raises ``PackagingError``.
    """
    manifest = manifests.read(root)
    manifests.check(manifest, root, verify, weights=weights)
    own = _own_adapters(manifest, root)
    if manifest.base is not None:
        base = read_bundle(fetch_base(manifest.base, weights=weights), verify, weights=weights)
        return _over_base(manifest, root, own, base)
    return Bundle(
        content_hash=manifest.content_hash,
        tasks=manifest.tasks,
        model_dir=str(root / "model"),
        tokenizer_dir=str(root / "tokenizer"),
        adapters=own,
        chat_templates=templates.stored(root),
        embedding=manifest.embedding,
        cross_encoder=manifest.cross_encoder,
        tool_formats=manifest.tool_formats,
        default_adapter=manifest.default_adapter,
        model_hashes=manifest.model_hashes,
        weight_bytes=manifest.weight_bytes,
        images=manifest.images,
    )


def configured(
    root: Path, overrides: dict[str, Any] | None = None, *, weights: bool = True
) -> tuple[Bundle, configs.ModelConfig]:
    """Return the bundle under ``root`` and its configuration with ``overrides`` (which may set the default adapter).

    Raises ``PackagingError``.
    """
    bundle = read_bundle(root, weights=weights)
    config = configs.parse(saved_keys(root, bundle.default_adapter), overrides)
    chosen = config.default_adapter
    if chosen is not None and chosen not in bundle.adapters:
        raise PackagingError(f"default_adapter: {shown(chosen)} is not an adapter; expected {_names(bundle.adapters)}")
    for name in config.settings.pinned_adapters:
        if name not in bundle.adapters:
            raise PackagingError(
                f"pinned_adapters: {shown(name)} is not an adapter; expected {_names(bundle.adapters)}"
            )
    return msgspec.structs.replace(bundle, default_adapter=chosen), config


def saved_keys(root: Path, default_adapter: str | None) -> dict[str, Any]:
    """Return ``saved_config``, with ``default_adapter`` (the bundle's) unless another was saved."""
    return {"default_adapter": default_adapter} | saved_config(root)


def _names(adapters: dict[str, str]) -> str:
    return ", ".join(sorted(adapters)) or "None, the model has no adapters"


def saved_config(root: Path) -> dict[str, Any]:
    """Read ``model_config`` from the MLmodel file. Raises ``PackagingError``; like MLflow, also if there is no file."""
    path = root / MLMODEL
    if not path.is_file():
        raise PackagingError(f"{MLMODEL} is missing in {root}: the model's settings and defaults are in it")
    try:
        flavors = yaml.safe_load(path.read_text(encoding="utf-8"))["flavors"]
        names = sorted(flavors)
        config = (flavors.get(PYFUNC) or {}).get(MODEL_CONFIG)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise PackagingError(f"{path} cannot be read: {reason(error)}") from None
    if FLAVOR_NAME not in names:
        raise PackagingError(f"this model was not saved by mlflow-llm; its flavors are {', '.join(names)}")
    if not isinstance(config, dict):  # every saved model has one
        raise PackagingError(f"{path} lacks the model's settings: {PYFUNC}.{MODEL_CONFIG} is {shown(config)}")
    return config


def _own_adapters(manifest: Manifest, root: Path) -> dict[str, str]:
    return {name: str(root / "adapters" / name) for name in manifest.adapters}


def _over_base(manifest: Manifest, root: Path, own: dict[str, str], base: Bundle) -> Bundle:
    """Return the base with these adapters added; a tokenizer or template stored here replaces the base's."""
    both = f"{base.content_hash}\n{manifest.content_hash}\n"
    has_tokenizer = any(path.startswith("tokenizer/") for path in manifest.files)
    return Bundle(
        content_hash=hashlib.sha256(both.encode()).hexdigest(),
        tasks=manifest.tasks,
        model_dir=base.model_dir,
        tokenizer_dir=str(root / "tokenizer") if has_tokenizer else base.tokenizer_dir,
        adapters=base.adapters | own,
        chat_templates=templates.stored(root) or base.chat_templates,
        embedding=manifest.embedding or base.embedding,
        cross_encoder=manifest.cross_encoder or base.cross_encoder,
        tool_formats=manifest.tool_formats or base.tool_formats,
        default_adapter=manifest.default_adapter,
        model_hashes=base.model_hashes,
        weight_bytes=base.weight_bytes,
        images=base.images,
    )
