"""Following an alias as it is asked for: in a spec file, by the options of a command, and what a canary is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from mlflow_llm.serving.cli.endpoints.config_options import changed, new_config, settings_of
from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec
from mlflow_llm.serving.cli.serve.spec_schema import schema
from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.canary import Canary
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering.accounts.prices import price_names
from mlflow_llm.serving.model_files.model_version import ModelVersion

URI = "models:/assistant@champion"
NO_CHANGE: dict[str, Any] = {"models": [], "split": {}, "engine_settings": {}, "defaults": {}}


def test_a_spec_file_follows_an_alias(tmp_path: Path, instant_bundle: Bundle) -> None:
    """Its canary has the API's fields, and the schema of the file describes them."""
    endpoint = EndpointSpec(
        name="a", entity=URI, uri="models:/assistant/1", bundle=instant_bundle, follow_alias=True, canary=Canary()
    )
    file = tmp_path / "serve.json"
    raw = msgspec.to_builtins(ServeSpec(endpoints=(endpoint,)))
    raw["endpoints"][0]["canary"] = {"duration_s": 5, "min_scores": {"quality": 1}}
    file.write_text(json.dumps(raw))
    (read,) = read_serve_spec(str(file)).resolved().endpoints
    (entity,) = config_of(read).served_entities
    assert (entity.follow_alias, entity.canary) == (True, Canary(duration_s=5.0, min_scores={"quality": 1.0}))
    assert "percent of the entity's traffic" in schema("serve")["$defs"]["Canary"]["properties"][
        "traffic_percentage"
    ]["description"]  # fmt: skip
    raw["endpoints"][0]["canary"] = {"traffic_percentage": 0}
    file.write_text(json.dumps(raw))
    with pytest.raises(click.ClickException, match=r"endpoints\[0\].canary.traffic_percentage: 0"):
        read_serve_spec(str(file))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"entity": "models:/assistant/1", "follow_alias": True}, "follow_alias"),
        ({"follow_alias": True, "addresses": ("tcp://a:1",)}, "follow_alias"),
        ({"canary": Canary()}, "canary"),
        ({"follow_alias": True, "canary": Canary(), "max_provisioned_throughput": 5}, "canary"),
    ],
)
def test_an_endpoint_that_cannot_follow_is_refused(instant_bundle: Bundle, fields: dict[str, Any], named: str) -> None:
    """With the path of its field in the file."""
    endpoint = EndpointSpec(**({"name": "a", "entity": URI, "bundle": instant_bundle} | fields))
    with pytest.raises(InvalidField) as refused:
        ServeSpec(endpoints=(endpoint,)).resolved()
    assert refused.value.param == f"endpoints[0].{named}"


def test_the_options_of_a_command() -> None:
    """An update sends the settings that it does not change, and no canary: its traffic goes back."""
    entity = {"name": "main", "entity_name": "assistant", "entity_version": "@champion"}
    changes = NO_CHANGE | {
        "models": [entity],
        "follow_alias": True,
        "canary": settings_of("--canary", '{"duration_s": 5}'),
    }
    asked = {"follow_alias": True, "canary": {"duration_s": 5}}
    assert new_config(changes)["served_entities"] == [entity | asked]
    canary = {"name": "main~2-3fa0", "entity_name": "assistant", "entity_version": "2", "canary_of": "main"}
    routes = [
        {"served_model_name": "main", "traffic_percentage": 90},
        {"served_model_name": "main~2-3fa0", "traffic_percentage": 10},
    ]
    shown = {"served_entities": [entity | asked, canary], "traffic_config": {"routes": routes}}
    found = changed(shown, NO_CHANGE | {"sticky": True})
    assert found["served_entities"] == [entity | asked]
    assert found["traffic_config"] == {
        "routes": [{"served_model_name": "main", "traffic_percentage": 100}],
        "sticky": True,
    }
    assert changed(shown, NO_CHANGE | {"canary": None})["served_entities"][0]["canary"] is None
    with pytest.raises(click.UsageError, match="--canary 5: expected on, off, or a JSON object"):
        settings_of("--canary", "5")


def test_a_canary_pays_the_price_of_its_original() -> None:
    """Unless it has one of its own, and before the price of the version and of the model."""
    names = price_names("main~2-3fa0", ModelVersion(name="assistant", version="2"), "chat")
    assert names == ("main~2-3fa0", "main", "assistant/2", "assistant", "chat")
