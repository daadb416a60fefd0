"""``mlflow.models.update_model_requirements`` for models of this flavor.

MLflow's function takes each line of requirements.txt for a package, and fails on ``--find-links``, which names the
folder of the project's own wheel. It also leaves the manifest, which has the hashes of the environment's files, as it
was. It is therefore replaced in this process, for models of this flavor alone: their options are kept, what is added is
checked as when a model is saved, and the manifest is written with the new hashes.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ....serving.interface.errors import PackagingError, shown
from ..errors import raises_mlflow
from ..model import manifest as manifests
from .requirements import CONDA_ENV, REQUIREMENTS, check_requirements
from .wheel import DISTRIBUTION

NAME = "update_model_requirements"
OPERATIONS = ("add", "remove")

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replace MLflow's function, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        module = importlib.import_module("mlflow.models.model")
        plain = getattr(module, NAME)
        replaced = functools.wraps(plain)(_updating(plain))
        for place in ("mlflow.models.model", "mlflow.models"):
            setattr(importlib.import_module(place), NAME, replaced)
        _installed = True


def _updating(plain: Callable[..., None]) -> Callable[..., None]:
    def update(model_uri: str, operation: Any, requirement_list: list[str]) -> None:
        store = _store(model_uri)
        if store is None:
            plain(model_uri, operation, requirement_list)
        else:
            _update(store, operation, requirement_list)

    return update


def _store(model_uri: str) -> Any:
    """Return the artifact repository of a model of this flavor; None for what MLflow updates, or refuses, itself."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    models = ModelsArtifactRepository
    if models.is_models_uri(model_uri) and not models._is_logged_model_uri(model_uri):
        return None
    store = get_artifact_repository(model_uri)
    names = {Path(found.path).name for found in store.list_artifacts("")}
    return store if {manifests.MANIFEST, REQUIREMENTS, CONDA_ENV} <= names else None


@raises_mlflow
def _update(store: Any, operation: Any, lines: list[str]) -> None:
    """Change requirements.txt and conda.yaml, and record them in the manifest. Raises ``PackagingError``."""
    if operation not in OPERATIONS:
        raise PackagingError(f"operation: {shown(operation)} is not allowed; expected {' or '.join(OPERATIONS)}")
    given = [_requirement(line) for line in lines]
    check_requirements(pip_requirements=list(lines), extra_pip_requirements=None, conda_env=None)
    if operation == "remove" and DISTRIBUTION in map(_name, given):
        raise PackagingError(f"{DISTRIBUTION} cannot be removed: nothing else can load the model")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in (manifests.MANIFEST, REQUIREMENTS, CONDA_ENV):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                Path(store.download_artifacts(name, dst_path=folder)).replace(root / name)
        manifest = manifests.read(root)
        changed = _changed((root / REQUIREMENTS).read_text().splitlines(), given, operation)
        (root / REQUIREMENTS).write_text("\n".join(changed) + "\n")
        conda = yaml.safe_load((root / CONDA_ENV).read_text())
        for part in conda["dependencies"]:
            if isinstance(part, dict) and "pip" in part:
                part["pip"] = _changed(part["pip"], given, operation)
        (root / CONDA_ENV).write_text(yaml.safe_dump(conda, default_flow_style=False))
        manifests.write(manifests.with_changed_environment(manifest, root, (REQUIREMENTS, CONDA_ENV)), root)
        for name in (CONDA_ENV, REQUIREMENTS, manifests.MANIFEST):
            store.log_artifact(str(root / name))


def _changed(lines: Iterable[str], given: list[Requirement], operation: str) -> list[str]:
    """Return ``lines`` without the packages in ``given``, which are appended if they are to be added."""
    names = set(map(_name, given))
    kept = [line for line in lines if line and (line.startswith("-") or _name(_requirement(line)) not in names)]
    return kept + [str(one) for one in {_name(one): one for one in given}.values()] * (operation == "add")


def _requirement(line: str) -> Requirement:
    try:
        return Requirement(line.strip())
    except InvalidRequirement as error:
        raise PackagingError(f"requirements: {shown(line)} is not a package's name and version: {error}") from None


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)
