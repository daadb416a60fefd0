"""The ``config`` of a local deployment: what may be in it, and the command line of the server that it makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from mlflow.exceptions import MlflowException

from mlflow_llm.serving.child import environment as child_environment
from mlflow_llm.serving.child import python_command
from mlflow_llm.serving.errors import InvalidField
from mlflow_llm.serving.settings import EngineSettings, check_server_engine
from mlflow_llm.serving.web.settings import DATABASE_VARIABLE, ServerSettings
from mlflow_llm.serving.web.spec import ProfileName

from .endpoint_calls import ENGINE_KEYS, ENTITY_KEYS, parsed
from .inputs import plain
from .model_uris import absolute_store

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
)
SERVER_KEYS = (*OPTION_KEYS, "require_keys")
FIXED_KEYS = (*SERVER_KEYS, "trust_remote_code")  # of the command line, which runs on
HOST = "127.0.0.1"


def cleaned(config: Any) -> dict[str, Any]:
    """``config`` as values of JSON, whether it came from the command line or from Python; None is not given. Raises
    ``MlflowException``."""
    found = {key: parsed(plain(value, key)) for key, value in mapping(config).items() if value is not None}
    if isinstance(found.get("database"), str):
        found["database"] = absolute_store(found["database"])
    return found


def mapping(config: Any) -> dict[str, Any]:
    """A copy. Raises ``MlflowException`` for what is no dict."""
    if config is not None and not isinstance(config, Mapping):
        raise MlflowException.invalid_parameter_value(f"config: expected a dict, not {type(config).__name__}")
    return {str(key): value for key, value in (config or {}).items()}


def with_database(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the store that the environment names, so that a later start has it too."""
    named = os.environ.get(DATABASE_VARIABLE)
    return {"database": absolute_store(named), **config} if named else config


def check(config: dict[str, Any], *, others: tuple[str, ...] = ENTITY_KEYS) -> None:
    """Raises ``MlflowException`` for a cleaned ``config`` that a server does not take; the values of ``others`` are the
    running server's to check."""
    known = (*SERVER_KEYS, *others, *ENGINE_KEYS)
    for key in config:
        if key not in known:
            raise MlflowException.invalid_parameter_value(f"config: {key!r} is unknown; expected {', '.join(known)}")
    own = [key for key in SERVER_KEYS if key in ServerSettings.__struct_fields__]
    try:
        ServerSettings.read({key: config[key] for key in own if key in config})
        check_server_engine({key: config[key] for key in ENGINE_KEYS if key in config})
        if config.get("profile", "open") not in get_args(ProfileName):
            raise InvalidField("profile", config["profile"], f"one of {', '.join(map(repr, get_args(ProfileName)))}")
    except InvalidField as error:
        raise MlflowException.invalid_parameter_value(error.message) from None


def command(name: str, model_uri: str, config: dict[str, Any]) -> list[str]:
    """The server's command line, of a cleaned ``config``: options, and ``base_of`` as ``-C``."""
    words = python_command("serving.cli", "serve", "-m", model_uri, "--name", name)
    for key in OPTION_KEYS:
        if key in config and key != "database":  # may have a password, and whoever lists processes reads command lines
            words += [f"--{key.replace('_', '-')}", _word(config[key])]
    if config.get("require_keys"):
        words.append("--require-keys")
    for key, value in base_of(config).items():
        words += ["-C", f"{key}={_word(value)}"]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def environment(config: dict[str, Any], stores: dict[str, str]) -> dict[str, str]:
    own = {DATABASE_VARIABLE: config["database"]} if config.get("database") else {}
    return {**child_environment(), **own, **{f"MLFLOW_{name.upper()}": uri for name, uri in stores.items()}}


def base_of(config: dict[str, Any]) -> dict[str, Any]:
    """The engine settings, which a server has on its command line."""
    return {key: value for key, value in config.items() if key in ENGINE_KEYS}


def must_stay(config: dict[str, Any], given: dict[str, Any], port: int) -> None:
    """Raises ``MlflowException`` where ``given`` names another value than ``config`` for what a running server keeps;
    it listens on ``port``."""
    fields = msgspec.structs.fields(ServerSettings) + msgspec.structs.fields(EngineSettings)
    defaults = {field.name: field.default for field in fields} | {"profile": "open", "port": port}
    now = defaults | {key: parsed(value) for key, value in config.items()}
    if changed := [key for key in FIXED_KEYS if key in given and given[key] != now[key]]:
        raise MlflowException.invalid_parameter_value(
            f"config: {', '.join(changed)} cannot change while the server runs; delete the deployment and create it"
        )
