"""``mlflow-llm serve``: a server in the foreground."""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from ...control.settings import ServerSettings
from ...control.spec import ProfileName, ServeSpec
from ...system import logs
from ...system.step_line import StepLine
from .. import start_log
from ..model_options import (
    check_settings,
    endpoint_specs,
    engine_addresses,
    engine_overrides,
    named_models,
    request_fields,
)
from .checks import check_place
from .dialect_options import dialect_options, dialects_of
from .help_text import GroupedCommand, serve_epilog
from .options import serve_options
from .spec_files import read_serve_spec

EVENTS = {
    "token": "first token",
    "ready": "engines ready",
    "probes": "listening for probes",
    "grpc": "listening for gRPC",
}
"""The events of steps whose stage alone does not say what they are."""


@click.command(cls=GroupedCommand, epilog=serve_epilog())
@serve_options
@dialect_options
@click.argument("places", nargs=-1, metavar="[MODEL[=NAME]]...")
def serve(
    places: tuple[str, ...],
    models: tuple[str, ...],
    name: str | None,
    spec_file: str | None,
    profile: ProfileName,
    config: tuple[str, ...],
    defaults: tuple[str, ...],
    engines: tuple[str, ...],
    engine_key_file: str | None,
    **server: Any,
) -> None:
    """Serve models over HTTP.

    MODEL is the same as -m MODEL: a directory, a GGUF file, a registered model (NAME, NAME/VERSION, NAME@ALIAS or
    models:/…), or a hub id. What is a model's directory or file here is taken before a registered model of the same
    name. The name of the endpoint follows from the model, unless "=NAME" gives another.

    The server speaks the APIs of OpenAI, Anthropic, Databricks, MLflow and others. It runs in the foreground until a
    signal ends it: SIGTERM lets running requests finish, SIGINT (Ctrl-C) does not.
    """
    if spec_file is not None:
        _check_alone(click.get_current_context())
        spec = read_serve_spec(spec_file)
        start_log.begin(spec.settings.log_level, spec.settings.log_file)
        check_place(spec.settings)
    else:
        start_log.begin(server["log_level"], server["log_file"])
        spec = spec_of(places, models, name, profile, config, defaults, engines, engine_key_file, **server)
    spec = spec.resolved()
    if spec.settings.is_open_to_others:
        start_log.say(
            f"warning: other machines can reach {spec.settings.host}, and no API keys are required: anyone who reaches "
            "the server can use and change its endpoints (--require-keys)",
            level=logging.WARNING,
        )
    from ...http.gunicorn.server import serve as run

    run(spec, say)
    if logs.is_configured():
        logs.event("stopped")


def spec_of(
    places: tuple[str, ...],
    models: tuple[str, ...],
    name: str | None,
    profile: ProfileName,
    config: tuple[str, ...],
    defaults: tuple[str, ...],
    engines: tuple[str, ...],
    engine_key_file: str | None,
    **server: Any,
) -> ServeSpec:
    """Return the spec that the options of ``serve`` describe, with the models read. Raises ``ClickException``,
    ``PackagingError`` and ``InvalidField``."""
    dialects = dialects_of(server)
    models = (*places, *models)
    key_path = None if engine_key_file is None else os.path.abspath(engine_key_file)
    settings = ServerSettings(**server, engine_key_file=key_path)
    check_place(settings)
    named = {} if server["database"] and not models else named_models(models, name)
    addresses = engine_addresses(engines, tuple(named), engine_key_file, has_database=bool(server["database"]))
    overrides, fields = engine_overrides(config), request_fields(defaults)
    if fields and not named:
        raise click.UsageError("-D goes with -m: endpoints in the database have their own defaults")
    check_settings(overrides, named, addresses)
    hosted = tuple(one for one in named if settings.engine_placement == "hosts" and one not in addresses)
    say({"stage": "reading", "models": len(named)})
    return ServeSpec(
        endpoints=tuple(
            msgspec.structs.replace(one, addresses=addresses[one.name], key_file=key_path)
            if one.name in addresses
            else msgspec.structs.replace(
                one,
                placement="hosts" if one.name in hosted else None,
                scale=settings.engine_scale if one.name in hosted else None,
            )
            for one in endpoint_specs(named, overrides, profile, elsewhere=(*addresses, *hosted), defaults=fields)
        ),
        settings=settings,
        engine=overrides,
        profile=profile,
        dialects=dialects,
    )


def _check_alone(context: click.Context) -> None:
    """Raise ``UsageError`` for an option beside --spec: it would have no effect, and --require-keys must have one."""
    given = [
        option.opts[0] if isinstance(option, click.Option) else option.make_metavar(context)
        for option in context.command.params
        if option.name != "spec_file" and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: not allowed with --spec; put it into that file")


@functools.cache
def _line() -> StepLine:
    return StepLine()


def say(step: dict[str, Any]) -> None:
    """Say a step of the server's start."""
    if step["stage"] == "step":
        _line().show(step["step"], step["done"], step["total"])
        return
    _line().clear()
    where = f" {step['endpoint']}" if "endpoint" in step else ""
    seconds = f" ({step['seconds']} s)" if "seconds" in step else ""
    model = f": {step['model']}" if step.get("model") else ""
    host = f"[{step['host']}]" if ":" in step.get("host", "") else step.get("host")
    url = f"unix:{step['socket']}" if "socket" in step else f"{step.get('scheme')}://{host}:{step.get('port')}"
    text = {
        "reading": "reading the models",
        "loading": f"loading{where}",
        "loaded": f"loaded{where}{seconds}",
        "token": f"first token of{where}{seconds}{model}; kernels: {step.get('kernels')}",
        "ready": "engines ready",
        "probes": f"probes and metrics on {url}",
        "grpc": f"KServe's inference service on {url}",
        "listening": f"listening on {url} (docs at /docs)",
    }.get(step["stage"], json.dumps(step))
    fields = {name: value for name, value in step.items() if name not in ("stage", "scheme", "host", "port", "socket")}
    if step["stage"] in ("probes", "grpc", "listening"):
        fields["url"] = url
    start_log.say(text, EVENTS.get(step["stage"], step["stage"]), **fields)
