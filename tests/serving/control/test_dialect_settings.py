"""Settings of other servers, under their own names: on the command line, in a spec and in an endpoint's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli.serve.dialect_options import dialect_options, dialects_of
from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec
from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.endpoints.config import config_to_wire
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.dialect_settings import NAMES, DialectSettings
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings

ALL: dict[str, Any] = {
    "openAiSupport": "vllm",
    "fullTextEnabled": True,
    "maxIterTimes": 512,
    "maxSeqLen": 2560,
    "maxInputTokenLen": 2048,
    "maxPrefillTokens": 8192,
    "generateProfile": "current",
    "generateEndText": True,
    "allowedLocalMediaPath": "/srv/media",
    "allowedMediaDomains": ("h.example",),
    "embeddingTokenIds": True,
}
ENTITIES = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
WRONG = [
    ("openAiSupport", ""),
    ("fullTextEnabled", "yes"),
    ("maxIterTimes", 0),
    ("maxSeqLen", 2.5),
    ("maxInputTokenLen", -1),
    ("maxPrefillTokens", "many"),
    ("generateProfile", "old"),
    ("allowedLocalMediaPath", "media"),
    ("allowedMediaDomains", ["a b"]),
    ("embeddingTokenIds", "yes"),
]


def test_there_is_an_example_of_each() -> None:
    """Every dialect setting has an example, so that the tests below cover all of them."""
    assert set(ALL) == set(NAMES)


def test_the_command_line() -> None:
    """The command line has an option of the same name for each setting; one that is not given is left out."""
    found: list[DialectSettings] = []

    @click.command()
    @dialect_options
    def command(**given: Any) -> None:
        found.append(dialects_of(given))
        assert not given

    words: list[str] = []
    for name, value in ALL.items():
        words += [f"--{name}"] if value is True else [f"--{name}", value[0] if isinstance(value, tuple) else str(value)]
    runner = CliRunner()
    assert runner.invoke(command, words).exit_code == 0
    assert runner.invoke(command, []).exit_code == 0
    assert found == [DialectSettings(**ALL), DialectSettings()]
    assert isinstance(runner.invoke(command, ["--allowedLocalMediaPath", "media"]).exception, InvalidField)


def test_an_endpoints_config() -> None:
    """An endpoint's config takes and shows all dialect settings beside served_entities; maxPrefillTokens also sets the
    entities' batch size.
    """
    sent = msgspec.to_builtins(ALL)
    config = config_body(ENTITIES | sent, "config")
    assert config.dialects == DialectSettings(**ALL)
    assert config.served_entities[0].engine_settings == {"max_num_batched_tokens": 8192}
    wire = msgspec.to_builtins(config_to_wire(config))
    assert {name: wire[name] for name in NAMES} == sent
    assert not set(NAMES) & set(config_to_wire(config_body(ENTITIES, "config")))


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_values_that_are_refused(name: str, value: Any) -> None:
    """An invalid value is refused with its path in the config."""
    with pytest.raises(InvalidField, match=rf"^config\.{name}: "):
        config_body(ENTITIES | {name: value}, "config")


def test_lengths_that_leave_no_room() -> None:
    """Partial lengths must be below maxSeqLen, and maxPrefillTokens must agree with the engine settings."""
    for name in ("maxInputTokenLen", "maxIterTimes"):
        with pytest.raises(InvalidField, match=rf"^config\.{name}: 100"):
            config_body(ENTITIES | {name: 100, "maxSeqLen": 100}, "config")
    entities = [ENTITIES["served_entities"][0] | {"engine_settings": {"max_num_batched_tokens": 256}}]
    config_body({"served_entities": entities, "maxPrefillTokens": 256}, "config")
    with pytest.raises(InvalidField, match="maxPrefillTokens: 512"):
        config_body({"served_entities": entities, "maxPrefillTokens": 512}, "config")


def test_server_settings_are_defaults_for_endpoints() -> None:
    """An endpoint's own dialect settings take precedence over the server's; both reach its configuration and engine."""
    bundle = Bundle(content_hash="x", tasks=("chat",), model_dir="/m", tokenizer_dir="/m")
    own = DialectSettings(maxIterTimes=5, maxPrefillTokens=64)
    spec = ServeSpec(
        endpoints=(
            EndpointSpec(name="a", entity="/m", bundle=bundle, dialects=own),
            EndpointSpec(name="b", entity="/m", bundle=bundle),
        ),
        dialects=DialectSettings(maxIterTimes=9, maxPrefillTokens=128, openAiSupport="vllm"),
    ).resolved()
    a, b = map(config_of, spec.endpoints)
    assert (a.dialects.maxIterTimes, b.dialects.maxIterTimes) == (5, 9)
    assert a.dialects.speaks_mindie
    batches = [one.served_entities[0].model.engine.max_num_batched_tokens for one in (a, b)]
    assert (*batches, spec.engine) == (64, 128, {"max_num_batched_tokens": 128})
    assert spec.resolved() == spec
    with pytest.raises(InvalidField, match="maxPrefillTokens"):
        ServeSpec(engine={"max_num_batched_tokens": 1}, dialects=DialectSettings(maxPrefillTokens=2)).resolved()
    assert EndpointSpec(name="c", entity="/m", bundle=bundle).engine == EngineSettings()


def test_engines_of_other_hosts_have_their_own_batch() -> None:
    """A batch setting is refused for remote engines, for the server as for the endpoint."""
    bundle = Bundle(content_hash="x", tasks=("chat",), model_dir="/m", tokenizer_dir="/m")
    elsewhere = EndpointSpec(name="a", entity="/m", bundle=bundle, addresses=("tcp://h:1",), key_file="/k")
    assert ServeSpec(endpoints=(elsewhere,), dialects=DialectSettings(maxIterTimes=5)).resolved().endpoints
    with pytest.raises(InvalidField, match="maxPrefillTokens: 5"):
        ServeSpec(endpoints=(elsewhere,), dialects=DialectSettings(maxPrefillTokens=5)).resolved()


def test_a_spec_file(tmp_path: Path) -> None:
    """Dialect settings in a spec file are checked, and errors give their path."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"dialects": msgspec.to_builtins(ALL)}))
    assert read_serve_spec(str(path)).dialects == DialectSettings(**ALL)
    path.write_text(json.dumps({"dialects": {"maxIterTimes": 0}}))
    with pytest.raises(click.ClickException, match=r"dialects\.maxIterTimes: 0"):
        read_serve_spec(str(path))
