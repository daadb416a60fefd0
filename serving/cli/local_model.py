"""A model of this machine with the interface that ``chat`` uses of a server; its engine is a notebook's."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..model_files.model_uri import in_store
from ..system.step_line import StepLine, drawn
from .model_names import located, named_version

if TYPE_CHECKING:
    from mlflow_llm.flavors.llm.predict.pyfunc import PyfuncModel
    from mlflow_llm.flavors.llm.predict.session import Session


class LocalModel:
    """A loaded model, made by ``loaded``. Every method raises ``ClickException``."""

    def __init__(self, model: PyfuncModel, name: str) -> None:
        self._model = model
        self._name = name

    @classmethod
    @contextlib.contextmanager
    def loaded(cls, uri: str, config: tuple[str, ...]) -> Iterator[LocalModel]:
        """Yield the model at ``uri``, logged or not yet. Raises ``ClickException``; ``UsageError`` for ``config``."""
        from .model_options import engine_overrides, name_of

        overrides = engine_overrides(config, here=True)
        uri = located(uri)
        line = StepLine()
        line.show(f"loading {uri}")
        from mlflow.exceptions import MlflowException

        from mlflow_llm.flavors import llm
        from mlflow_llm.flavors.llm.load.model_cache import logged
        from mlflow_llm.flavors.llm.model.fetch import local_root
        from mlflow_llm.flavors.llm.model.model_registry import pinned

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        try:
            root = logged(uri)
            if root is None:
                fixed = pinned(uri) if in_store(uri) else uri
                if version := named_version(uri, fixed):
                    line.clear()
                    click.echo(version, err=True)
                root = local_root(fixed)
            model = llm._load_pyfunc(str(root), overrides or None)
        except (MlflowException, ValueError) as error:
            raise click.ClickException(str(getattr(error, "message", error))) from None
        finally:
            line.clear()
        try:
            _start(model.session, line)
            yield cls(model, name_of(uri))
        finally:
            model.close()

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer to ``/v1/models``: the base as ``name``, each adapter as ``name:adapter``."""
        session = self._model.session
        own = {"sampling_defaults": session.own_sampling()}
        names = (self._name, *(f"{self._name}:{adapter}" for adapter in session.adapter_names()))
        return {"data": [{"id": name} | own for name in names]}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from mlflow.exceptions import MlflowException

        fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        try:
            yield from self._model.predict_stream(fields)
        except MlflowException as error:
            raise click.ClickException(error.message) from None

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        yield


def _start(session: Session, line: StepLine) -> None:
    """Start the engine of a loaded model, and show the steps of that. Raises ``ClickException``."""
    from ..interface.errors import PackagingError, ServingError
    from ..transport.discovery.state_directory import StateDirectory, default_runtime_dir

    state = StateDirectory(default_runtime_dir(), session.engine_key)

    def draw() -> None:
        if (step := state.read_step()) is not None:
            line.show(step.name, step.done, step.total)

    began = time.monotonic()
    try:
        with drawn(line, "starting the engine", draw):
            session.connect()
    except (PackagingError, ServingError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"ready after {time.monotonic() - began:.1f} s", err=True)
