"""``mlflow-llm spec schema``: the JSON schema of the files that ``--spec`` takes, made from their types."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from ...control.spec import ServeSpec
from ...interface.canary import Canary
from ...interface.dialect_settings import DialectSettings
from ...interface.payload_log import PayloadLog
from ...interface.settings import EngineSettings
from ...interface.validated_struct import OF_BYTES, Checked
from ...supervision.engine_spec import EngineSpec

KINDS: dict[str, type[Any]] = {"serve": ServeSpec, "engine": EngineSpec}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SIZE = {"type": "string", "pattern": "^[0-9]{1,15}(\\.[0-9]{1,3})? ?([kKmMgGtT]?[bB]?|[kKmMgGtT][iI][bB]?)$"}


def schema(kind: str) -> dict[str, Any]:
    """Return the schema of a ``--spec`` file of ``serve`` or ``engine``."""
    made = msgspec.json.schema(KINDS[kind])
    defs: dict[str, Any] = made["$defs"]
    for known in _settings_of(KINDS[kind]):
        properties = defs[known.__name__]["properties"]
        for name, meaning in known.meanings().items():
            if meaning:
                properties[name]["description"] = meaning
        for name, _, allowed in known.described():
            if allowed.startswith(OF_BYTES):
                properties[name] = _or_size(properties[name])
    if kind == "serve":  # checked when it is read, as the settings of every engine are
        defs[ServeSpec.__name__]["properties"]["engine"] = {"$ref": f"#/$defs/{EngineSettings.__name__}"}
        if EngineSettings.__name__ not in defs:
            raise AssertionError("an endpoint's engine has these settings")
    return {"$schema": DIALECT, "title": f"--spec of mlflow-llm {kind}", **made}


def _settings_of(kind: type[Any]) -> tuple[type[Checked], ...]:
    from ...control.settings import ServerSettings

    return (
        (ServerSettings, EngineSettings, DialectSettings, PayloadLog, Canary)
        if kind is ServeSpec
        else (EngineSettings,)
    )


def _or_size(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a number of bytes that may also be a text such as 1GiB."""
    facts: dict[str, Any] = {name: field[name] for name in ("default", "description") if name in field}
    numbers = {name: value for name, value in field.items() if name not in facts}
    each = numbers.get("anyOf", [numbers])
    return {"anyOf": [*each, SIZE]} | facts


@click.group()
def spec() -> None:
    """Describe the files that --spec takes."""


@spec.command("schema")
@click.argument("kind", type=click.Choice(tuple(KINDS)), default="serve")
def schema_(kind: str) -> None:
    """Print the JSON schema of a --spec file.

    KIND is the command that reads the file: serve (the default) or engine. An editor that is given the schema completes
    and checks the file.
    """
    click.echo(json.dumps(schema(kind), indent=2))
