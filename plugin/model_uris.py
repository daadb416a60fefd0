"""URIs of models and stores: made absolute, and checked before a server is started."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow
import sqlalchemy as sa
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from mlflow_llm.flavors.llm.model.fetch import flavors_of
from mlflow_llm.flavors.llm.model.model_registry import pinned
from mlflow_llm.flavors.llm.model.names import FLAVOR_NAME
from mlflow_llm.serving.interface.errors import ModelNotFound, without_password
from mlflow_llm.serving.model_files.model_uri import in_store, is_path


def absolute(uri: Any) -> str:
    """Return ``uri``, made absolute if it is a path. Raises ``MlflowException`` for anything but a string."""
    if not isinstance(uri, str) or not uri:
        raise MlflowException.invalid_parameter_value(
            f"model_uri: {uri!r:.80} is not allowed; expected a model's URI, such as models:/a@champion, or directory"
        )
    if uri.startswith("file:"):
        return os.path.abspath(unquote(urlsplit(uri).path))
    return os.path.abspath(uri) if is_path(uri) else uri


def absolute_store(uri: str) -> str:
    """Return a store's URI with an absolute path, so that it stays valid wherever the server is started again."""
    if uri.startswith("sqlite"):
        return _absolute_sqlite(uri)
    if uri.startswith("file:") or (is_path(uri) and (os.sep in uri or os.path.isdir(uri))):
        return absolute(uri)
    return uri


def _absolute_sqlite(uri: str) -> str:
    try:
        url = sa.make_url(uri)
    except sa.exc.ArgumentError:  # the server will report what is wrong with it
        return uri
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return uri
    return url.set(database=os.path.abspath(url.database)).render_as_string(hide_password=False)


def stores() -> dict[str, str]:
    """Return the caller's tracking and registry URIs, with absolute paths."""
    return {
        "tracking_uri": absolute_store(mlflow.get_tracking_uri()),
        "registry_uri": absolute_store(mlflow.get_registry_uri()),
    }


def check_stores(uri: str, kept: dict[str, str]) -> None:
    """Raise ``MlflowException`` if the server would look for ``uri`` in other stores than the caller would."""
    if not in_store(uri):
        return
    for name, own in stores().items():
        if kept.get(name) and kept[name].rstrip("/") != own.rstrip("/"):
            raise MlflowException.invalid_parameter_value(
                f"{name}: the deployment takes its models from {without_password(kept[name])}, not from "
                f"{without_password(own)}; set that one, or delete the deployment and create it"
            )


def check_flavor(uri: str) -> None:
    """Raise ``MlflowException`` for a model that does not exist or lacks this flavor.

    URIs other than paths and those of MLflow's stores are left to the server.
    """
    if not is_path(uri) and not in_store(uri):
        return
    try:
        flavors = flavors_of(pinned(uri))
    except ModelNotFound as error:
        raise MlflowException(str(error), error_code=RESOURCE_DOES_NOT_EXIST) from None
    except MlflowException:
        raise
    except Exception as error:  # from a store's client, or from parsing a file that is not an MLmodel
        raise MlflowException(f"model_uri: {uri} cannot be read ({type(error).__name__}: {error!s:.200})") from None
    if FLAVOR_NAME not in flavors:
        raise MlflowException.invalid_parameter_value(
            f"model_uri: {uri} was logged with the flavors {', '.join(flavors)}; expected one logged with"
            f" {FLAVOR_NAME!r}"
        )
