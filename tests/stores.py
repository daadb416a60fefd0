"""MLflow stores for a test, with all settings restored afterwards.

MLflow has no call that forgets a URI which was set, so its private names are reset here."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import mlflow
import sqlalchemy as sa
from mlflow.store.db import utils as db
from mlflow.tracking import fluent
from mlflow.tracking._model_registry import utils as registry
from mlflow.tracking._tracking_service import utils as tracking
from sqlalchemy.orm import configure_mappers

VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID")


@contextlib.contextmanager
def own_stores(uri: str) -> Iterator[None]:
    """Set tracking and registry to ``uri``; an experiment set there is reset afterwards.

    ``mlflow.set_tracking_uri`` and ``set_registry_uri`` pin what they are given, in the process and in its
    environment. To give them back what the getters said before would pin what was a mere default: the registry, which
    follows the tracking store, would stay where it was for all tests that come later.
    """
    kept = {name: os.environ.get(name) for name in VARIABLES}
    pinned = tracking._tracking_uri, registry._registry_uri, fluent._active_experiment_id
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
    registry._registry_uri = fluent._active_experiment_id = None
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(pinned[0])
        registry._registry_uri, fluent._active_experiment_id = pinned[1:]
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _tables() -> bytes:
    """Return an SQLite file with MLflow's tables and nothing in them."""
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SQLAlchemy's of what MLflow uses of it, said once a process
        configure_mappers()
        file = Path(root, "mlflow.db")
        engine = sa.create_engine(f"sqlite:///{file}", poolclass=sa.NullPool)
        db._initialize_tables(engine)
        engine.dispose()
        return file.read_bytes()


def empty_store(root: Path, name: str = "mlflow.db") -> str:
    """Return the URI of a new empty store in ``root``; its migrations, a second of CPU time, run once a test
    process."""
    file = root / name
    if root.is_dir() and not file.exists():
        file.write_bytes(_tables())
    return f"sqlite:///{file}"


@contextlib.contextmanager
def own_registry(root: Path) -> Iterator[str]:
    """Put tracking, registry and artifacts into ``root`` and yield their URI."""
    uri = empty_store(root)
    with own_stores(uri):
        mlflow.create_experiment("tests", artifact_location=str(root / "artifacts"))
        mlflow.set_experiment("tests")
        yield uri
