"""Parse and build ``models:/`` URIs of MLflow's model registry.

MLflow's own rule (``mlflow.store.artifact.utils.models``) allows ``models:/<name>/<version>``, where the version is a
number or ``latest``, and ``models:/<name>@<alias>``. ``models:/m-<32 hexadecimal digits>`` is the id of a logged model
and names no registered model.
"""

from __future__ import annotations

import re

from msgspec import Struct

LATEST = "latest"
UNREGISTERED = "1"  # the version of an unregistered model, for protocols in which every model has one
STORE_SCHEMES = ("models:", "runs:")  # schemes of URIs that MLflow looks up in its stores
PATTERN = re.compile(r"models:/+(?P<name>[^/]+)(?:/(?P<version>[^/]+))?")
LOGGED_MODEL = re.compile(r"m-[0-9a-f]{32}")


class RegisteredModel(Struct, frozen=True, kw_only=True):
    """A registered model by ``name``, with a ``version`` (digits, or ``latest``), an ``alias``, or neither."""

    name: str
    version: str | None = None
    alias: str | None = None

    @property
    def uri(self) -> str:
        if self.alias is not None:
            return f"models:/{self.name}@{self.alias}"
        return f"models:/{self.name}" if self.version is None else f"models:/{self.name}/{self.version}"


def parse(uri: str) -> RegisteredModel | None:
    """Return the registered model that ``uri`` names; None for another scheme, a path, or a logged model's id."""
    found = PATTERN.fullmatch(uri)
    if found is None:
        return None
    name, version = found["name"], found["version"]
    if version is not None:
        return RegisteredModel(name=name, version=version)
    if "@" in name:
        name, _, alias = name.rpartition("@")
        return RegisteredModel(name=name, alias=alias) if name and alias else None
    return None if LOGGED_MODEL.fullmatch(name) else RegisteredModel(name=name)


def by_version(name: str, version: str) -> RegisteredModel:
    """Return the registered model that a served entity names: ``version`` is digits, ``latest``, or an alias with or
    without its ``@``."""
    if version.isdecimal() or version == LATEST:  # MLflow refuses an alias of that name
        return RegisteredModel(name=name, version=version)
    return RegisteredModel(name=name, alias=version.removeprefix("@"))


def version_of(uri: str) -> str:
    """Return the version or alias of the registered model that ``uri`` names; ``UNREGISTERED`` for any other."""
    found = parse(uri)
    return UNREGISTERED if found is None else found.version or found.alias or UNREGISTERED


def in_store(uri: str) -> bool:
    """Return whether MLflow looks ``uri`` up in its tracking store or its model registry."""
    return uri.startswith(STORE_SCHEMES)


def is_path(uri: str) -> bool:
    """Return whether ``uri`` has no scheme and is therefore a path on this machine."""
    return ":" not in uri.split("/")[0]
