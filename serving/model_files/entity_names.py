"""Names of served entities, made from the models that they serve."""

from __future__ import annotations

import re

from ..interface.settings import NAME
from .model_uri import parse

MAX_CHARACTERS = 63  # of a ``NAME``
FALLBACK = "model"  # for a model of whose name no character may stand in an entity's


def name_of_version(name: str, version: str) -> str:
    """Return an entity's name for a version of a registered model: ``assistant-3`` for version 3 of ``assistant``,
    ``assistant-champion`` for the alias. For a URI without a ``version``, the name has its whole path."""
    made = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{name}-{version}".replace("@", ""))
    return made.strip("-_")[-MAX_CHARACTERS:].strip("-_")


def label_of(uri: str) -> str:
    """Return the name of the entity that a command line declares for the model at ``uri``.

    It is ``assistant-3`` for ``models:/assistant/3``, ``assistant-champion`` for ``models:/assistant@champion``, and
    the last part of the path of any other URI, directory or hub id. It is a name that the management API accepts; what
    is one already stays as it is.
    """
    if NAME.fullmatch(uri):
        return uri
    named = parse(uri)
    version = None if named is None else named.version or named.alias
    if named is not None and version is not None:
        return name_of_version(named.name, version) or FALLBACK
    last = uri.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-_.")[:MAX_CHARACTERS].strip("-_.") or FALLBACK
