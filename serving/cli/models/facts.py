"""The facts of a logged model, as MLflow's pages show them, from its MLmodel file alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from ..model_names import located

FLAVOR = "llm"


def facts_of(model: str) -> dict[str, str]:
    """Return what a model is, by the names of its params without their prefix. Raises ``ClickException``."""
    from mlflow_llm.flavors.llm.model.stored_facts import stored_facts
    from mlflow_llm.flavors.llm.save.registry_pages import PREFIX, params_of

    uri = located(model)
    flavors = _flavors(uri)
    if FLAVOR not in flavors:
        raise click.ClickException(f"{uri} was not saved by mlflow-llm; its flavors are {', '.join(sorted(flavors))}")
    facts = stored_facts(flavors[FLAVOR])
    if facts is None:
        raise click.ClickException(f"{uri} was saved by an earlier release, which did not store what it is")
    return {name.removeprefix(PREFIX): value for name, value in params_of(flavors[FLAVOR], facts).items()}


def _flavors(uri: str) -> dict[str, Any]:
    """Return the flavors in the MLmodel file at ``uri``. Raises ``ClickException``."""
    from mlflow.models import Model
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    from mlflow_llm.flavors.llm.model.model_registry import pinned
    from mlflow_llm.flavors.llm.model.names import MLMODEL

    path = Path(uri).expanduser()
    try:
        if path.is_dir():
            return dict(Model.load(str(path)).flavors)
        with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
            file = get_artifact_repository(pinned(uri)).download_artifacts(MLMODEL, dst_path=folder)
            return dict(Model.load(file).flavors)
    except Exception as error:  # a store's client raises what it likes
        raise click.ClickException(f"{uri}: {getattr(error, 'message', error)}") from None
