"""The names of entities that a command line declares: the API accepts them, and stores of earlier releases go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource
from mlflow_llm.serving.endpoints.rows import decode_config
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.canary import Canary
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Actor, Store
from mlflow_llm.serving.metering.accounts.prices import price_names
from mlflow_llm.serving.metering.store.tables import endpoint_configs, endpoints

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("configs_named_by_uri.json").read_bytes())
"""Configs that the release before wrote, in which the name of a declared entity is its URI."""
GUARDRAILS = {"input": {"invalid_keywords": ["secret"]}}
DECLARED = {
    "alias": {"entity": "models:/assistant@champion", "uri": "models:/assistant/7", "follow_alias": True},
    "version": {"entity": "models:/assistant/7", "uri": "models:/assistant/7"},
    "directory": {"entity": "/srv/models/smol lm.v2"},
    "hub id": {"entity": "org/tiny-chat"},
    "named": {"entity": "model-1"},
}
LABELS = {
    "alias": "assistant-champion", "version": "assistant-7", "directory": "smol-lm.v2", "hub id": "tiny-chat",
    "named": "model-1",
}  # fmt: skip


def bundle(digit: str = "7") -> Bundle:
    return Bundle(content_hash=digit * 64, tasks=("chat",), model_dir="/m", tokenizer_dir="/t")


def declared(kind: str, **more: Any) -> EndpointConfig:
    """Return the config that a command line declares today."""
    fields = DECLARED[kind] | ({"canary": Canary()} if kind == "alias" else {}) | more
    return config_of(EndpointSpec(name="chat", bundle=bundle(), **fields))


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def served(store: Store) -> EndpointStore:
    def locate(entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
        return tuple(ModelSource(uri=one.uri.replace("@champion", "/7"), bundle=bundle()) for one in entities)

    return EndpointStore(store, locate=locate)


def old_store(store: Store, served: EndpointStore, kind: str, old: str = "") -> None:
    """Have ``store`` hold the config that the release before has declared."""
    served.mark_ready("chat", served.declare("chat", declared(kind)))
    text = json.dumps(OLD[old or kind])
    store.write(lambda connection: connection.execute(sa.update(endpoint_configs).values(config=text)))
    store.write(lambda connection: connection.execute(sa.update(endpoints).values(declared=json.dumps(OLD[kind]))))


def sent_back(served: EndpointStore) -> dict[str, Any]:
    """Return the config as a client sends it back that changes one thing."""
    config = served.get("chat")["config"]
    shown = ("resolved_name", "resolved_version", "content_hash", "request_defaults", "state", "scale_to_zero_enabled")
    entities = [{key: one[key] for key in one if key not in shown} for one in config["served_entities"]]
    return {"served_entities": entities, "traffic_config": config["traffic_config"]}


@pytest.mark.parametrize("kind", ["alias", "version", "directory", "hub id"])
def test_an_update_may_keep_what_a_command_line_declared(served: EndpointStore, kind: str) -> None:
    """The API takes the config that it shows, with guardrails; names, core and other names of the price stay."""
    served.mark_ready("chat", served.declare("chat", declared(kind, core="tests.core:Core")))
    served.update_config("chat", sent_back(served) | {"guardrails": GUARDRAILS}, by=Actor(name="ann", via="http"))
    served.mark_ready("chat", 2)
    found = served.get("chat")
    (entity,) = served.config("chat", 2).served_entities
    assert found["config"]["guardrails"]["input"]["invalid_keywords"] == ["secret"]
    assert (entity.name, entity.asked) == (LABELS[kind], DECLARED[kind]["entity"])
    assert entity.model.core == "tests.core:Core"
    assert DECLARED[kind]["entity"] in price_names(entity.name, entity.identity, "chat")
    assert served.declare("chat", declared(kind)) == 2  # what an operator set stays, until it is given back
    assert found["config_origin"] == "api"
    assert served.give_back("chat")["pending_config_origin"] == "command_line"


def test_an_update_keeps_request_fields_of_the_command_line(served: EndpointStore) -> None:
    """Fields of ``-D`` are shown as the entity's, so that a client that sends the config back keeps them; those that
    came with the model stay the model's."""
    given = {"temperature": 0.2}
    served.mark_ready(
        "chat", served.declare("chat", declared("version", defaults={"top_k": 5, **given}, given_defaults=given))
    )
    served.update_config("chat", sent_back(served) | {"guardrails": GUARDRAILS})
    (entity,) = served.config("chat", 2).served_entities
    assert entity.defaults == given


def test_another_model_has_another_name_in_prices(served: EndpointStore) -> None:
    """A version that an operator puts in place of an alias has no price by the alias."""
    served.mark_ready("chat", served.declare("chat", declared("alias")))
    served.update_config("chat", {"served_entities": [{"entity_name": "assistant", "entity_version": "8"}]})
    (entity,) = served.config("chat", 2).served_entities
    assert (entity.name, entity.asked) == ("assistant-8", "")


def test_the_api_names_no_model_of_a_hub_that_no_command_line_declared(served: EndpointStore) -> None:
    """A hub id is for command lines: an update may keep the one of its endpoint, and name no other."""
    body = {"served_entities": [{"name": "a", "entity_name": "org/tiny-chat"}]}
    with pytest.raises(InvalidField, match=r"config\.served_entities\[0\]\.entity_name: 'org/tiny-chat'"):
        served.create({"name": "other", "config": body})
    served.mark_ready("chat", served.declare("chat", declared("version")))
    with pytest.raises(InvalidField, match=r"served_entities\[0\]\.entity_name"):
        served.update_config("chat", body)
    served.mark_ready("chat", served.declare("chat", declared("hub id")))
    for other in ("org/other", "org/tiny-chat/more", "tiny-chat:latest"):
        entity = {"name": "a", "entity_name": other}
        with pytest.raises(InvalidField, match=r"served_entities\[0\]\.entity_name"):
            served.update_config("chat", {"served_entities": [entity]})
    assert served.update_config("chat", body)["pending_config"]["served_entities"][0]["name"] == "a"


def test_a_directory_is_shown_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API takes no other path; what was asked for stays a name of the price."""
    monkeypatch.chdir(tmp_path)
    Path("tiny chat").mkdir()
    (entity,) = config_of(EndpointSpec(name="chat", bundle=bundle(), entity="./tiny chat")).served_entities
    assert (entity.name, entity.entity_name, entity.asked) == ("tiny-chat", f"{tmp_path}/tiny chat", "./tiny chat")


@pytest.mark.parametrize("kind", LABELS)
def test_a_store_of_the_release_before_goes_on(store: Store, served: EndpointStore, kind: str) -> None:
    """A start with the same command line is no update; entity, split and prices are those of before, newly named."""
    old_store(store, served, kind)
    assert served.declare("chat", declared(kind)) == 1
    config = served.config("chat", 1)
    (entity,) = config.served_entities
    old_name = OLD[kind]["served_entities"][0]["name"]
    assert (entity.name, config.share(entity.name)) == (LABELS[kind], 100)
    assert old_name in price_names(entity.name, entity.identity, "chat")
    shown = served.get("chat")["config"]
    assert [one["name"] for one in shown["served_entities"]] == [LABELS[kind]]
    assert "asked" not in shown["served_entities"][0]
    assert [one["config"]["served_entities"][0]["name"] for one in served.history("chat")["versions"]] == [LABELS[kind]]
    if kind != "named":  # of a spec file, with a name for which there is no model
        served.update_config("chat", sent_back(served) | {"guardrails": GUARDRAILS})
        served.mark_ready("chat", 2)
        assert served.config("chat", 2).served_entities[0].asked == old_name
        assert served.give_back("chat")["pending_config"]["served_entities"][0]["name"] == LABELS[kind]


def test_a_relative_path_of_the_release_before_is_declared_once_more(
    store: Store, served: EndpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named no place, and becomes the whole path; after that, a start is no update."""
    monkeypatch.chdir(tmp_path)
    Path("tiny-chat").mkdir()
    now = config_of(EndpointSpec(name="chat", bundle=bundle(), entity="./tiny-chat"))
    old_store(store, served, "directory", "relative")
    assert served.config("chat", 1).served_entities[0].name == "tiny-chat"
    assert [served.declare("chat", now) for _ in range(2)] == [2, 2]


def test_a_canary_of_the_release_before_goes_on(store: Store, served: EndpointStore) -> None:
    """It has its original's new name in its own, keeps its share, and an update ends it."""
    old_store(store, served, "alias", "canary")
    config = served.config("chat", 1)
    assert config.canary is not None
    base, number = config.canary.name.split("~")
    assert (base, number, config.canary.canary_of) == ("assistant-champion", "2-3fa0", "assistant-champion")
    assert [config.share(one.name) for one in config.served_entities] == [90, 10]
    names = price_names(config.canary.name, config.canary.identity, "chat")
    assert names[:3] == (config.canary.name, "assistant-champion", "models:/assistant@champion")
    assert served.declare("chat", declared("alias")) == 1
    served.update_config("chat", sent_back(served) | {"guardrails": GUARDRAILS})
    after = served.config("chat", 2)
    assert (len(after.served_entities), after.share("assistant-champion")) == (1, 100)


def test_a_name_that_somebody_gave_stays_as_it_is() -> None:
    """Only URIs, paths and hub ids become labels, in whatever the API has stored."""
    entity = OLD["named"]["served_entities"][0]
    for name in ("v1_", "a.b-", "x" * 63):
        routes = [{"served_model_name": name, "traffic_percentage": 100}]
        text = json.dumps(OLD["named"] | {"served_entities": [entity | {"name": name}], "routes": routes})
        assert decode_config(text) == msgspec.json.decode(text, type=EndpointConfig)
