"""The types of the arguments of ``save_model`` that other modules do not parse, checked before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import yaml  # type: ignore[import-untyped]
from mlflow.models import Model, ModelSignature

from ....serving.interface.errors import InvalidField, PackagingError, shown
from ..predict.predict_input import plain

YAML = "texts, numbers, booleans, None, and lists and dicts of them"


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_signature(value: Any) -> bool:
    return value is None or isinstance(value, ModelSignature)


def _is_model(value: Any) -> bool:
    return value is None or isinstance(value, Model)


def _are_requirements(value: Any) -> bool:
    return value is None or isinstance(value, str) or _is_list(value, lambda line: isinstance(line, str))


def _are_paths(value: Any) -> bool:
    return value is None or _is_list(value, _is_path)


def _is_list(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_entry, value))


REQUIREMENTS = _are_requirements, "a list of requirements, the path of a file with them, or None"
FLAG = _is_flag, "True or False"
ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "path": (_is_path, "a local directory"),
    "mlflow_model": (_is_model, "an mlflow.models.Model, or None"),
    "signature": (_is_signature, "an mlflow.models.ModelSignature, or None"),
    "pip_requirements": REQUIREMENTS,
    "extra_pip_requirements": REQUIREMENTS,
    "code_paths": (_are_paths, "a list of local files and folders, or None"),
    "link_files": FLAG,
    "validate_serving_input": FLAG,
    "images": (lambda value: value is None or value is False, "False, or None"),
}


def check_types(**given: Any) -> None:
    """Raise ``PackagingError`` for an argument that is not of the type in ``ARGUMENTS``."""
    for name, value in given.items():
        is_allowed, allowed = ARGUMENTS[name]
        if not is_allowed(value):
            raise PackagingError(f"{name}: {shown(value)} is not allowed; expected {allowed}")


def plain_metadata(given: Any) -> dict[Any, Any]:
    """Return a caller's ``metadata`` with numpy's values as Python's. Raises ``PackagingError`` for what YAML lacks."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise PackagingError(f"metadata: {shown(given)} is not allowed; expected a dict, or None")
    return {_plain(key, key): _plain(key, value) for key, value in given.items()}


def _plain(key: Any, value: Any) -> Any:
    try:
        found = plain(value)
        yaml.safe_dump(found)
    except (InvalidField, RecursionError, yaml.YAMLError):
        raise PackagingError(f"metadata: {shown(key)}: {shown(value)} is not allowed; expected {YAML}") from None
    return found
