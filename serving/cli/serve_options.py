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
        "-m", "--model-uri", "models", multiple=True, help="URI[=name]; repeatable. E.g. models:/assistant@champion"
    ),
    option("--name", help="The endpoint's name, with one model (default: from the URI)."),
    option("--spec", "spec_file", type=click.Path(exists=True, dir_okay=False), help="A file that says it all (JSON)."),
    option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on."),
    option("--port", default=DEFAULTS.port, show_default=True, type=click.IntRange(0, 65535)),
    option("--socket", help="Path of a Unix socket to listen on instead of host and port."),
    option(
        "--socket-mode",
        default=DEFAULTS.socket_mode,
        show_default=True,
        help="Its permissions: whoever may write to it may use the server.",
    ),
    option("--tls-cert", help="PEM file of the certificate, and those above it. It is read again when it changes."),
    option("--tls-key", help="PEM file of its key (default: it is in the same file)."),
    option("--tls-client-ca", help="PEM file of authorities: clients must have a certificate of one of them."),
    option("--probe-tls-client-ca", help="The same for the listener for probes, which else asks for none."),
    option(
        "--probe-port",
        type=click.IntRange(0, 65535),
        help="A listener for probes and metrics alone; /metrics is then there only.",
    ),
    option("--probe-host", help="Address of that listener (default: --host)."),
    option(
        "--grpc-port",
        type=click.IntRange(0, 65535),
        help="KServe's inference service over gRPC, by a process of its own (mlflow-llm[grpc]).",
    ),
    option(
        "--max-connections",
        default=DEFAULTS.max_connections,
        show_default=True,
        type=click.IntRange(1),
        help="Of each worker; when all are taken the one that has waited longest for its client goes.",
    ),
    option(
        "--max-connections-per-address",
        type=click.IntRange(1),
        help="Of each worker, from one address (default: half of them).",
    ),
    option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="A name under which a proxy or page reaches a server without keys (Host); repeatable.",
    ),
    option(
        "--workers", default=DEFAULTS.workers, show_default=True, type=click.IntRange(1, 64), help="Gateway processes."
    ),
    option(
        "--profile",
        default="open",
        show_default=True,
        type=click.Choice(get_args(ProfileName)),
        help="Which requests are taken: all that the engine can, or what Databricks takes.",
    ),
    option(
        "--database",
        envvar=DATABASE_VARIABLE,
        help="URL of the store for keys and ledger, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE).",
    ),
    option(
        "--jwt-jwks",
        metavar="FILE|URL",
        help="Take bearer tokens too, checked with the keys of this JWKS (mlflow-llm[jwt]).",
    ),
    option("--jwt-issuer", help="iss of such tokens."),
    option("--jwt-audience", help="aud of such tokens: the name that their issuer has for this server."),
    option("--jwt-algorithms", default=DEFAULTS.jwt_algorithms, show_default=True, help="In which they are signed."),
    option(
        "--jwt-leeway",
        default=DEFAULTS.jwt_leeway,
        show_default=True,
        type=click.FloatRange(0, 600),
        help="Seconds that clocks may differ.",
    ),
    option("--jwt-subject-claim", default=DEFAULTS.jwt_subject_claim, show_default=True, help="Who calls."),
    option("--jwt-tenant-claim", default=DEFAULTS.jwt_tenant_claim, show_default=True, help="Who pays."),
    option("--jwt-scope-claim", default=DEFAULTS.jwt_scope_claim, show_default=True, help="invoke, usage, manage."),
    option(
        "--jwt-endpoints-claim",
        default=DEFAULTS.jwt_endpoints_claim,
        show_default=True,
        help="Without it, all of them.",
    ),
    option("--jwt-weight-claim", help="Its share of an engine beside other tenants, as a key's --weight."),
    option("--require-keys", is_flag=True, help="Refuse requests without an API key (needs --database)."),
    option(
        "--timeout",
        default=DEFAULTS.timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds a request may take.",
    ),
    option(
        "--drain-timeout",
        default=DEFAULTS.drain_timeout,
        show_default=True,
        type=click.FloatRange(0),
        help="Seconds after SIGTERM.",
    ),
    option(
        "--max-resolvers",
        default=DEFAULTS.max_resolvers,
        show_default=True,
        type=click.IntRange(1, 64),
        help="Processes that look models up at once for the management API, 200 MB each; further ones wait.",
    ),
    option(
        "--resolve-timeout",
        default=DEFAULTS.resolve_timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that such a process may take, downloads included.",
    ),
    option(
        "--max-queued",
        default=DEFAULTS.max_queued,
        show_default=True,
        type=click.IntRange(0),
        help="Requests that may wait at an endpoint; beyond, they get a 503.",
    ),
    option(
        "--prefix-sharing",
        default=DEFAULTS.prefix_sharing,
        show_default=True,
        type=click.Choice(get_args(PrefixSharing)),
        help="Who reuses whose prompt prefixes: the keys of a tenant, all callers of an endpoint, or nobody.",
    ),
    option(
        "--adapter-sources",
        default=DEFAULTS.adapter_sources,
        help="Directories, and models:/ names, from which adapters may be loaded over HTTP; commas between them.",
    ),
    option(
        "--default-max-tokens",
        type=click.IntRange(1),
        help="max_tokens of requests without it, which is what rate limits reserve (default: up to the context "
        "length).",
    ),
    option(
        "--scale-to-zero-after",
        default=DEFAULTS.scale_to_zero_after,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds without a request after which an engine that may end (scale_to_zero_enabled) does.",
    ),
    option(
        "--engine-memory-budget",
        type=SIZE,
        metavar="BYTES",
        help="What all engines may take together, e.g. 12GiB: idle ones are unloaded when another is wanted (default: "
        "no bound).",
    ),
    option("-C", "--config", "config", multiple=True, metavar="KEY=VALUE", help="An engine setting; repeatable."),
    option(
        "-D",
        "--default",
        "defaults",
        multiple=True,
        metavar="FIELD=VALUE",
        help="A request field for requests that lack it, over the model's own; null takes one away. Repeatable.",
    ),
    option(
        "--engine",
        "engines",
        multiple=True,
        metavar="[NAME=]tcp://HOST:PORT",
        help="An engine on another host (mlflow-llm engine) that runs endpoint NAME's model; several are its replicas.",
    ),
    option("--engine-key-file", help="The key of those engines, made by mlflow-llm engine-key."),
    option(
        "--engine-timeout",
        default=DEFAULTS.engine_timeout,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that requests wait for such an engine while it is away.",
    ),
    option(
        "--trace-sample",
        default=DEFAULTS.trace_sample,
        show_default=True,
        type=click.FloatRange(0, 1),
        help="Share of requests traced to MLflow; a caller's sampled traceparent is always. 0 is off.",
    ),
    option("--trace-content", is_flag=True, help="Put prompts and replies into traces."),
    option("--trace-experiment", default=DEFAULTS.trace_experiment, show_default=True, help="For the traces."),
    option(
        "--log-level",
        default=DEFAULTS.log_level,
        show_default=True,
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Of the log on standard error.",
    ),
)


def serve_options(command: F) -> F:
    """``command`` with all of them, in the order in which ``--help`` shows them."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command
