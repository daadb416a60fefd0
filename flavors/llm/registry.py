"""MLflow's stores as this package reads them: ``models:/`` URIs fixed to a version, and a useful word where nothing is.

Reading never makes a store: MLflow's default, ``sqlite:///mlflow.db``, would be created in the working directory by the
first look into it, and every later look would find an empty registry instead of none.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from ...serving.errors import ModelNotFound, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

IN_A_STORE = ("models:", "runs:")
NAMED = re.compile(r"models:/+(?P<name>[^/@]+)(?:@(?P<alias>.+)|/(?P<version>[^/]+))?")
LOGGED_MODEL = re.compile(r"m-[0-9a-f]{32}")
MOST_NAMES = 1000  # of registered models that are looked at for the nearest name
MOST_SHOWN = 5


class RegisteredName(Struct, frozen=True, kw_only=True):
    """What a ``models:/`` URI says: a name with a version (``latest`` too) or an alias, or with neither."""

    name: str
    version: str | None = None
    alias: str | None = None


def parse(uri: str) -> RegisteredName | None:
    """None for what names no registered model: another scheme, a path, the id of a logged model."""
    found = NAMED.fullmatch(uri)
    if found is None or (LOGGED_MODEL.fullmatch(found["name"]) and not (found["version"] or found["alias"])):
        return None
    return RegisteredName(**found.groupdict())


def fixed(uri: str) -> str:
    """``models:/name@alias`` and ``models:/name/latest`` → ``models:/name/7``; another URI as it is, once it is known
    to be there. Raises ``ModelNotFound`` with the nearest names, versions and aliases."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    must_have_store(uri)
    named = parse(uri)
    if named is None:
        return uri
    client = MlflowClient()
    try:
        return f"models:/{named.name}/{_version(client, named)}"
    except (MlflowException, ValueError) as error:
        code = getattr(error, "error_code", "")
        if code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND", ""):
            raise
        raise ModelNotFound(_nearest(client, uri, named)) from None


def must_have_store(uri: str) -> None:
    """Raises ``ModelNotFound`` where ``uri`` is of a store that is a local file or folder and does not exist."""
    import mlflow

    if not uri.startswith(IN_A_STORE):
        return
    store = mlflow.get_registry_uri() if uri.startswith("models:") else mlflow.get_tracking_uri()
    path = _local_path(store)
    if path is not None and not os.path.exists(path):
        raise ModelNotFound(
            f"{uri}: there is no MLflow store at {without_password(store)}; name yours with MLFLOW_TRACKING_URI"
        )


def not_found_in_store(uri: str, reason: str) -> ModelNotFound:
    """For what a store's client refused: the store is named."""
    import mlflow

    store = mlflow.get_registry_uri() if uri.startswith("models:") else mlflow.get_tracking_uri()
    where = f" (looked for in {without_password(store)})" if uri.startswith(IN_A_STORE) else ""
    return ModelNotFound(f"{uri} cannot be fetched: {reason}{where}")


def _version(client: MlflowClient, named: RegisteredName) -> str:
    if named.alias is not None:
        return str(client.get_model_version_by_alias(named.name, named.alias).version)
    if named.version == "latest":
        return str(max(_versions(client, named.name)))
    if named.version is None or not named.version.isdecimal():
        raise ValueError(named.version)
    return str(client.get_model_version(named.name, named.version).version)


def _versions(client: MlflowClient, name: str) -> list[int]:
    quoted = name.replace("'", "''")
    return sorted(int(found.version) for found in client.search_model_versions(f"name='{quoted}'"))


def _nearest(client: MlflowClient, uri: str, named: RegisteredName) -> str:
    import mlflow
    from mlflow.exceptions import MlflowException

    store = without_password(mlflow.get_registry_uri())
    try:
        model: Any = client.get_registered_model(named.name)
    except MlflowException:
        return f"{uri}: no model {named.name!r} is registered in {store}; {_near_names(client, named.name)}"
    versions = [str(version) for version in reversed(_versions(client, named.name))]
    if not versions:
        return f"{uri}: {named.name!r} in {store} has no version yet; log one with registered_model_name={named.name!r}"
    aliases = dict(model.aliases or {})
    if named.alias is not None:
        lacks = f"has no alias {named.alias!r}"
    elif named.version is None:
        lacks = "has versions, and none is named"
    else:
        lacks = f"has no version {named.version!r}"
    has = f"it has version{'s' * (len(versions) > 1)} {_some(versions)}"
    also = f", and the aliases {_some(f'@{alias} ({v})' for alias, v in sorted(aliases.items()))}" if aliases else ""
    return f"{uri}: {named.name!r} in {store} {lacks}; {has}{also}"


def _near_names(client: MlflowClient, name: str) -> str:
    names = [model.name for model in client.search_registered_models(max_results=MOST_NAMES)]
    if not names:
        return "none is"
    near = difflib.get_close_matches(name, names, n=MOST_SHOWN, cutoff=0.5)
    return f"did you mean {_some(near)}?" if near else f"there are {_some(names)}"


def _some(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - MOST_SHOWN} more" if len(every) > MOST_SHOWN else ""
    return ", ".join(every[:MOST_SHOWN]) + more


def _local_path(store: str) -> str | None:
    """The file or folder of a store on this machine; None for one elsewhere, or in memory."""
    if store.startswith("sqlite:"):
        path = store.partition(":///")[2].partition("?")[0]
        return None if not path or path.startswith((":memory:", "file:")) else path
    if store.startswith("file:"):
        return unquote(urlsplit(store).path)
    return store if "://" not in store and os.sep in store else None
