"""An alias that moves: the version that it stands for is kept, shown, and said when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mlflow_llm.serving.cli.model_options import endpoint_specs
from mlflow_llm.serving.control import mlflow_resolver
from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.control.reconciler import Reconciler
from mlflow_llm.serving.endpoints.config import EndpointConfig, ModelSource, config_to_wire
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Store

URI = "models:/assistant@champion"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions of aliases, by URI; the content of each version differs."""
    found = {URI: "7"}

    def resolve(uris: tuple[str, ...], texts: tuple[str, ...] = (), **_: object) -> tuple[ResolvedModel, ...]:
        return tuple(
            ResolvedModel(
                bundle=Bundle(content_hash=found[uri] * 64, tasks=("chat",), model_dir="/m", tokenizer_dir="/t"),
                uri=f"models:/assistant/{found[uri]}",
            )
            for uri in (*uris, *texts)
        )

    monkeypatch.setattr(mlflow_resolver, "resolve", resolve)
    return found


def declared() -> EndpointConfig:
    """Return the configuration that ``serve -m models:/assistant@champion=chat`` asks for now."""
    (spec,) = endpoint_specs({"chat": URI}, {})
    return config_of(spec)


def test_a_command_line_alias_is_served_by_its_version(registry: dict[str, str]) -> None:
    """The entity is called after the alias, and keeps what was asked for; its model has the version's name."""
    (entity,) = declared().served_entities
    assert (entity.name, entity.asked, entity.entity_version) == ("assistant-champion", URI, "champion")
    assert (entity.model.uri, entity.model.identity.label) == ("models:/assistant/7", "assistant/7")


def test_request_fields_of_a_command_line_are_the_entity_s(registry: dict[str, str]) -> None:
    """The fields of ``-D`` are part of the config, which updates keep; those that came with the model are not."""
    (spec,) = endpoint_specs({"chat": URI}, {}, defaults={"temperature": 0.2})
    (entity,) = config_of(spec).served_entities
    assert entity.defaults == {"temperature": 0.2} == entity.model.defaults


def test_a_configuration_shows_what_was_found(registry: dict[str, str]) -> None:
    """Beside the alias that was asked for."""
    (shown,) = config_to_wire(declared())["served_entities"]
    found = (shown["resolved_name"], shown["resolved_version"], shown["content_hash"])
    assert (shown["entity_version"], found) == ("champion", ("assistant", "7", "7" * 64))


def test_a_start_with_another_version_is_logged(
    registry: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that starts again on its database says which version an alias stood for, and stands for now."""

    def locate(entities: tuple[object, ...]) -> tuple[ModelSource, ...]:
        raise AssertionError("declared endpoints bring their models")

    store = Store(f"sqlite:///{tmp_path / 'serving.db'}")
    endpoints = EndpointStore(store, locate=locate)
    try:
        endpoints.mark_ready("chat", endpoints.declare("chat", declared()))
        for expected in ([], ["endpoint chat, config 2: models:/assistant@champion is assistant/8 888888888888 now; "
                              "it was assistant/7 777777777777"]):  # fmt: skip
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="mlflow_llm.serving.control.reconciler"):
                version = endpoints.declare("chat", declared())
                begin_rollouts(endpoints, tmp_path)
            assert [record.getMessage() for record in caplog.records] == expected
            assert version == (2 if expected else 1)
            registry[URI] = "8"
    finally:
        store.close()


def begin_rollouts(endpoints: EndpointStore, place: Path) -> None:
    """Do what a starting controller process does first with the endpoints of its store."""
    reconciler = Reconciler(endpoints, None, PlanDirectory(place), None, find=lambda entity: entity)  # type: ignore[arg-type]
    try:
        reconciler.begin_rollouts({state.id: state for state in endpoints.states()})
    finally:
        reconciler.close()
