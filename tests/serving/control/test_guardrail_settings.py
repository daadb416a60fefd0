"""Guardrails in the configuration of an endpoint, in spec files and in the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from mlflow_llm.serving.cli.endpoints.config_options import GUARDRAILS, changed, new_config, settings_of
from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec
from mlflow_llm.serving.cli.serve.spec_schema import schema
from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.endpoints.config import config_to_wire
from mlflow_llm.serving.endpoints.config_body import config_body, guardrails
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.guardrails import (
    Guardrails,
    Pii,
    ScorerRule,
    TextRules,
    check_scorers,
    scorer_names,
)

CONFIG: dict[str, Any] = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
NO_CHANGE: dict[str, Any] = {"models": [], "split": {}, "engine_settings": {}, "defaults": {}}
MASK = Pii(behavior="MASK")


def _guardrails(given: str) -> dict[str, Any] | None:
    return settings_of("--guardrails", given, GUARDRAILS)


def test_a_config_has_guardrails() -> None:
    """They are read, shown and read again, and null is none."""
    given = {
        "input": {"invalid_keywords": ["x y"], "pii": {"behavior": "BLOCK", "types": ["email"]}},
        "output": {"pii": {"behavior": "MASK"}, "safety": False},
    }
    config = config_body(CONFIG | {"guardrails": given}, "config")
    rules = TextRules(invalid_keywords=("x y",), pii=Pii(behavior="BLOCK", types=("email",)))
    assert config.guardrails == Guardrails(input=rules, output=TextRules(pii=MASK))
    shown = json.loads(msgspec.json.encode(config_to_wire(config)))["guardrails"]
    assert config_body(CONFIG | {"guardrails": shown}, "config") == config
    assert "guardrails" not in config_to_wire(config_body(CONFIG | {"guardrails": None}, "config"))
    with pytest.raises(InvalidField, match="safety"):
        TextRules(safety=True)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"input": {"safety": True}}, "config.guardrails.input.safety"),
        ({"input": {"pii": {"behavior": "DROP"}}}, "config.guardrails.input.pii.behavior"),
        ({"output": {"pii": {}}}, "config.guardrails.output.pii.behavior"),
        ({"output": {"pii": {"behavior": "MASK", "types": []}}}, "config.guardrails.output.pii.types"),
        ({"output": {"invalid_keywords": [" "]}}, r"config.guardrails.output.invalid_keywords\[0\]"),
        ({"before": {}}, "config.guardrails.before"),
        ({"input": {"scorers": [{"scorer": "os.system"}]}}, r"config.guardrails.input.scorers\[0\].scorer"),
        ({"input": {"scorers": [{"scorer": "a:b", "timeout": 0}]}}, r"config.guardrails.input.scorers\[0\].timeout"),
        (True, "config.guardrails"),
    ],
)
def test_bad_guardrails_are_refused_by_name(given: Any, field: str) -> None:
    """The error names the field in the config."""
    with pytest.raises(InvalidField, match=field):
        config_body(CONFIG | {"guardrails": given}, "config")


def test_commands_and_spec_files_have_guardrails(tmp_path: Path, instant_bundle: Bundle) -> None:
    """The option takes a JSON object or off, a change keeps what it does not name, and a spec file has the field."""
    rules = {"output": {"pii": {"behavior": "MASK"}}}
    changes = NO_CHANGE | {
        "models": CONFIG["served_entities"],
        "guardrails": _guardrails(json.dumps(rules)),
    }
    assert new_config(changes)["guardrails"] == rules
    served = config_to_wire(config_body(CONFIG | {"guardrails": rules}, "config")) | {"config_version": 1}
    served["served_entities"] = [one | {"name": "a"} for one in CONFIG["served_entities"]]
    assert changed(served, NO_CHANGE)["guardrails"]["output"]["pii"]["behavior"] == "MASK"
    assert "guardrails" not in changed(served, NO_CHANGE | {"guardrails": _guardrails("off")})
    with pytest.raises(click.UsageError, match="--guardrails on: expected off, or a JSON object"):
        _guardrails("on")
    masking = Guardrails(output=TextRules(pii=MASK))
    endpoint = EndpointSpec(name="a", entity="/m", bundle=instant_bundle, guardrails=masking)
    assert config_of(endpoint).guardrails == endpoint.guardrails
    file = tmp_path / "spec.json"
    spec = schema("serve")["$defs"]
    assert "guardrails" in spec["EndpointSpec"]["properties"]
    wrong = (({"input": {"safety": True}}, "safety"), ({"before": 1}, "before"))
    for given, named in wrong:
        one = msgspec.to_builtins(endpoint) | {"guardrails": given}
        file.write_bytes(msgspec.json.encode({"endpoints": [one], "settings": {}}))
        with pytest.raises(click.ClickException, match=named):
            read_serve_spec(str(file))
    one["guardrails"] = rules
    file.write_bytes(msgspec.json.encode({"endpoints": [one], "settings": {}}))
    assert read_serve_spec(str(file)).resolved().endpoints[0].guardrails == Guardrails(output=TextRules(pii=MASK))


def test_only_scorers_that_the_server_has_may_be_used(instant_bundle: Bundle) -> None:
    """A configuration that names another one is refused by its place, since naming it would import its module."""
    given = {"output": {"scorers": [{"scorer": "rules:polite", "on_error": "PASS"}]}}
    found = guardrails(given, "guardrails")
    assert found.output.scorers == (ScorerRule(scorer="rules:polite", on_error="PASS", timeout=10.0),)
    check_scorers(found, scorer_names("rules:other, rules:polite"), "guardrails")
    with pytest.raises(InvalidField, match=r"guardrails.output.scorers\[0\].scorer.*--guardrail-scorers\): none"):
        check_scorers(found, (), "config.guardrails")
    endpoint = EndpointSpec(name="a", entity="/m", bundle=instant_bundle, guardrails=found)
    with pytest.raises(InvalidField, match=r"endpoints\[0\].guardrails.output.scorers\[0\].scorer"):
        ServeSpec(endpoints=(endpoint,), settings=ServerSettings()).resolved()
    ServeSpec(endpoints=(endpoint,), settings=ServerSettings(guardrail_scorers="rules:polite")).resolved()
