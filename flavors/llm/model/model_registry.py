"""MLflow's model registry: pin ``models:/`` URIs to a version, and suggest the nearest names for an unknown model.

Reading never creates a store: the first read of MLflow's default, ``sqlite:///mlflow.db``, would create it in the
working directory, and every later one would find an empty registry instead of none.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ....serving.interface.errors import ModelNotFound, PackagingError, without_password
from ....serving.model_files import model_uri
from ....serving.model_files.model_uri import LATEST, RegisteredModel

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_NAMES_COMPARED = 1000  # registered models compared with a misspelt name
MAX_SHOWN = 5
CONNECT_SECONDS = 5.0
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}


def pinned(uri: str) -> str:
    """Pin ``uri`` to a version: ``models:/name@alias`` and ``models:/name/latest`` → ``models:/name/7``.

    A stage (``models:/name/Production``) is pinned to the latest version in it, as MLflow does. Any other URI is
    returned unchanged. Raises ``ModelNotFound``, with the nearest names, versions and aliases.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    check_store_exists(uri)
    named = model_uri.parse(uri)
    if named is None:
        return uri
    client = MlflowClient()
    try:
        return RegisteredModel(name=named.name, version=_version(client, named)).uri
    except (MlflowException, ValueError) as error:
        code = getattr(error, "error_code", "")
        if code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND", ""):
            raise
        raise ModelNotFound(_nearest(client, uri, named)) from None


def logged_model_id(uri: str) -> str | None:
    """Return the id of the logged model at a ``models:/`` URI of a version or of an id; None if MLflow has none.

    MLflow's own database leaves ``model_id`` of a version empty, and keeps the id in its source. Raises
    ``MlflowException``.
    """
    from mlflow import MlflowClient

    named = model_uri.parse(uri)
    if named is not None:
        found = MlflowClient().get_model_version(named.name, str(named.version))
        if found.model_id:
            return str(found.model_id)
        uri = found.source or ""
    name = uri.removeprefix("models:").strip("/")
    return name if model_uri.LOGGED_MODEL.fullmatch(name) else None


def check_store_exists(uri: str) -> None:
    """Raise ``ModelNotFound`` if MLflow would look ``uri`` up in a local file or folder that does not exist.

    Raises ``PackagingError`` if it would ask a server to which no connection can be made: MLflow's own client tries
    again for minutes before it says so.
    """
    import mlflow

    if model_uri.in_store(uri):
        check_store(uri, mlflow.get_registry_uri() if uri.startswith("models:") else mlflow.get_tracking_uri())


def check_store(what: str, store: str) -> None:
    """Raise what ``check_store_exists`` raises about ``store``; ``what`` is to be looked up in it."""
    path = _local_path(store)
    if path is not None and not os.path.exists(path):
        raise ModelNotFound(
            f"{what}: there is no MLflow store at {without_password(store)}; name yours with MLFLOW_TRACKING_URI"
        )
    if (why := why_unreachable(store)) is not None:
        raise PackagingError(
            f"{what}: no MLflow server answers at {without_password(store)} ({why}); is MLFLOW_TRACKING_URI right?"
        )


def why_unreachable(store: str) -> str | None:
    """Return why no connection can be made to the host of ``store``; None if one can, or if it is reached otherwise."""
    parts = urlsplit(store)
    kind = parts.scheme.partition("+")[0]  # postgresql+psycopg
    if kind not in PORTS or not parts.hostname:
        return None
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return None
    try:
        port = parts.port or PORTS[kind]
        socket.create_connection((parts.hostname, port), timeout=CONNECT_SECONDS).close()
    except ValueError:
        return "its port is not a number"
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def not_found_in_store(uri: str, reason: str) -> ModelNotFound:
    """Return the error for ``uri``, naming the store whose client failed with ``reason``."""
    import mlflow

    store = mlflow.get_registry_uri() if uri.startswith("models:") else mlflow.get_tracking_uri()
    where = f" (looked for in {without_password(store)})" if model_uri.in_store(uri) else ""
    return ModelNotFound(f"{uri} cannot be fetched: {reason}{where}")


def _version(client: MlflowClient, named: RegisteredModel) -> str:
    if named.alias is not None:
        return str(client.get_model_version_by_alias(named.name, named.alias).version)
    if named.version is None:
        raise ValueError(named.version)
    if named.version.isdecimal():
        return str(client.get_model_version(named.name, named.version).version)
    stage = named.version.lower()
    return str(max(_versions(client, named.name, None if stage == LATEST else stage)))


def _versions(client: MlflowClient, name: str, stage: str | None = None) -> list[int]:
    """Return the versions of a model, those in ``stage`` (in lower case) if one is given."""
    quoted = name.replace("'", "''")
    found = client.search_model_versions(f"name='{quoted}'")
    return sorted(int(one.version) for one in found if stage is None or (one.current_stage or "").lower() == stage)


def _nearest(client: MlflowClient, uri: str, named: RegisteredModel) -> str:
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
        lacks = "needs a version or an alias"
    elif not named.version.isdecimal():
        lacks = f"has no version in a stage {named.version!r}"
    else:
        lacks = f"has no version {named.version!r}"
    has = f"it has version{'s' * (len(versions) > 1)} {_some(versions)}"
    also = f", and the aliases {_some(f'@{alias} ({v})' for alias, v in sorted(aliases.items()))}" if aliases else ""
    return f"{uri}: {named.name!r} in {store} {lacks}; {has}{also}"


def _near_names(client: MlflowClient, name: str) -> str:
    names = [model.name for model in client.search_registered_models(max_results=MAX_NAMES_COMPARED)]
    if not names:
        return "none is"
    near = difflib.get_close_matches(name, names, n=MAX_SHOWN, cutoff=0.5)
    return f"did you mean {_some(near)}?" if near else f"there are {_some(names)}"


def _some(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - MAX_SHOWN} more" if len(every) > MAX_SHOWN else ""
    return ", ".join(every[:MAX_SHOWN]) + more


def _local_path(store: str) -> str | None:
    """Return the file or folder of a store on this machine; None for a remote or in-memory store."""
    if store.startswith("sqlite:"):
        path = store.partition(":///")[2].partition("?")[0]
        return None if not path or path.startswith((":memory:", "file:")) else path
    if store.startswith("file:"):
        return unquote(urlsplit(store).path)
    return store if "://" not in store and os.sep in store else None
