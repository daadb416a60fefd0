"""A registered base under an adapter that is logged alone: pinned to one version, fetched, and held to its hash."""

from __future__ import annotations

import re
from pathlib import Path

from ...serving.bundle import Bundle
from ...serving.errors import ModelNotFound, PackagingError, reason, shown
from . import manifest as manifests
from . import registry
from .manifest import BaseReference, Verify

URI = re.compile(r"(models|runs):/+[^/].*")


def pinned_base(uri: str) -> tuple[BaseReference, Bundle]:
    """The reference to store for ``uri``, and the base's parts. An alias or ``latest`` becomes the version it names
    now, so that what is stored never moves. Raises ``PackagingError`` for a path, or a base that has a base itself."""
    if not _is_uri(uri):
        raise PackagingError(
            f"base: {shown(uri)} is not allowed; expected models:/<name>/<version> or runs:/<id>/<path>"
        )
    try:
        fixed = registry.fixed(uri)
    except ModelNotFound as error:
        raise ModelNotFound(f"base: {error}") from None
    root = fetch(fixed)
    manifest = manifests.read(root)
    if manifest.base is not None:
        raise PackagingError(f"base: {uri} holds only an adapter; name its own base, {manifest.base.uri}")
    from .resolve import load_bundle_from

    return BaseReference(uri=fixed, content_hash=manifest.content_hash), load_bundle_from(root)


def resolve_base(reference: BaseReference, verify: Verify | None, *, weights: bool = True) -> Bundle:
    """The parts of the base that an adapter was logged over. Raises ``PackagingError`` where it is another."""
    if not _is_uri(reference.uri):  # a manifest is trusted no more than a caller: no path, no http
        raise PackagingError(
            f"{manifests.MANIFEST}: base: {shown(reference.uri)} is not allowed; expected models:/<name>/<version> or"
            " runs:/<id>/<path>"
        )
    root = fetch(reference.uri, weights=weights)
    found = manifests.read(root).content_hash
    if found != reference.content_hash:
        raise PackagingError(
            f"base: {reference.uri} is not the model this adapter was logged over: its content hash is {found[:12]}…,"
            f" expected {reference.content_hash[:12]}…"
        )
    from .resolve import load_bundle_from

    return load_bundle_from(root, verify=verify, weights=weights)


def _is_uri(uri: str) -> bool:
    return URI.fullmatch(uri) is not None and ".." not in uri.split("/")


def fetch(uri: str, dst_path: str | None = None, *, weights: bool = True) -> Path:
    """A local directory with the model at ``uri``, with or without its weights. What lies in a local store is used
    where it is, not copied. Raises ``ModelNotFound``."""
    import mlflow
    from mlflow.exceptions import MlflowException

    registry.must_have_store(uri)
    try:
        if not weights:
            return _fetch_few(uri)
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=dst_path))
    except (MlflowException, OSError) as error:
        raise registry.not_found_in_store(uri, reason(error)) from None


def _fetch_few(uri: str) -> Path:
    """All but the weights, file by file: they are a few megabytes of what may be a hundred gigabytes."""
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(uri)
    root = Path(store.download_artifacts(manifests.MANIFEST)).parent
    for path in (MLMODEL_FILE_NAME, *manifests.read(root).files):
        if not manifests.is_weights(path) and not (root / path).is_file():
            store.download_artifacts(path, dst_path=str(root))
    return root
