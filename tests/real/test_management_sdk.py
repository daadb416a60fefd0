"""Databricks' SDK and MLflow's Databricks client as managers of a server's endpoints, with real weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from llm_server import WARNINGS_OF_CLIENTS, served
from stores import own_registry

from mlflow_llm.flavors import llm

pytestmark = WARNINGS_OF_CLIENTS
QUESTION = "What is the capital of France?"
LIMIT = timedelta(seconds=600)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, minilm_dir: Path) -> Iterator[str]:
    """Register two versions of ``assistant`` (the second is "champion") and one of ``embedder``."""
    import mlflow

    with own_registry(tmp_path_factory.mktemp("registry")) as uri:
        for settings in ({"max_model_len": 256}, {"max_model_len": 512}):
            with mlflow.start_run():
                llm.log_model(
                    smollm2_dir, name="model", model_config=settings, registered_model_name="assistant", link_files=True
                )
        with mlflow.start_run():
            llm.log_model(minilm_dir, name="model", registered_model_name="embedder", link_files=True)
        mlflow.MlflowClient().set_registered_model_alias("assistant", "champion", "2")
        yield uri


@pytest.fixture(scope="module")
def workspace(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve without a model and with a database: what a platform engineer starts first."""
    root = tmp_path_factory.mktemp("workspace")
    with served(
        root,
        "--database",
        f"sqlite:///{root / 'serving.db'}",
        "-C",
        "idle_timeout=0.5",
        MLFLOW_TRACKING_URI=registry,
        XDG_STATE_HOME=str(root),
    ) as url:
        yield url


def test_life_of_an_endpoint_by_databricks_sdk(workspace: str) -> None:
    """databricks-sdk creates, gets, lists, queries, updates, tags, limits and deletes an endpoint, and shows
    refusals."""
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.errors import DatabricksError, NotFound
    from databricks.sdk.service import serving as api

    endpoints = WorkspaceClient(host=workspace, token="token").serving_endpoints
    first = api.ServedEntityInput(entity_name="assistant", entity_version="1", name="one")
    made = endpoints.create_and_wait(
        "chat", config=api.EndpointCoreConfigInput(name="chat", served_entities=[first]), timeout=LIMIT
    )
    assert made.state.ready is api.EndpointStateReady.READY
    assert made.config.served_entities[0].entity_version == "1"
    message = api.ChatMessage(role=api.ChatMessageRole.USER, content=QUESTION)
    answer = endpoints.query("chat", messages=[message], max_tokens=16, temperature=0.0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.served_model_name == "one"

    second = api.ServedEntityInput(entity_name="assistant", entity_version="@champion", name="two")
    split = api.TrafficConfig(
        routes=[
            api.Route(served_model_name="one", traffic_percentage=0),
            api.Route(served_model_name="two", traffic_percentage=100),
        ]
    )
    updated = endpoints.update_config_and_wait(
        "chat", served_entities=[first, second], traffic_config=split, timeout=LIMIT
    )
    assert updated.state.config_update is api.EndpointStateConfigUpdate.NOT_UPDATING
    assert [entity.name for entity in updated.config.served_entities] == ["one", "two"]
    answer = endpoints.query("chat", messages=[message], max_tokens=16, temperature=0.0)
    assert ("Paris" in answer.choices[0].message.content, answer.served_model_name) == (True, "two")

    assert endpoints.patch("chat", add_tags=[api.EndpointTag(key="team", value="a")]).tags[0].value == "a"
    limit = api.RateLimit(calls=1000, renewal_period=api.RateLimitRenewalPeriod.MINUTE)
    assert endpoints.put("chat", rate_limits=[limit]).rate_limits[0].calls == 1000
    assert [(found.name, found.tags[0].key) for found in endpoints.list()] == [("chat", "team")]
    assert endpoints.get("chat").config.traffic_config.routes[1].traffic_percentage == 100

    mixed = [second, api.ServedEntityInput(entity_name="embedder", entity_version="1", name="three")]
    routes = [api.Route(served_model_name=name, traffic_percentage=50) for name in ("two", "three")]
    with pytest.raises(DatabricksError, match="same tasks"):
        endpoints.update_config("chat", served_entities=mixed, traffic_config=api.TrafficConfig(routes=routes))
    with pytest.raises(NotFound, match="nobody"):
        endpoints.create(
            "other",
            config=api.EndpointCoreConfigInput(
                name="other", served_entities=[api.ServedEntityInput(entity_name="nobody", entity_version="1")]
            ),
        )
    endpoints.delete("chat")
    with pytest.raises(NotFound):
        endpoints.get("chat")
    assert list(endpoints.list()) == []


def test_life_of_an_endpoint_by_mlflow(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's Databricks client creates, queries once ready, gets, lists, tags and deletes an endpoint."""
    from mlflow.deployments import get_deploy_client

    monkeypatch.setenv("DATABRICKS_HOST", workspace)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    client = get_deploy_client("databricks")
    entity = {"name": "minilm", "entity_name": "embedder", "entity_version": "1"}
    client.create_endpoint(config={"name": "vectors", "config": {"served_entities": [entity]}})
    until = time.monotonic() + 240
    while client.get_endpoint("vectors")["state"]["config_update"] == "IN_PROGRESS":
        assert time.monotonic() < until
        time.sleep(0.2)
    assert client.get_endpoint("vectors")["state"]["ready"] == "READY"
    assert len(client.predict(endpoint="vectors", inputs={"input": ["a", "b"]})["data"]) == 2
    client.update_endpoint_tags("vectors", {"add_tags": [{"key": "team", "value": "b"}]})
    assert [found["name"] for found in client.list_endpoints()] == ["vectors"]
    client.delete_endpoint("vectors")
    assert client.list_endpoints() == []
