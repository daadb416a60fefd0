"""The versions of an endpoint's configuration, and the way back to one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import Conflict, InvalidField, NotFound
from mlflow_llm.serving.metering import Actor, Store

ANNE, BEN = (Actor(name=name, via="http") for name in ("anne", "ben"))


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


class Models:
    """The registry: an alias means a version, and may move."""

    champion = "1"

    def locate(self, entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
        return tuple(map(self._source, entities))

    def _source(self, entity: EntityConfig) -> ModelSource:
        version = self.champion if entity.entity_version == "@champion" else entity.entity_version
        bundle = Bundle(content_hash=f"v{version}", tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
        return ModelSource(uri=f"models:/assistant/{version}", bundle=bundle)


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def endpoints(store: Store, models: Models) -> EndpointStore:
    return EndpointStore(store, locate=models.locate, clock=lambda: 1_800_000_000.0)


def config(version: str) -> dict[str, Any]:
    return {"served_entities": [{"name": "a", "entity_name": "assistant", "entity_version": version}]}


def served(endpoints: EndpointStore, version: int) -> str:
    return endpoints.config("chat", version).served_entities[0].model.bundle.content_hash


def versions(endpoints: EndpointStore) -> list[tuple[Any, ...]]:
    found = endpoints.history("chat")["versions"]
    return [
        (one["config_version"], one["state"], one["creator"], one.get("restores"), one.get("message")) for one in found
    ]


def test_each_version_is_kept_with_its_author(endpoints: EndpointStore) -> None:
    """The history has who made each version, what became of it, and the reason of one that failed."""
    endpoints.create({"name": "chat", "config": config("1")}, by=ANNE)
    endpoints.mark_ready("chat", 1)
    endpoints.update_config("chat", config("2"), by=BEN)
    endpoints.mark_failed("chat", 2, "out of memory")
    endpoints.update_config("chat", config("3"), by=ANNE)
    assert versions(endpoints) == [
        (3, "pending", "anne", None, None),
        (2, "failed", "ben", None, "out of memory"),
        (1, "active", "anne", None, None),
    ]
    newest = endpoints.history("chat")["versions"][0]
    assert newest["creation_timestamp"] == 1_800_000_000_000
    assert newest["config"]["served_entities"][0]["entity_version"] == "3"


def test_a_rollback_is_a_new_version_with_the_old_models(endpoints: EndpointStore, models: Models) -> None:
    """Going back makes a version equal to the one before, with the model that an alias meant then."""
    endpoints.create({"name": "chat", "config": config("@champion")})
    endpoints.mark_ready("chat", 1)
    models.champion = "2"
    endpoints.update_config("chat", config("@champion"))
    endpoints.mark_ready("chat", 2)
    assert served(endpoints, 2) == "v2"
    view = endpoints.roll_back("chat", {}, by=BEN)
    assert view["pending_config"]["config_version"] == 3
    assert served(endpoints, 3) == "v1"
    endpoints.mark_ready("chat", 3)
    assert versions(endpoints)[0] == (3, "active", "ben", 1, None)
    endpoints.roll_back("chat", {"config_version": 2})
    assert served(endpoints, 4) == "v2"


def test_versions_that_cannot_be_restored(endpoints: EndpointStore) -> None:
    """A version that failed, is active or is not there is refused, and so is a rollback during an update."""
    endpoints.create({"name": "chat", "config": config("1")})
    with pytest.raises(Conflict, match="in progress"):
        endpoints.roll_back("chat", {})
    endpoints.mark_ready("chat", 1)
    with pytest.raises(Conflict, match="no version before the present one"):
        endpoints.roll_back("chat", {})
    endpoints.update_config("chat", config("2"))
    endpoints.mark_failed("chat", 2, "out of memory")
    for version in (2, 9):
        with pytest.raises(InvalidField, match="a version that was served: none has been"):
            endpoints.roll_back("chat", {"config_version": version})
    with pytest.raises(Conflict, match="serves version 1 already"):
        endpoints.roll_back("chat", {"config_version": 1})
    with pytest.raises(NotFound):
        endpoints.roll_back("nobody", {})
    with pytest.raises(NotFound):
        endpoints.history("nobody")
    assert len(versions(endpoints)) == 2
