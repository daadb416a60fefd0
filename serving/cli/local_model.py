"""A model of this machine with the interface that ``chat`` uses of a server; its engine is a notebook's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mlflow_llm.flavors.llm.predict.pyfunc import PyfuncModel


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
        click.echo(f"loading {uri}", err=True)
        from mlflow.exceptions import MlflowException

        from mlflow_llm.flavors import llm
        from mlflow_llm.flavors.llm.load.model_cache import logged_root

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        try:
            model = llm._load_pyfunc(str(logged_root(uri)), overrides or None)
        except (MlflowException, ValueError) as error:
            raise click.ClickException(str(getattr(error, "message", error))) from None
        try:
            yield cls(model, name_of(uri))
        finally:
            model.close()

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer to ``/v1/models``: the base as ``name``, each adapter as ``name:adapter``."""
        adapters = self._model.session.adapter_names()
        return {"data": [{"id": self._name}, *({"id": f"{self._name}:{name}"} for name in adapters)]}

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
