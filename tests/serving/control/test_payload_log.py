"""The setting of a payload log: in a config of the management API, in a spec, and in the options of a command."""

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
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.endpoints.config import EndpointConfig, config_to_wire
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.payload_log import PayloadLog

CONFIG: dict[str, Any] = {"served_entities": [{"name": "m", "entity_name": "m", "entity_version": "1"}]}
NO_CHANGE: dict[str, Any] = {"models": [], "split": {}, "engine_settings": {}, "defaults": {}}


def test_a_config_has_it(instant_bundle: Bundle) -> None:
    """The API takes the setting, shows it with its defaults, and keeps it in the stored config; null and nothing are
    off."""
    config = config_body(CONFIG | {"payload_log": {"sample": 0.5, "redact": ["a+"]}}, "config")
    assert config.payload_log == PayloadLog(sample=0.5, redact=("a+",))
    shown = json.loads(msgspec.json.encode(config_to_wire(config)))["payload_log"]
    assert shown == {"sample": 0.5, "max_rows": 10_000, "max_bytes": 2**26, "max_age": 604_800.0, "redact": ["a+"]}
    assert config_body(CONFIG | {"payload_log": shown}, "config") == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=EndpointConfig) == config
    for off in (CONFIG, CONFIG | {"payload_log": None}):
        assert "payload_log" not in config_to_wire(config_body(off, "config"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"sample": 2}, "config.payload_log.sample"),
        ({"max_rows": "many"}, "config.payload_log.max_rows"),
        ({"redact": ["["]}, r"config.payload_log.redact\[0\]"),
        ({"age": 1}, "config.payload_log.age"),
        (True, "config.payload_log"),
    ],
)
def test_mistakes_in_a_config_are_named(given: object, field: str) -> None:
    """A setting that is wrong is refused with its path."""
    with pytest.raises(InvalidField, match=f"^{field}: "):
        config_body(CONFIG | {"payload_log": given}, "config")


def test_a_spec_has_it(instant_bundle: Bundle, tmp_path: Path) -> None:
    """An endpoint of a spec file may log, if the server has a database; the file's schema describes the settings."""
    endpoint = EndpointSpec(name="a", entity="/m", bundle=instant_bundle, payload_log=PayloadLog(max_rows=3))
    assert config_of(endpoint).payload_log == PayloadLog(max_rows=3)
    with pytest.raises(InvalidField, match=r"endpoints\[0\].payload_log.*--database"):
        ServeSpec(endpoints=(endpoint,)).resolved()
    spec = ServeSpec(endpoints=(endpoint,), settings=ServerSettings(database="sqlite:///a.db"))
    file = tmp_path / "spec.json"
    file.write_bytes(msgspec.json.encode(spec))
    assert read_serve_spec(str(file)).resolved().endpoints[0].payload_log == PayloadLog(max_rows=3)
    file.write_bytes(msgspec.json.encode(spec).replace(b'"max_rows":3', b'"max_rows":0'))
    with pytest.raises(click.ClickException, match=r"endpoints\[0\].payload_log.max_rows: 0"):
        read_serve_spec(str(file))
    described = schema("serve")["$defs"]["PayloadLog"]["properties"]
    assert all("description" in one for one in described.values())


def test_the_options_of_a_command() -> None:
    """ "on" has the defaults, an object its settings, "off" takes the setting away; without the option it stays."""
    served = CONFIG | {"traffic_config": {"routes": [{"served_model_name": "m", "traffic_percentage": 100}]}}
    logged = served | {"payload_log": {"sample": 0.5}, "config_version": 3}
    assert changed(logged, NO_CHANGE)["payload_log"] == {"sample": 0.5}
    assert changed(logged, NO_CHANGE | {"payload_log": settings_of("--payload-log", "on")})["payload_log"] == {}
    assert "payload_log" not in changed(logged, NO_CHANGE | {"payload_log": settings_of("--payload-log", "off")})
    changes = NO_CHANGE | {
        "models": CONFIG["served_entities"],
        "payload_log": settings_of("--payload-log", '{"max_rows": 5}'),
    }
    assert new_config(changes)["payload_log"] == {"max_rows": 5}
