"""Versions of a registered model and the alias that is moved among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ...interface.errors import PackagingError
from ...model_files.model_uri import RegisteredModel, parse

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An alias of a registered model, the version that it names (None if it names none yet), and the candidate."""

    name: str
    alias: str
    current: str | None
    candidate: str

    @property
    def text(self) -> str:
        before = "nothing" if self.current is None else self.current
        return f"{self.name}@{self.alias}: {before} → {self.candidate}"


def uri_of(name: str, version: str) -> str:
    return RegisteredModel(name=name, version=version).uri


def move_of(uri: str, alias: str) -> Move:
    """Return the move of ``alias`` to the version at ``uri``. Raises ``ClickException``."""
    from mlflow import MlflowClient

    from mlflow_llm.flavors.llm.model.model_registry import pinned

    named = parse(uri)
    if named is None or (named.version is None and named.alias is None):
        raise click.UsageError(f"{uri}: expected a version of a registered model, models:/NAME/VERSION")
    try:
        candidate = parse(pinned(uri))
    except PackagingError as error:
        raise click.ClickException(str(error)) from None
    assert candidate is not None
    assert candidate.version is not None
    current = version_of_alias(MlflowClient(), candidate.name, alias)
    return Move(name=candidate.name, alias=alias, current=current, candidate=candidate.version)


def check_version(name: str, version: str) -> None:
    """Raise ``ClickException`` for a version that is not there."""
    from mlflow_llm.flavors.llm.model.model_registry import pinned

    try:
        pinned(uri_of(name, version))
    except PackagingError as error:
        raise click.ClickException(str(error)) from None


def version_of_alias(client: MlflowClient, name: str, alias: str) -> str | None:
    """Return the version that an alias names, or None."""
    found = dict(client.get_registered_model(name).aliases or {}).get(alias)
    return None if found is None else str(found)


def move(planned: Move) -> None:
    """Move the alias. Raises ``ClickException`` if it no longer names what the candidate was compared with, or if the
    registry refuses."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    try:
        now = version_of_alias(client, planned.name, planned.alias)
        if now != planned.current:
            moved = f"{planned.name}@{planned.alias} was moved to {now or 'nothing'} meanwhile"
            raise click.ClickException(f"{moved}; the candidate was compared with {planned.current or 'nothing'}")
        client.set_registered_model_alias(planned.name, planned.alias, planned.candidate)
    except MlflowException as error:
        raise click.ClickException(f"{planned.name}@{planned.alias}: {error.message}") from None
