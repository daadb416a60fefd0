"""Options of ``mlflow-llm serve``: those of the server itself, and which models, engines and fields it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click
from click import option

from ..control.settings import DATABASE_VARIABLE, ServerSettings
from ..control.spec import ProfileName
from ..settings import PrefixSharing
from .sizes import Size

F = TypeVar("F", bound=Callable[..., Any])
DEFAULTS = ServerSettings()
SIZE = Size()
_OPTIONS = (
    option(
        "-m",
        "--model-uri",
        "models",
        multiple=True,
        help="Model URI[=endpoint name], e.g. models:/assistant@champion; repeatable.",
    ),
    option("--name", help="Name of the endpoint, if there is one model (default: from the URI)."),
    option(
        "--spec",
        "spec_file",
        type=click.Path(exists=True, dir_okay=False),
        help="Models, endpoints and settings in a JSON file.",
    ),
    option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on."),
    option("--port", default=DEFAULTS.port, show_default=True, type=click.IntRange(0, 65535)),
    option("--socket", help="Path of a Unix socket to listen on instead of host and port."),
    option(
        "--socket-mode",
        default=DEFAULTS.socket_mode,
        show_default=True,
        help="Permissions of the socket: whoever may write to it may use the server.",
    ),
    option("--tls-cert", help="PEM file with the certificate and its chain. It is reloaded when it changes."),
    option("--tls-key", help="PEM file with its key (default: in the same file)."),
    option(
        "--tls-client-ca",
        help="PEM file with CA certificates: clients must have a certificate from one of them (mTLS).",
    ),
    option("--probe-tls-client-ca", help="The same for the probe listener, which requires no certificate by default."),
    option(
        "--probe-port",
        type=click.IntRange(0, 65535),
        help="Port of a separate listener for probes and metrics; /metrics is then only there.",
    ),
    option("--probe-host", help="Address of that listener (default: --host)."),
    option(
        "--grpc-port",
        type=click.IntRange(0, 65535),
        help="Port of KServe's inference service over gRPC, served by a separate process (mlflow-llm[grpc]).",
    ),
    option(
        "--max-connections",
        default=DEFAULTS.max_connections,
        show_default=True,
        type=click.IntRange(1),
        help="Connections per worker. When all are taken, the one that has waited longest for its client is closed.",
    ),
    option(
        "--max-connections-per-address",
        type=click.IntRange(1),
        help="Connections per worker from one address (default: half of them).",
    ),
    option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="A further name (Host) under which a server without keys is reached; repeatable.",
    ),
    option(
        "--workers",
        default=DEFAULTS.workers,
        show_default=True,
        type=click.IntRange(1, 64),
        help="Number of gateway processes.",
    ),
    option(
        "--profile",
        default="open",
        show_default=True,
        type=click.Choice(get_args(ProfileName)),
        help="Which requests are accepted: everything that the engine supports, or what Databricks accepts.",
    ),
    option(
        "--database",
        envvar=DATABASE_VARIABLE,
        help="URL of the database with keys and ledger, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE).",
    ),
    option(
        "--jwt-jwks",
        metavar="FILE|URL",
        help="Also accept bearer tokens that are signed with a key of this JWKS (mlflow-llm[jwt]).",
    ),
    option("--jwt-issuer", help="Required issuer (iss) of tokens."),
    option("--jwt-audience", help="Required audience (aud) of tokens: the issuer's name for this server."),
    option(
        "--jwt-algorithms", default=DEFAULTS.jwt_algorithms, show_default=True, help="Accepted signature algorithms."
    ),
    option(
        "--jwt-leeway",
        default=DEFAULTS.jwt_leeway,
        show_default=True,
        type=click.FloatRange(0, 600),
        help="Seconds by which clocks may differ.",
    ),
    option(
        "--jwt-subject-claim",
        default=DEFAULTS.jwt_subject_claim,
        show_default=True,
        help="Claim that names the caller.",
    ),
    option(
        "--jwt-tenant-claim",
        default=DEFAULTS.jwt_tenant_claim,
        show_default=True,
        help="Claim that names the tenant, which pays.",
    ),
    option(
        "--jwt-scope-claim",
        default=DEFAULTS.jwt_scope_claim,
        show_default=True,
        help="Claim with the scopes: invoke, usage, manage.",
    ),
    option(
        "--jwt-endpoints-claim",
        default=DEFAULTS.jwt_endpoints_claim,
        show_default=True,
        help="Claim with the allowed endpoints; a token without it may use all.",
    ),
    option(
        "--jwt-weight-claim",
        help="Claim with the caller's share of an engine next to other tenants, like --weight of a key.",
    ),
    option("--require-keys", is_flag=True, help="Refuse requests without an API key (needs --database)."),
    option(
        "--timeout",
        default=DEFAULTS.timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that a request may take.",
    ),
    option(
        "--drain-timeout",
        default=DEFAULTS.drain_timeout,
        show_default=True,
        type=click.FloatRange(0),
        help="Seconds that running requests have after SIGTERM.",
    ),
    option(
        "--max-resolvers",
        default=DEFAULTS.max_resolvers,
        show_default=True,
        type=click.IntRange(1, 64),
        help="Model lookups of the management API at the same time, 200 MB each; others wait.",
    ),
    option(
        "--resolve-timeout",
        default=DEFAULTS.resolve_timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that a lookup may take, including downloads.",
    ),
    option(
        "--max-queued",
        default=DEFAULTS.max_queued,
        show_default=True,
        type=click.IntRange(0),
        help="Requests that may wait at an endpoint; more get a 503.",
    ),
    option(
        "--prefix-sharing",
        default=DEFAULTS.prefix_sharing,
        show_default=True,
        type=click.Choice(get_args(PrefixSharing)),
        help="Who shares cached prompt prefixes: the keys of a tenant, all callers of an endpoint, or nobody.",
    ),
    option(
        "--adapter-sources",
        default=DEFAULTS.adapter_sources,
        help="Directories and models:/ names from which adapters may be loaded over HTTP, separated by commas.",
    ),
    option(
        "--default-max-tokens",
        type=click.IntRange(1),
        help="max_tokens of requests without it, which rate limits then reserve (default: the rest of the context).",
    ),
    option(
        "--scale-to-zero-after",
        default=DEFAULTS.scale_to_zero_after,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds without a request after which an engine with scale_to_zero_enabled ends.",
    ),
    option(
        "--engine-memory-budget",
        type=SIZE,
        metavar="BYTES",
        help="Memory of all engines together, e.g. 12GiB: idle ones are unloaded when another is needed (default: no "
        "limit).",
    ),
    option("-C", "--config", "config", multiple=True, metavar="KEY=VALUE", help="Engine setting; repeatable."),
    option(
        "-D",
        "--default",
        "defaults",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Default of a request field, instead of the model's own; null removes a default. Repeatable.",
    ),
    option(
        "--engine",
        "engines",
        multiple=True,
        metavar="[NAME=]tcp://HOST:PORT",
        help="Engine on another host (mlflow-llm engine) with the model of endpoint NAME; several are replicas.",
    ),
    option("--engine-key-file", help="File with the key of those engines, made by mlflow-llm engine-key."),
    option(
        "--engine-timeout",
        default=DEFAULTS.engine_timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that requests wait for such an engine while it is unavailable.",
    ),
    option(
        "--trace-sample",
        default=DEFAULTS.trace_sample,
        show_default=True,
        type=click.FloatRange(0, 1),
        help="Share of requests traced to MLflow, besides those with a sampled traceparent. 0 is off.",
    ),
    option("--trace-content", is_flag=True, help="Include prompts and replies in traces."),
    option(
        "--trace-experiment", default=DEFAULTS.trace_experiment, show_default=True, help="MLflow experiment for traces."
    ),
    option(
        "--log-level",
        default=DEFAULTS.log_level,
        show_default=True,
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Level of the log on standard error.",
    ),
)


def serve_options(command: F) -> F:
    """``command`` with all of them, in the order in which ``--help`` shows them."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command
