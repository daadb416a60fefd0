"""Adapters that are given by a URI of MLflow, fetched, and the runs that trained them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import DatasetInput
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from msgspec import Struct

from ....serving.interface.errors import PackagingError, reason, shown
from ....serving.model_files import model_uri
from ..model import fetch, model_registry
from ..model import manifest as manifests
from ..model.names import FLAVOR_NAME, MLMODEL
from ..model.stored_facts import Lineage, stored_facts
from .adapters import CONFIG
from .peft_split import adapter_names, has_adapters
from .training_runs import training_runs

PEFT = "peft"  # where mlflow.transformers keeps an adapter


class Adapters(Struct, frozen=True, kw_only=True):
    """Adapters by name, each a ``PeftModel`` or a local directory, and the lineage of those for which it is known."""

    given: dict[str, Any] | None
    lineages: dict[str, Lineage] = {}


def fetch_adapters(
    given: Any, runs: Mapping[str, str] | None, scratch: Path, *, model: Any = None, logged_by: Model | None = None
) -> Adapters:
    """Fetch the adapters that ``given`` names by a ``runs:/`` or ``models:/`` URI into ``scratch``.

    ``runs`` has the ids of the runs that trained adapters, by name; a URI says its own, and those of others, also of a
    PeftModel as the ``model``, are looked for if ``logged_by`` is a model that is being logged. Raises
    ``PackagingError`` for a URI without an adapter, or for a run that does not exist.
    """
    if given is not None and not isinstance(given, dict):
        return Adapters(given=given, lineages=_of_runs(runs))
    found = dict(given or {})
    lineages: dict[str, Lineage] = {}
    for name, source in found.items():
        if isinstance(source, str) and model_uri.in_store(source):
            found[name], lineages[name] = _fetched(str(name), source, scratch)
    if logged_by is not None and logged_by.model_id is not None:
        inside = dict.fromkeys(adapter_names(model), model) if has_adapters(model) else {}
        sources = {name: one for name, one in (inside | found).items() if name not in {*lineages, *(runs or ())}}
        lineages |= {name: _lineage(run_id) for name, run_id in training_runs(sources, logged_by.run_id).items()}
    return Adapters(given=None if given is None else found, lineages=lineages | _of_runs(runs))


def check_runs(runs: Mapping[str, str] | None, adapters: list[str]) -> None:
    """Raise ``PackagingError`` if ``runs`` names an adapter that is not stored in the model."""
    for name in runs or ():
        if name not in adapters:
            known = ", ".join(adapters) or "none"
            raise PackagingError(f"adapter_runs: {shown(name)} is not an adapter of the model; it has {known}")


def datasets_of(run_id: str) -> list[DatasetInput]:
    """Return the datasets that are inputs of a run."""
    inputs = MlflowClient().get_run(run_id).inputs
    return [] if inputs is None else list(inputs.dataset_inputs)


def _of_runs(runs: Any) -> dict[str, Lineage]:
    if runs is None:
        return {}
    if not isinstance(runs, dict) or not all(isinstance(value, str) for pair in runs.items() for value in pair):
        raise PackagingError(f"adapter_runs: {shown(runs)} is not allowed; expected {{adapter: run id}}, or None")
    found = {}
    for name, run_id in runs.items():
        try:
            found[name] = _lineage(run_id)
        except MlflowException as error:
            raise PackagingError(f"adapter_runs: {shown(name)}: {reason(error)}") from None
    return found


def _lineage(run_id: str | None, source: str | None = None) -> Lineage:
    names = [] if run_id is None else [f"{one.dataset.name}@{one.dataset.digest}" for one in datasets_of(run_id)]
    return Lineage(source=source, run_id=run_id, datasets=tuple(names))


def _fetched(name: str, uri: str, scratch: Path) -> tuple[Path, Lineage]:
    """Return the directory and lineage of the adapter at ``uri``. An alias or ``latest`` is recorded as its version."""
    try:
        pinned = model_registry.pinned(uri)
        store = get_artifact_repository(pinned)
        target = None if fetch.is_local(store) else scratch / name
        if target is not None:
            target.mkdir()
        root = Path(store.download_artifacts("", None if target is None else str(target)))
    except PackagingError as error:
        raise type(error)(f"adapters: {name!r}: {error}") from None
    except Exception as error:  # a store's client raises what it likes
        raise PackagingError(f"adapters: {name!r}: {uri} cannot be fetched: {reason(error)}") from None
    folder = _folder(name, root)
    if folder is None:
        raise PackagingError(f"adapters: {name!r}: {uri} holds no {CONFIG}")
    if folder.parent.name == "adapters" and (known := _stored_lineage(root, folder.name)) is not None:
        return folder, known
    try:
        return folder, _lineage(_run_of(pinned), pinned)
    except MlflowException:  # the run was deleted; the adapter is there
        return folder, Lineage(source=pinned)


def _folder(name: str, root: Path) -> Path | None:
    """Return the adapter's directory in a model of this flavor, in one of mlflow.transformers, or in a directory of
    peft."""
    if (root / manifests.MANIFEST).is_file():
        stored = manifests.read(root).adapters
        chosen = name if name in stored else stored[0] if len(stored) == 1 else None
        if chosen is None:
            has = ", ".join(stored) or "none"
            raise PackagingError(f"adapters: {name!r}: the model has no adapter of that name; it has {has}")
        return root / "adapters" / chosen
    return next((folder for folder in (root, root / PEFT) if (folder / CONFIG).is_file()), None)


def _stored_lineage(root: Path, name: str) -> Lineage | None:
    """Return what a model of this flavor says of its adapter, if it knows the run that trained it."""
    facts = stored_facts(Model.load(str(root / MLMODEL)).flavors.get(FLAVOR_NAME, {}))
    adapter = None if facts is None else facts.adapters.get(name)
    return adapter.lineage if adapter is not None and adapter.lineage.run_id is not None else None


def _run_of(uri: str) -> str | None:
    """Return the id of the run that made the artifacts at ``uri``; None if MLflow does not know it."""
    client = MlflowClient()
    if uri.startswith("runs:"):
        return uri.removeprefix("runs:").lstrip("/").partition("/")[0]
    named = model_uri.parse(uri)
    run_id = None if named is None else client.get_model_version(named.name, str(named.version)).run_id
    if run_id or (model_id := model_registry.logged_model_id(uri)) is None:
        return run_id or None
    return client.get_logged_model(model_id).source_run_id or None
