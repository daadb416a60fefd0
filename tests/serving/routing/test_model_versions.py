"""A version in a path names the served entity whose model has it in the registry."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import NotFound
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.model_files.model_uri import version_of
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoint, ServedEndpoints, ServedEntity
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.testing.instant_engine import InstantEngine


@pytest.fixture
def endpoints(instant_bundle: Bundle, instant_text: TextModel) -> ServedEndpoints:
    """Return endpoints where ``chat`` has version 3 as the entity old and version 4 as the entity new."""
    engine = InstantEngine(instant_bundle, EngineSettings(max_model_len=256))

    def entity(name: str, version: str) -> ServedEntity:
        view = EndpointView(
            name="chat", info=engine.info, text=instant_text, adapters=("pirate",), names=(name,), version=version
        )
        return ServedEntity(endpoint="chat", entity=name, view=view, engine=engine)

    found = ServedEndpoints()
    found.replace((ServedEndpoint(name="chat", entities={"old": entity("old", "3"), "new": entity("new", "4")}),))
    return found


def test_a_version_chooses_the_entity(endpoints: ServedEndpoints) -> None:
    """A version selects the entity of an endpoint or of an adapter; an unknown version or another entity's is not
    found.
    """
    assert [endpoints.route("chat", version=v)[0].entity for v in ("3", "4")] == ["old", "new"]
    assert endpoints.find("chat:pirate", "4") == (endpoints.route("new")[0], "pirate")
    assert endpoints.route("new", version="4")[0].entity == "new"
    for called, version in (("new", "3"), ("chat", "5"), ("chat", "old")):
        with pytest.raises(NotFound, match="version"):
            endpoints.route(called, version=version)


@pytest.mark.parametrize(
    ("uri", "version"),
    [("models:/a/3", "3"), ("models:/a@b", "b"), ("models:/a/latest", "latest"), ("models:/a", "1"), ("/srv/a", "1")],
)
def test_the_version_of_a_uri(uri: str, version: str) -> None:
    """The version of a URI is the registry's version or alias, and 1 outside a registry."""
    assert version_of(uri) == version
