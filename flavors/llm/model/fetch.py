"""Fetch saved models to this machine from wherever MLflow keeps them, with or without their weights."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason, shown
from . import model_registry
from .names import MLMODEL
from .unlogged_source import check_logged


def local_root(model_uri: str | os.PathLike[str], dst_path: str | None = None, *, weights: bool = True) -> Path:
    """Return the local root of the model at ``model_uri``, fetching it if it is not on this machine.

    Raises ``ModelNotFound``; ``PackagingError`` for a model that is not logged yet, or for a value that is not a URI.
    """
    if not isinstance(model_uri, str | os.PathLike) or not str(model_uri):  # Path("") is the current directory
        raise PackagingError(
            f"model_uri: {shown(model_uri)} is not allowed; expected a local directory, or a URI such as"
            " models:/<name>/<version>"
        )
    path = Path(model_uri)
    check_logged(str(model_uri))
    if path.is_dir() and dst_path is None:
        return path.absolute()
    uri = str(model_uri) if path.is_dir() else model_registry.pinned(str(model_uri))
    return fetch(uri, dst_path, weights=weights)


def fetch(uri: str, dst_path: str | None = None, *, weights: bool = True) -> Path:
    """Return a local directory with the model at ``uri``.

    A model in a local store is used in place. One in a remote store is downloaded once, into the user's cache, where
    this process holds it. With ``dst_path``, a copy is made there. Raises ``ModelNotFound``; ``PackagingError`` for a
    model whose manifest cannot be read.
    """
    import mlflow
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    from .download import downloaded

    model_registry.check_store_exists(uri)
    try:
        store = get_artifact_repository(uri)
        if dst_path is None and not is_local(store):
            return downloaded(uri, store, weights=weights)
        if not isinstance(store, ModelsArtifactRepository):
            return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=dst_path))
        # MLflow's function takes an @ in the name of a version for the beginning of an alias
        if dst_path is not None:
            Path(dst_path).mkdir(parents=True, exist_ok=True)
        return Path(store.download_artifacts("", dst_path))
    except PackagingError:
        raise
    except Exception as error:  # a store's client raises what it likes, such as ImportError, or ValueError for a URI
        raise model_registry.not_found_in_store(uri, reason(error)) from None


def flavors_of(uri: str) -> list[str]:
    """Return the names of the flavors that the model at ``uri`` was logged with. Raises what a store's client does."""
    from mlflow.models import Model
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    path = Path(uri)
    if path.is_dir():
        return list(Model.load(str(path)).flavors)
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
        return list(Model.load(get_artifact_repository(uri).download_artifacts(MLMODEL, dst_path=folder)).flavors)


def is_local(store: Any) -> bool:
    """Return whether MLflow returns a path of this store instead of a copy."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    if isinstance(store, ModelsArtifactRepository):
        store = store.repo
    return isinstance(store, LocalArtifactRepository)
