"""The name by which a loaded model calls itself in its replies: that of its version in the registry, if it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ....serving.model_files.model_uri import parse
from ....serving.model_files.model_version import ModelVersion
from .names import FLAVOR_NAME, MLMODEL

REGISTERED = "registered_model_meta"  # MLflow writes it beside the MLmodel file of a version that it downloads


def name_of(root: Path, uri: str = "") -> str:
    """Return ``assistant/3`` for a version, the id of a logged model that no version is known of, or ``llm``.

    ``uri`` is where the model was loaded from; "" if that is not known. A file of MLflow's says which version an alias
    named, or which version a local copy is of.
    """
    named = parse(uri)
    if named is not None and named.version is not None and named.version.isdecimal():
        return ModelVersion.of(uri, "").label
    found = _read(root / REGISTERED)
    name, version = found.get("model_name"), found.get("model_version")
    if isinstance(name, str) and name and version is not None:
        return f"{name}/{version}"
    return str(_read(root / MLMODEL).get("model_id") or FLAVOR_NAME)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
