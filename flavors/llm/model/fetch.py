"""Fetch saved models to this machine from wherever MLflow keeps them, with or without their weights."""

from __future__ import annotations

import os
from pathlib import Path

from ....serving.interface.errors import PackagingError, reason, shown
from . import manifest as manifests
from . import model_registry
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
    """Return a local directory with the model at ``uri``. A model in a local store is used in place, not copied.

    Raises ``ModelNotFound``; ``PackagingError`` for a model whose manifest cannot be read.
    """
    import mlflow

    model_registry.check_store_exists(uri)
    try:
        if not weights:
            return _fetch_without_weights(uri)
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=dst_path))
    except PackagingError:
        raise
    except Exception as error:  # a store's client raises what it likes, such as ImportError, or ValueError for a URI
        raise model_registry.not_found_in_store(uri, reason(error)) from None


def _fetch_without_weights(uri: str) -> Path:
    """Download file by file: without its weights, a model of a hundred gigabytes is a few megabytes."""
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(uri)
    root = Path(store.download_artifacts(manifests.MANIFEST)).parent
    for path in (MLMODEL_FILE_NAME, *manifests.read(root).files):
        if not manifests.is_weights(path) and not (root / path).is_file():
            store.download_artifacts(path, dst_path=str(root))
    return root
