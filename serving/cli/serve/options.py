"""Options of ``mlflow-llm serve``: those of the server itself, and which models, engines and fields it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click
from click import option

from ...control.settings import DATABASE_VARIABLE, ServerSettings
from ...control.spec import ProfileName
from ...endpoints.config import PlacementSetting
from ...endpoints.scale import Runtime
from ...interface.settings import PrefixSharing
from .sizes import Size

F = TypeVar("F", bound=Callable[..., Any])
DEFAULTS = ServerSettings()
SIZE = Size()


def _setting(flag: str, **given: Any) -> Callable[[F], F]:
    """Return the option of the server setting with the same name, whose default it shows."""
    default = getattr(DEFAULTS, flag.removeprefix("--").replace("-", "_"))
    return option(flag, default=default, show_default=True, **given)


def _aliases(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Read ``NAME=ENDPOINT``. Raises ``BadParameter`` for no "=", and for a name that is given twice."""
    found: dict[str, str] = {}
    for entry in given:
        name, equals, target = entry.partition("=")
        if not equals or not name or not target or name in found:
            raise click.BadParameter(f"{entry!r} is not allowed; expected NAME=ENDPOINT, each name once")
        found[name] = target
    return found


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
        "--model-alias",
        "model_aliases",
        multiple=True,
        metavar="NAME=ENDPOINT[:ADAPTER]",
        callback=_aliases,
        help="A further name for an endpoint, e.g. gpt-4o=assistant or 'gpt-*=assistant'; repeatable.",
    ),
    option("--default-endpoint", help="Endpoint of requests that name no model (default: the only one)."),
    option(
        "--spec",
        "spec_file",
        type=click.Path(exists=True, dir_okay=False),
        help="Models, endpoints and settings in a JSON file.",
    ),
    _setting("--host", help="Address to listen on."),
    _setting("--port", type=click.IntRange(0, 65535)),
    option("--socket", help="Path of a Unix socket to listen on instead of host and port."),
    _setting(
        "--socket-mode",
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
    _setting(
        "--max-connections",
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
        "--cors-origin",
        "cors_origins",
        multiple=True,
        metavar="ORIGIN",
        help="An origin whose pages may call the server from a browser, e.g. https://app.example, or *; repeatable.",
    ),
    _setting(
        "--workers",
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
    _setting("--jwt-algorithms", help="Accepted signature algorithms."),
    _setting(
        "--jwt-leeway",
        type=click.FloatRange(0, 600),
        help="Seconds by which clocks may differ.",
    ),
    _setting(
        "--jwt-subject-claim",
        help="Claim that names the caller.",
    ),
    _setting(
        "--jwt-tenant-claim",
        help="Claim that names the tenant, which pays.",
    ),
    _setting(
        "--jwt-scope-claim",
        help="Claim with the scopes: invoke, usage, manage, end_users.",
    ),
    _setting(
        "--jwt-endpoints-claim",
        help="Claim with the allowed endpoints; a token without it may use all.",
    ),
    option(
        "--jwt-weight-claim",
        help="Claim with the caller's share of an engine next to other tenants, like --weight of a key.",
    ),
    option(
        "--end-user-header",
        help="Header in which keys with the scope end_users name the end user whose limits apply.",
    ),
    option(
        "--guardrail-scorers",
        default=DEFAULTS.guardrail_scorers,
        help="Scorers of MLflow's (module:name, separated by commas) that guardrails of endpoints may use.",
    ),
    option("--require-keys", is_flag=True, help="Refuse requests without an API key (needs --database)."),
    _setting(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        help="Seconds that a request may take.",
    ),
    _setting(
        "--stream-start-after",
        type=click.FloatRange(0),
        help="Seconds after which a stream begins even without text; an error before that has its own HTTP status.",
    ),
    _setting(
        "--stream-keep-alive",
        type=click.FloatRange(0, min_open=True),
        help="Seconds between signs of life in such a stream until its first text.",
    ),
    _setting(
        "--drain-timeout",
        type=click.FloatRange(0),
        help="Seconds that running requests have after SIGTERM.",
    ),
    _setting(
        "--max-resolvers",
        type=click.IntRange(1, 64),
        help="Model lookups of the management API at the same time, 200 MB each; others wait.",
    ),
    _setting(
        "--max-clock-skew",
        type=click.FloatRange(0, min_open=True),
        help="Seconds that this host's clock may differ from the database's; by more, nothing is admitted.",
    ),
    _setting(
        "--resolve-timeout",
        type=click.FloatRange(0, min_open=True),
        help="Seconds that a lookup may take, including downloads.",
    ),
    _setting(
        "--alias-poll",
        type=click.FloatRange(0, min_open=True),
        help="Seconds between two looks at the registry for aliases that endpoints follow.",
    ),
    _setting(
        "--max-queued",
        type=click.IntRange(0),
        help="Requests that may wait at an endpoint; more get a 503.",
    ),
    _setting(
        "--prefix-sharing",
        type=click.Choice(get_args(PrefixSharing)),
        help="Who shares cached prompt prefixes: the keys of a tenant, all callers of an endpoint, or nobody.",
    ),
    option(
        "--adapter-sources",
        default=DEFAULTS.adapter_sources,
        help="Directories and models:/ names from which adapters may be loaded over HTTP, separated by commas.",
    ),
    option(
        "--webhook-urls",
        default=DEFAULTS.webhook_urls,
        help="URLs that are told of rollouts, separated by commas; with --webhook-secret-file.",
    ),
    option(
        "--budget-alert-at",
        default=DEFAULTS.budget_alert_at,
        help="Shares of budgets at which webhooks are told, such as 0.5,0.8,1.",
    ),
    option(
        "--webhook-secret-file",
        type=click.Path(),
        help="File, mode 0600, with the secret that signs what webhooks are sent.",
    ),
    option(
        "--default-max-tokens",
        type=click.IntRange(1),
        help="max_tokens of requests without it, which rate limits then reserve (default: the rest of the context).",
    ),
    _setting(
        "--scale-to-zero-after",
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
    option(
        "--engine-key-file",
        help="File with the key of those engines and of engines on joined hosts, made by mlflow-llm engine-key.",
    ),
    _setting(
        "--placement",
        type=click.Choice(get_args(PlacementSetting)),
        help="Where engines run by default: on this host, or on hosts that have joined the database "
        "(mlflow-llm engine --join).",
    ),
    _setting(
        "--runtime",
        type=click.Choice(get_args(Runtime)),
        help="Cluster that starts hosts for engines by default (pip install 'mlflow-llm[ray]').",
    ),
    _setting(
        "--ray-address",
        help="Address of the Ray cluster (default: RAY_ADDRESS, or a cluster on this host, or a new one).",
    ),
    _setting(
        "--engine-timeout",
        type=click.FloatRange(0, min_open=True),
        help="Seconds that requests wait for such an engine while it is unavailable.",
    ),
    _setting(
        "--trace-sample",
        type=click.FloatRange(0, 1),
        help="Share of requests traced to MLflow, besides those with a sampled traceparent. 0 is off.",
    ),
    option("--trace-content", is_flag=True, help="Include prompts and replies in traces."),
    _setting("--trace-experiment", help="MLflow experiment for traces."),
    option("--page/--no-page", default=DEFAULTS.page, help="Serve the page under / (playground, usage, operations)."),
    _setting(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least severe level that is logged.",
    ),
    option(
        "--log-file",
        metavar="FILE",
        help="File to which the log is appended as JSON, besides standard error. It may be rotated by renaming.",
    ),
)


def serve_options(command: F) -> F:
    """Return ``command`` with all of them, in the order in which ``--help`` shows them."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command
