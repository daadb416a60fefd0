"""The registered base of an adapter that is logged alone: pinned to one version, fetched, and checked by hash."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from ....serving.interface.errors import ModelNotFound, PackagingError, shown
from . import fetch, model_registry
from . import manifest as manifests
from .manifest import BaseReference

URI = re.compile(r"(models|runs):/+[^/].*")


class PinnedBase(Struct, frozen=True, kw_only=True):
    """A base: the ``reference`` that is stored with the adapter, and the base's ``root`` on this machine."""

    reference: BaseReference
    root: Path


def pinned_base(uri: str) -> PinnedBase:
    """Fetch the base at ``uri`` and pin it to a version.

    An alias or ``latest`` is stored as the version that it names now, so that the adapter keeps its base. Raises
    ``PackagingError`` for a path, or for a base that has a base itself.
    """
    if not _is_uri(uri):
        raise PackagingError(
            f"base: {shown(uri)} is not allowed; expected models:/<name>/<version> or runs:/<id>/<path>"
        )
    try:
        pinned = model_registry.pinned(uri)
    except ModelNotFound as error:
        raise ModelNotFound(f"base: {error}") from None
    root = fetch.fetch(pinned)
    manifest = manifests.read(root)
    if manifest.base is not None:
        raise PackagingError(f"base: {uri} holds only an adapter; name its own base, {manifest.base.uri}")
    return PinnedBase(reference=BaseReference(uri=pinned, content_hash=manifest.content_hash), root=root)


def fetch_base(reference: BaseReference, *, weights: bool = True) -> Path:
    """Fetch the base that an adapter was logged over, and return its root on this machine.

    Raises ``PackagingError`` if that URI now names a different model.
    """
    if not _is_uri(reference.uri):  # a manifest is no more trusted than a caller: no paths, no http
        raise PackagingError(
            f"{manifests.MANIFEST}: base: {shown(reference.uri)} is not allowed; expected models:/<name>/<version> or"
            " runs:/<id>/<path>"
        )
    try:
        root = fetch.fetch(reference.uri, weights=weights)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"base: {error}; this version holds only an adapter. Where its registry is not at hand, as in a container,"
            " take the whole model: llm.materialise(uri, path) writes it, and path is then what to serve, or to give"
            " to mlflow models generate-dockerfile"
        ) from None
    found = manifests.read(root).content_hash
    if found != reference.content_hash:
        raise PackagingError(
            f"base: {reference.uri} is not the model this adapter was logged over: its content hash is {found[:12]}…,"
            f" expected {reference.content_hash[:12]}…"
        )
    return root


def _is_uri(uri: str) -> bool:
    return URI.fullmatch(uri) is not None and ".." not in uri.split("/")
