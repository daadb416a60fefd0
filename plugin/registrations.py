"""A model that is registered after it was logged: its version says what the logged model says.

``log_model(registered_model_name=…)`` describes the version that it makes. ``mlflow.register_model`` runs no code of a
flavor, so the class that asks a registry for versions copies the tags and the description of a logged model of this
flavor when MLflow imports it (docs/decisions/0019). Nothing that the caller gives is replaced.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from . import late_import

logger = logging.getLogger(__name__)
REGISTRY = "mlflow.tracking._model_registry.client"
MARK = "llm.content_hash"  # the tag that every logged model of the flavor has
PREFIX = "llm."
ADDED = "describes_llm_versions"  # marks the method that this module has put there
NOTE = "mlflow.note.content"
LOGGED = re.compile(r"models:/(m-[0-9a-f]+)/?")
SERVED_AS = re.compile(r"^mlflow-llm serve -m (\S+)$", re.MULTILINE)


def add_description(module: Any) -> None:
    """Let ``ModelRegistryClient.create_model_version`` describe the version. Without such a method nothing changes."""
    registry = getattr(module, "ModelRegistryClient", None)
    plain = getattr(registry, "create_model_version", None)
    if registry is None or not callable(plain) or hasattr(plain, ADDED):
        return

    @functools.wraps(plain)
    def create_model_version(self: Any, *given: Any, **named: Any) -> Any:
        version = plain(self, *given, **named)
        model = named.get("model_id") or logged_model_of(version.source)
        if model:
            describe(self, version, model)
        return version

    setattr(create_model_version, ADDED, True)
    registry.create_model_version = create_model_version


def logged_model_of(source: str | None) -> str | None:
    """Return the id of the logged model that a version's source names, if it names one."""
    found = LOGGED.fullmatch(source or "")
    return found[1] if found else None


def describe(registry: Any, version: Any, model_id: str) -> None:
    """Copy what a logged model of the flavor says of itself to its new version. A version that cannot take it stays."""
    from mlflow import MlflowClient

    try:
        tags = MlflowClient().get_logged_model(model_id).tags
        if MARK not in tags:
            return
        for key, value in tags.items():
            if key.startswith(PREFIX) and key not in version.tags:
                registry.set_model_version_tag(version.name, version.version, key, value)
        if NOTE in tags and not version.description:
            note = renamed(tags[NOTE], f"models:/{version.name}/{version.version}")
            registry.update_model_version(version.name, version.version, note)
    except Exception as error:  # the version is there, and MLflow's caller is to get it, whatever a store refuses
        logger.warning("%s/%s is registered, but not described: %s", version.name, version.version, error)


def renamed(note: str, uri: str) -> str:
    """Return the description of a logged model with ``uri`` in the lines that serve and load it."""
    found = SERVED_AS.search(note)
    return note if found is None else note.replace(found[1], uri)


def install() -> None:
    """Describe versions from now on, or when MLflow imports the class."""
    late_import.when_imported(REGISTRY, add_description)
