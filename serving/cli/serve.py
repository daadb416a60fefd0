"""``mlflow-llm serve``: a server in the foreground."""

from __future__ import annotations

import difflib
import errno
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from typing import Any, get_args

import click
import msgspec
from click.core import ParameterSource

from ..control.settings import DATABASE_VARIABLE, ServerSettings, ledger_dir
from ..control.spec import EndpointSpec, ProfileName, ServeSpec
from ..dialects.defaults import check_defaults, request_defaults
from ..http.gunicorn.listen_addresses import addresses, bind, try_address
from ..http.gunicorn.tls import gateway_tls, probe_tls
from ..model_uri import parse
from ..settings import EngineSettings, PrefixSharing, check_name, check_server_engine
from ..transport.auth import check_address, read_key
from .dialect_options import dialect_options, dialects_of
from .sizes import Size
from .spec_files import read_serve_spec

DEFAULTS = ServerSettings()
SIZE = Size()
CLIENT_SETTINGS = ("stall_timeout", "start_timeout", "trust_remote_code")  # that matter where the engine is not


def settings_help() -> str:
    """The engine settings, one a line, as ``--help`` shows them after the options."""
    rows = [(name, json.dumps(default), allowed) for name, default, allowed in EngineSettings.described()]
    lines = (f"  {name} = {default}: {allowed}" for name, default, allowed in rows if name != "in_process")
    return "\b\nEngine settings (-C KEY=VALUE), with their defaults:\n" + "\n".join(lines)


@click.command(epilog=settings_help())
@click.option(
    "-m", "--model-uri", "models", multiple=True, help="URI[=name]; repeatable. E.g. models:/assistant@champion"
)
@click.option("--name", help="The endpoint's name, with one model (default: from the URI).")
@click.option(
    "--spec", "spec_file", type=click.Path(exists=True, dir_okay=False), help="A file that says it all (JSON)."
)
@click.option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option("--port", default=DEFAULTS.port, show_default=True, type=click.IntRange(0, 65535))
@click.option("--socket", help="Path of a Unix socket to listen on instead of host and port.")
@click.option(
    "--socket-mode",
    default=DEFAULTS.socket_mode,
    show_default=True,
    help="Its permissions: whoever may write to it may use the server.",
)
@click.option("--tls-cert", help="PEM file of the certificate, and those above it. It is read again when it changes.")
@click.option("--tls-key", help="PEM file of its key (default: it is in the same file).")
@click.option("--tls-client-ca", help="PEM file of authorities: clients must have a certificate of one of them.")
@click.option("--probe-tls-client-ca", help="The same for the listener for probes, which else asks for none.")
@click.option(
    "--probe-port",
    type=click.IntRange(0, 65535),
    help="A listener for probes and metrics alone; /metrics is then there only.",
)
@click.option("--probe-host", help="Address of that listener (default: --host).")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help="KServe's inference service over gRPC, by a process of its own (mlflow-llm[grpc]).",
)
@click.option(
    "--max-connections",
    default=DEFAULTS.max_connections,
    show_default=True,
    type=click.IntRange(1),
    help="Of each worker; when all are taken the one that has waited longest for its client goes.",
)
@click.option(
    "--max-connections-per-address",
    type=click.IntRange(1),
    help="Of each worker, from one address (default: half of them).",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name under which a proxy or page reaches a server without keys (Host); repeatable.",
)
@click.option(
    "--workers", default=DEFAULTS.workers, show_default=True, type=click.IntRange(1, 64), help="Gateway processes."
)
@click.option(
    "--profile",
    default="open",
    show_default=True,
    type=click.Choice(get_args(ProfileName)),
    help="Which requests are taken: all that the engine can, or what Databricks takes.",
)
@click.option(
    "--database",
    envvar=DATABASE_VARIABLE,
    help="URL of the store for keys and ledger, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE).",
)
@click.option(
    "--jwt-jwks",
    metavar="FILE|URL",
    help="Take bearer tokens too, checked with the keys of this JWKS (mlflow-llm[jwt]).",
)
@click.option("--jwt-issuer", help="iss of such tokens.")
@click.option("--jwt-audience", help="aud of such tokens: the name that their issuer has for this server.")
@click.option("--jwt-algorithms", default=DEFAULTS.jwt_algorithms, show_default=True, help="In which they are signed.")
@click.option(
    "--jwt-leeway",
    default=DEFAULTS.jwt_leeway,
    show_default=True,
    type=click.FloatRange(0, 600),
    help="Seconds that clocks may differ.",
)
@click.option("--jwt-subject-claim", default=DEFAULTS.jwt_subject_claim, show_default=True, help="Who calls.")
@click.option("--jwt-tenant-claim", default=DEFAULTS.jwt_tenant_claim, show_default=True, help="Who pays.")
@click.option("--jwt-scope-claim", default=DEFAULTS.jwt_scope_claim, show_default=True, help="invoke, usage, manage.")
@click.option(
    "--jwt-endpoints-claim", default=DEFAULTS.jwt_endpoints_claim, show_default=True, help="Without it, all of them."
)
@click.option("--jwt-weight-claim", help="Its share of an engine beside other tenants, as a key's --weight.")
@click.option("--require-keys", is_flag=True, help="Refuse requests without an API key (needs --database).")
@click.option(
    "--timeout",
    default=DEFAULTS.timeout,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds a request may take.",
)
@click.option(
    "--drain-timeout",
    default=DEFAULTS.drain_timeout,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds after SIGTERM.",
)
@click.option(
    "--max-resolvers",
    default=DEFAULTS.max_resolvers,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Processes that look models up at once for the management API, 200 MB each; further ones wait.",
)
@click.option(
    "--resolve-timeout",
    default=DEFAULTS.resolve_timeout,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds that such a process may take, downloads included.",
)
@click.option(
    "--max-queued",
    default=DEFAULTS.max_queued,
    show_default=True,
    type=click.IntRange(0),
    help="Requests that may wait at an endpoint; beyond, they get a 503.",
)
@click.option(
    "--prefix-sharing",
    default=DEFAULTS.prefix_sharing,
    show_default=True,
    type=click.Choice(get_args(PrefixSharing)),
    help="Who reuses whose prompt prefixes: the keys of a tenant, all callers of an endpoint, or nobody.",
)
@click.option(
    "--adapter-sources",
    default=DEFAULTS.adapter_sources,
    help="Directories, and models:/ names, from which adapters may be loaded over HTTP; commas between them.",
)
@click.option(
    "--default-max-tokens",
    type=click.IntRange(1),
    help="max_tokens of requests without it, which is what rate limits reserve (default: up to the context length).",
)
@click.option(
    "--scale-to-zero-after",
    default=DEFAULTS.scale_to_zero_after,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds without a request after which an engine that may end (scale_to_zero_enabled) does.",
)
@click.option(
    "--engine-memory-budget",
    type=SIZE,
    metavar="BYTES",
    help="What all engines may take together, e.g. 12GiB: idle ones are unloaded when another is wanted (default: no "
    "bound).",
)
@click.option("-C", "--config", "config", multiple=True, metavar="KEY=VALUE", help="An engine setting; repeatable.")
@click.option(
    "-D",
    "--default",
    "defaults",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A request field for requests that lack it, over the model's own; null takes one away. Repeatable.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="[NAME=]tcp://HOST:PORT",
    help="An engine on another host (mlflow-llm engine) that runs endpoint NAME's model; several are its replicas.",
)
@click.option("--engine-key-file", help="The key of those engines, made by mlflow-llm engine-key.")
@click.option(
    "--engine-timeout",
    default=DEFAULTS.engine_timeout,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds that requests wait for such an engine while it is away.",
)
@click.option(
    "--trace-sample",
    default=DEFAULTS.trace_sample,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of requests traced to MLflow; a caller's sampled traceparent is always. 0 is off.",
)
@click.option("--trace-content", is_flag=True, help="Put prompts and replies into traces.")
@click.option("--trace-experiment", default=DEFAULTS.trace_experiment, show_default=True, help="For the traces.")
@click.option(
    "--log-level",
    default=DEFAULTS.log_level,
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Of the log on standard error.",
)
@dialect_options
def serve(
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
    """Serve models to OpenAI, Databricks and MLflow clients.

    In the foreground, until a signal ends it: SIGTERM lets running requests end, SIGINT (Ctrl-C) does not.
    """
    from ..http.gunicorn.server import serve as run

    if spec_file is not None:
        _check_alone(click.get_current_context())
        spec = read_serve_spec(spec_file)
        _check_place(spec.settings)
    else:
        dialects = dialects_of(server)
        settings = ServerSettings(**server)
        _check_place(settings)
        named = {} if server["database"] and not models else _named(models, name)
        addresses = engine_addresses(engines, tuple(named), engine_key_file)
        overrides, fields = engine_overrides(config), request_fields(defaults)
        if fields and not named:
            raise click.UsageError("-D goes with -m: an endpoint in the store has its own defaults")
        _check_settings(overrides, named, addresses)
        say({"stage": "reading", "models": len(named)})
        spec = ServeSpec(
            endpoints=tuple(
                msgspec.structs.replace(one, addresses=addresses[one.name], key_file=os.path.abspath(engine_key_file))
                if engine_key_file is not None and one.name in addresses
                else one
                for one in endpoint_specs(named, overrides, profile, elsewhere=tuple(addresses), defaults=fields)
            ),
            settings=settings,
            engine=overrides,
            profile=profile,
            dialects=dialects,
        )
    spec = spec.resolved()
    if spec.settings.is_open_to_others:
        click.echo(
            f"warning: {spec.settings.host} is reached from other machines and no API keys are asked for: whoever "
            "reaches it uses and changes the endpoints (--require-keys)",
            err=True,
        )
    run(spec, say)


def _check_alone(context: click.Context) -> None:
    """Raises ``UsageError`` for an option beside --spec: it would have no effect, and --require-keys must have one."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name != "spec_file" and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: --spec says it all; write it there")


def _check_place(settings: ServerSettings) -> None:
    """Check, before minutes of loading, the state directory, the addresses to listen on, and the store.

    Raises ``PackagingError``, ``ClickException``.
    """
    _check_tokens(settings)
    _check_grpc(settings)
    if settings.database is not None:
        from .store import opened  # and SQLAlchemy

        ledger_dir(settings)
        with opened(settings.database, make=True):
            pass
    gateway_tls(settings)
    probe_tls(settings)
    for address in addresses(settings):
        try:
            try_address(address)
        except OSError as error:
            other = {errno.EADDRINUSE: "; --port, --probe-port and --socket name another place"}.get(
                error.errno or 0, ""
            )
            raise click.ClickException(f"cannot listen on {bind(address)}: {error.strerror}{other}") from None


def _check_grpc(settings: ServerSettings) -> None:
    """Raises ``ClickException`` where gRPC could not be served."""
    if settings.grpc_port is None:
        return
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
        raise click.ClickException("--grpc-port needs grpcio: pip install 'mlflow-llm[grpc]'")
    address = (settings.host, settings.grpc_port)
    try:
        try_address(address)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {bind(address)} (--grpc-port): {error.strerror}") from None


def _check_tokens(settings: ServerSettings) -> None:
    """Raises ``ClickException`` where bearer tokens could not be verified; a JWKS URL may answer later."""
    if settings.jwt_jwks is None:
        return
    try:
        from ..http import jwks
    except ModuleNotFoundError:
        raise click.ClickException("--jwt-jwks needs joserfc: pip install 'mlflow-llm[jwt]'") from None
    if jwks.is_url(settings.jwt_jwks):
        return
    try:
        with open(settings.jwt_jwks, "rb") as file:
            found = jwks.parsed(file.read())
    except (OSError, jwks.BadKeySet) as error:
        raise click.ClickException(f"--jwt-jwks {settings.jwt_jwks}: {error}") from None
    if not found:
        raise click.ClickException(
            f"--jwt-jwks {settings.jwt_jwks}: it has no public key that signatures are checked with"
        )


def say(step: dict[str, Any]) -> None:
    """Print a step of the server's start on standard error."""
    where = f" {step['endpoint']}" if "endpoint" in step else ""
    seconds = f" ({step['seconds']} s)" if "seconds" in step else ""
    url = (
        f"unix:{step['socket']}"
        if "socket" in step
        else f"{step.get('scheme')}://{step.get('host')}:{step.get('port')}"
    )
    text = {
        "reading": "reading the models",
        "loading": f"loading{where}",
        "loaded": f"loaded{where}{seconds}",
        "token": f"first token of{where}{seconds}; kernels: {step.get('kernels')}",
        "ready": "engines ready",
        "probes": f"probes and metrics on {url}",
        "grpc": f"KServe's inference service on {url}",
        "listening": f"listening on {url} (docs at /docs)",
    }.get(step["stage"], json.dumps(step))
    click.echo(text, err=True)


def _named(models: tuple[str, ...], name: str | None) -> dict[str, str]:
    """``{endpoint name: URI}``. Raises ``UsageError`` for none, or two of the same name, ``InvalidField`` for one that
    cannot stand in a URL."""
    if not models:
        raise click.UsageError("name a model with -m, or a --database whose endpoints are to be served")
    if name is not None and len(models) > 1:
        raise click.UsageError("--name goes with one model; write -m URI=name for several")
    found: dict[str, str] = {}
    for given in models:
        uri, equals, own = given.rpartition("=")
        uri, own = (uri, own) if equals and "/" not in own else (given, "")
        endpoint = check_name(name or own or name_of(uri), hint="" if name or own else "; write -m URI=name")
        if endpoint in found:
            raise click.UsageError(f"two models are called {endpoint!r}; write -m URI=name")
        found[endpoint] = uri
    return found


def engine_addresses(
    given: tuple[str, ...], names: tuple[str, ...], key_file: str | None
) -> dict[str, tuple[str, ...]]:
    """``NAME=tcp://HOST:PORT`` as addresses by endpoint; NAME may be left out with one endpoint. Raises
    ``UsageError``, ``PackagingError``."""
    found: dict[str, tuple[str, ...]] = {}
    for one in given:
        name, equals, address = one.rpartition("=")
        name = name if equals or len(names) != 1 else names[0]
        if name not in names:
            raise click.UsageError(f"--engine {one}: name an endpoint: NAME=tcp://HOST:PORT, one of {', '.join(names)}")
        if check_address(address) in found.get(name, ()):
            raise click.UsageError(f"--engine {one}: given twice")
        found[name] = (*found.get(name, ()), address)
    if found:
        read_key(key_file, "--engine-key-file, made by mlflow-llm engine-key, is needed with --engine")
    elif key_file is not None:
        raise click.UsageError("--engine-key-file goes with --engine")
    return found


def _check_settings(overrides: dict[str, Any], named: dict[str, str], addresses: dict[str, tuple[str, ...]]) -> None:
    """Raises ``UsageError`` for a setting that no engine of this server would have."""
    for key in overrides if named and len(addresses) == len(named) else ():
        if key not in CLIENT_SETTINGS:
            raise click.UsageError(f"-C {key}: the engines run on other hosts; give it to mlflow-llm engine there")


def name_of(uri: str) -> str:
    """An endpoint's name for a model: ``assistant`` for ``models:/assistant/3``, else the last part of the path."""
    named = parse(uri)
    return named.name if named is not None else os.path.basename(uri.rstrip("/")) or "model"


def engine_overrides(config: tuple[str, ...], *, here: bool = False) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as engine settings; a value is JSON where it parses as such, else a string.

    ``here``: the engine is this command's alone, and may be in its process. Raises ``UsageError``, ``InvalidField``."""
    found: dict[str, Any] = {}
    for pair in config:
        key, equals, value = pair.partition("=")
        if not equals or key not in EngineSettings.__struct_fields__:
            known = [name for name in EngineSettings.__struct_fields__ if here or name != "in_process"]
            near = difflib.get_close_matches(key[:64], known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"-C {pair}: expected KEY=VALUE with KEY one of {', '.join(known)}{meant}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    if here:
        EngineSettings.read(found)
    else:
        check_server_engine(found)
    return found


def request_fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """``FIELD=VALUE`` pairs as request defaults; a value is JSON where it parses as such, else a string.

    Raises ``UsageError``, ``InvalidField``."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"-D {pair}: expected FIELD=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    check_defaults(found, "-D")
    return found


def endpoint_specs(
    models: dict[str, str],
    overrides: dict[str, Any],
    profile: ProfileName = "open",
    elsewhere: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> tuple[EndpointSpec, ...]:
    """Resolve ``{name: URI}``; saved engine settings and request defaults hold unless overridden; an encoder beside
    decoders is run without what only those have. Of the names in
    ``elsewhere`` the engines are on other hosts, and no weights are fetched. Raises ``PackagingError``."""
    from ..control.mlflow_resolver import resolve, with_drafts
    from ..control.model_sources import not_applied

    if not models:
        return ()
    ordered = sorted(models, key=lambda name: name in elsewhere)
    here = tuple(models[name] for name in ordered if name not in elsewhere)
    resolved = dict(zip(ordered, resolve(here, tuple(models[name] for name in ordered[len(here) :])), strict=True))
    if any(resolved[name].generates for name in models):
        for name in models:
            if unused := resolved[name].unused(overrides):
                click.echo(not_applied(name, unused), err=True)
    elif unused := next(iter(resolved.values())).unused(overrides):
        given = ", ".join(f"{key}={value}" for key, value in unused.items())
        raise click.UsageError(f"-C {given}: none of the models makes text, and others have no use for it")
    engines = {name: resolved[name].settings(overrides) for name in models}
    local = [name for name in models if name not in elsewhere]
    with_draft = with_drafts([resolved[name].bundle for name in local], [engines[name] for name in local], resolve)
    bundles = dict(zip(local, with_draft, strict=True))
    specs = []
    for name, uri in models.items():
        found, settings = resolved[name], engines[name]
        specs.append(
            EndpointSpec(
                name=name,
                entity=uri,
                bundle=bundles.get(name, found.bundle),
                engine=settings,
                defaults=request_defaults(found.defaults, defaults or {}),
                profile=profile,
                created=int(time.time()),
            )
        )
    return tuple(specs)
