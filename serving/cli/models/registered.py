"""The registered models of our flavor, with their versions, aliases and sizes."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...interface.errors import PackagingError

MAX_MODELS = 200  # of the registry are looked at
MAX_CONCURRENT = 8
FLAVOR = "llm"


class Registered(Struct, frozen=True, kw_only=True):
    """A registered model; ``size`` is that of the files of its latest version, None if they cannot be read."""

    name: str
    latest: str
    versions: int
    aliases: dict[str, str]
    size: int | None
    updated: float


def registered() -> tuple[list[Registered], str]:
    """Return the registered models of our flavor, and why there are none or not all, "" otherwise."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors.llm.model.model_registry import check_store_exists

    try:
        check_store_exists("models:/")
        client = MlflowClient()
        models = client.search_registered_models(max_results=MAX_MODELS)
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            found = [one for one in pool.map(lambda model: _described(client, model), models) if one is not None]
    except (PackagingError, MlflowException) as error:
        return [], str(error).removeprefix("models:/: ")
    more = f"only the first {MAX_MODELS} models of the registry were looked at" if len(models) == MAX_MODELS else ""
    return found, more


def _described(client: Any, model: Any) -> Registered | None:
    """Return a model's description; None for one of another flavor."""
    quoted = model.name.replace("'", "''")
    versions = sorted((int(one.version) for one in client.search_model_versions(f"name='{quoted}'")), reverse=True)
    if not versions:
        return None
    known, size = _latest(f"models:/{model.name}/{versions[0]}")
    if not known:
        return None
    return Registered(
        name=model.name,
        latest=str(versions[0]),
        versions=len(versions),
        aliases={alias: str(version) for alias, version in dict(model.aliases or {}).items()},
        size=size,
        updated=(model.last_updated_timestamp or 0) / 1000,
    )


def _latest(uri: str) -> tuple[bool, int | None]:
    """Return whether a version is of our flavor, and the bytes of its files, from its two small descriptions."""
    from mlflow.models import Model
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    from mlflow_llm.flavors.llm.model.manifest import MANIFEST
    from mlflow_llm.flavors.llm.model.names import MLMODEL

    try:
        store = get_artifact_repository(uri)
        with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
            if FLAVOR not in Model.load(store.download_artifacts(MLMODEL, dst_path=folder)).flavors:
                return False, None
            manifest = msgspec.json.decode(Path(store.download_artifacts(MANIFEST, dst_path=folder)).read_bytes())
            return True, sum(entry["size"] for entry in manifest["files"].values())
    except Exception:  # a store's client raises what it likes; a version whose files are gone is no model of ours
        return False, None
