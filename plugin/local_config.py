"""The ``config`` of a local deployment: its keys and values, and the command line of the server."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from mlflow.exceptions import MlflowException

from mlflow_llm.serving.control.settings import DATABASE_VARIABLE, ServerSettings
from mlflow_llm.serving.control.spec import ProfileName
from mlflow_llm.serving.http.gunicorn.listen_addresses import bind
from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import GRANTED, EngineSettings, check_server_engine
from mlflow_llm.serving.system.child import environment as child_environment
from mlflow_llm.serving.system.child import python_command

from .endpoint_calls import ENGINE_KEYS, ENTITY_KEYS, parsed
from .model_uris import absolute_store
from .predict_inputs import plain

OPTION_KEYS = (
    "host",
    "port",
    "workers",
    "profile",
    "database",
    "timeout",
    "drain_timeout",
    "max_queued",
    "prefix_sharing",
    "log_level",
    "log_file",
    "probe_host",
    "probe_port",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "probe_tls_client_ca",
    "allowed_host",
    "cors_origin",
    "default_endpoint",
    "model_alias",
    "stream_start_after",
    "stream_keep_alive",
    "max_connections",
    "max_connections_per_address",
    "default_max_tokens",
    "max_resolvers",
    "resolve_timeout",
    "alias_poll",
    "scale_to_zero_after",
    "max_clock_skew",
    "trace_sample",
    "trace_experiment",
    "webhook_urls",
    "budget_alert_at",
    "webhook_secret_file",
    "jwt_jwks",
    "jwt_issuer",
    "jwt_audience",
    "jwt_algorithms",
    "jwt_leeway",
    "jwt_subject_claim",
    "jwt_tenant_claim",
    "jwt_scope_claim",
    "jwt_endpoints_claim",
    "jwt_weight_claim",
    "end_user_header",
    "guardrail_scorers",
    "adapter_sources",
    "engine_memory_budget",
    "grpc_port",
)
FLAG_KEYS = ("require_keys", "trace_content", "page")
SERVER_KEYS = (*OPTION_KEYS, *FLAG_KEYS)
FILE_KEYS = ("tls_cert", "tls_key", "tls_client_ca", "probe_tls_client_ca", "jwt_jwks", "webhook_secret_file")
LIST_KEYS = ("allowed_host", "cors_origin", "model_alias")  # repeatable options
OF_DIALECTS = "it is for `mlflow-llm serve`, or stands beside `served_entities` through the management API"
ELSEWHERE = "endpoints with engines on other hosts are for `mlflow-llm serve`"
REFUSED_KEYS = {  # options of `mlflow-llm serve` that are not for deployments, and what to do
    "socket": "a deployment is found by its port; `mlflow-llm serve --socket` listens on a Unix socket",
    "socket_mode": "a deployment is found by its port; `mlflow-llm serve --socket` listens on a Unix socket",
    "engine_key_file": ELSEWHERE,
    "engine_timeout": ELSEWHERE,
    "placement": ELSEWHERE,
    "runtime": ELSEWHERE,
    "ray_address": ELSEWHERE,
    "spec": "its settings are given one by one",
    "default": "log the model with defaults=…, or give the endpoint `defaults` through the management API",
    "config": "engine settings are keys of their own: max_num_seqs=…",
    "model_uri": "it is the option -m",
    "name": "it is the option --name",
    **dict.fromkeys(DialectSettings.__struct_fields__, OF_DIALECTS),
}
FIXED_KEYS = (*SERVER_KEYS, *GRANTED)  # on the command line, so they cannot change while the server runs
HOST = "127.0.0.1"


def cleaned(config: Any) -> dict[str, Any]:
    """Return ``config``, from the command line or Python, in JSON's types and without entries that are None.

    Raises ``MlflowException``.
    """
    found = {key: parsed(plain(value, key)) for key, value in mapping(config).items() if value is not None}
    if isinstance(found.get("database"), str):
        found["database"] = absolute_store(found["database"])
    for key in FILE_KEYS:  # absolute paths, since a later start may be in another directory
        if isinstance(path := found.get(key), str) and path and "://" not in path:
            found[key] = os.path.abspath(path)
    for key in LIST_KEYS:
        if isinstance(names := found.get(key), str):
            found[key] = [name.strip() for name in names.split(",")]
    return found


def mapping(config: Any) -> dict[str, Any]:
    """Return a copy of ``config``. Raises ``MlflowException`` if it is not a dict."""
    if config is not None and not isinstance(config, Mapping):
        raise MlflowException.invalid_parameter_value(f"config: expected a dict, not {type(config).__name__}")
    return {str(key): value for key, value in (config or {}).items()}


def with_database(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the store that the environment names, so that a later start uses it too."""
    named = os.environ.get(DATABASE_VARIABLE)
    return {"database": absolute_store(named), **config} if named else config


def check(config: dict[str, Any], *, others: tuple[str, ...] = ENTITY_KEYS) -> None:
    """Raise ``MlflowException`` for a cleaned ``config`` that a server does not accept. The values of ``others`` are
    left to the running server to check."""
    known = (*SERVER_KEYS, *others, *ENGINE_KEYS)
    for key in config:
        if key in REFUSED_KEYS:
            raise MlflowException.invalid_parameter_value(
                f"config: {key!r} is not for deployments: {REFUSED_KEYS[key]}"
            )
        if key not in known:
            near = difflib.get_close_matches(key[:64], known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise MlflowException.invalid_parameter_value(
                f"config: {key!r} is unknown{meant or '; expected ' + ', '.join(known)}"
            )
    try:
        ServerSettings.read({_field(key): config[key] for key in SERVER_KEYS if key in config and key != "profile"})
        check_server_engine({key: config[key] for key in ENGINE_KEYS if key in config})
        if config.get("profile", "open") not in get_args(ProfileName):
            raise InvalidField("profile", config["profile"], f"one of {', '.join(map(repr, get_args(ProfileName)))}")
    except InvalidField as error:
        raise MlflowException.invalid_parameter_value(error.message) from None


def _field(key: str) -> str:
    """Return the server setting for a key; for an option that may be repeated, the setting is a list."""
    return {"allowed_host": "allowed_hosts", "cors_origin": "cors_origins", "model_alias": "model_aliases"}.get(
        key, key
    )


def command(name: str, model_uri: str, config: dict[str, Any]) -> list[str]:
    """Return the server's command line for a cleaned ``config``: options, and ``base_of`` as ``-C``."""
    words = python_command("serving.cli", "serve", "-m", model_uri, "--name", name)
    for key in OPTION_KEYS:
        if key in config and key != "database":  # its URL may have a password, and command lines show in process lists
            values = config[key] if isinstance(config[key], list) else [config[key]]
            for value in values:
                words += [_option(key), _word(value)]
    words += [_option(key) for key in FLAG_KEYS if config.get(key)]
    if config.get("page") is False:  # the only flag that is on unless it is turned off
        words.append("--no-page")
    for key, value in base_of(config).items():
        words += ["-C", f"{key}={_word(value)}"]
    return words


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def url_of(config: dict[str, Any], port: int) -> str:
    """Return the URL at which this machine reaches a server with ``config``."""
    host = config.get("host", HOST)
    scheme = "http" if config.get("tls_cert") is None else "https"
    return f"{scheme}://{bind((HOST if host in ('0.0.0.0', '::') else host, port))}"


def environment(config: dict[str, Any], stores: dict[str, str]) -> dict[str, str]:
    own = {DATABASE_VARIABLE: config["database"]} if config.get("database") else {}
    return {**child_environment(), **own, **{f"MLFLOW_{name.upper()}": uri for name, uri in stores.items()}}


def base_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the engine settings, which are given on a server's command line."""
    return {key: value for key, value in config.items() if key in ENGINE_KEYS}


def must_stay(config: dict[str, Any], given: dict[str, Any], port: int) -> None:
    """Raise ``MlflowException`` if ``given`` changes a value of ``config`` that a running server cannot change. The
    server listens on ``port``."""
    fields = msgspec.structs.fields(ServerSettings) + msgspec.structs.fields(EngineSettings)
    defaults = {field.name: field.default for field in fields} | {"profile": "open", "port": port}
    defaults |= {key: [] for key in LIST_KEYS}
    now = defaults | {key: parsed(value) for key, value in config.items()}
    if changed := [key for key in FIXED_KEYS if key in given and given[key] != now[key]]:
        raise MlflowException.invalid_parameter_value(
            f"config: {', '.join(changed)} cannot change while the server runs; delete the deployment and create it"
        )
