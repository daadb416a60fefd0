"""The options ``-m``, ``-C``, ``-D`` and ``--engine`` of every command that has them: models by endpoint, engine
settings, request fields, engines on other hosts."""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import click

from ..control.spec import EndpointSpec, ProfileName
from ..dialects.fields.defaults import check_defaults, request_defaults
from ..interface.settings import EngineSettings, check_name, check_server_engine
from ..model_files.model_uri import parse
from ..transport.auth import check_address, read_key
from . import start_log
from .advice import for_setting
from .model_names import located, named_version

CLIENT_SETTINGS = ("stall_timeout", "start_timeout", "trust_remote_code")  # that matter where the engine is not


def named_models(models: tuple[str, ...], name: str | None) -> dict[str, str]:
    """Return ``{endpoint name: URI}``. Raises ``UsageError`` for none, or two of the same name, ``InvalidField`` for
    one that cannot stand in a URL."""
    if not models:
        raise click.UsageError("name a model with -m, or a --database with endpoints to serve")
    if name is not None and len(models) > 1:
        raise click.UsageError("--name goes with one model; write -m URI=name for several")
    found: dict[str, str] = {}
    for given in models:
        uri, equals, own = given.rpartition("=")
        if equals and own.startswith("models:/") and "/" not in uri:
            raise click.UsageError(f"-m {given}: the URI comes first, {own}={uri}")
        uri, own = (uri, own) if equals and ("/" not in own or _is_name(given, uri)) else (given, "")
        uri = located(uri)
        endpoint = check_name(name or own or name_of(uri), hint="" if name or own else "; write -m URI=name")
        if endpoint in found:
            raise click.UsageError(f"two models are called {endpoint!r}; write -m URI=name")
        found[endpoint] = uri
    return found


def _is_name(given: str, uri: str) -> bool:
    """Return whether ``given`` is ``uri=name`` although the name has a slash (which is then refused), and not a place
    whose path has an equals sign."""
    whole = parse(given)
    version = "" if whole is None else whole.version or ""
    is_version = version.isdecimal() or version.lower() == "latest"
    if os.path.exists(given) or is_version or "://" in uri:
        return False
    return os.path.exists(uri) or parse(uri) is not None or not uri.startswith(("/", ".", "~"))


def name_of(uri: str) -> str:
    """Return an endpoint's name for a model: ``assistant`` for ``models:/assistant/3``, else the last part of the
    path."""
    named = parse(uri)
    return named.name if named is not None else os.path.basename(uri.rstrip("/")) or "model"


def engine_addresses(
    given: tuple[str, ...], names: tuple[str, ...], key_file: str | None, *, has_database: bool = False
) -> dict[str, tuple[str, ...]]:
    """Parse ``NAME=tcp://HOST:PORT`` as addresses by endpoint; NAME may be left out with one endpoint. The key is also
    that of engines on hosts that join a database. Raises ``UsageError``, ``PackagingError``."""
    found: dict[str, tuple[str, ...]] = {}
    for one in given:
        name, equals, address = one.rpartition("=")
        name = name if equals or len(names) != 1 else names[0]
        if name not in names:
            raise click.UsageError(f"--engine {one}: name an endpoint: NAME=tcp://HOST:PORT, one of {', '.join(names)}")
        if check_address(address) in found.get(name, ()):
            raise click.UsageError(f"--engine {one}: given twice")
        found[name] = (*found.get(name, ()), address)
    if found or (has_database and key_file is not None):
        read_key(key_file, "--engine-key-file, made by mlflow-llm engine-key, is needed with --engine")
    elif key_file is not None:
        raise click.UsageError("--engine-key-file goes with --engine, or with --database for engines on joined hosts")
    return found


def check_settings(overrides: dict[str, Any], named: dict[str, str], addresses: dict[str, tuple[str, ...]]) -> None:
    """Raise ``UsageError`` for a setting that no engine of this server would have."""
    for key in overrides if named and len(addresses) == len(named) else ():
        if key not in CLIENT_SETTINGS:
            raise click.UsageError(f"-C {key}: the engines run on other hosts; give it to mlflow-llm engine there")


def engine_overrides(config: tuple[str, ...], *, here: bool = False) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` pairs as engine settings; a value is JSON where it parses as such, else a string.

    ``here``: the engine is this command's alone, and may be in its process. Raises ``UsageError``, ``InvalidField``."""
    found: dict[str, Any] = {}
    for pair in config:
        key, equals, value = pair.partition("=")
        if not equals or EngineSettings.ALIASES.get(key, key) not in EngineSettings.__struct_fields__:
            known = [name for name in EngineSettings.__struct_fields__ if here or name != "in_process"]
            near = difflib.get_close_matches(key[:64], known, n=1)
            instead = for_setting(key[:64])
            meant = f"; write {instead}" if instead else f"; did you mean {near[0]!r}?" if near else ""
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
    """Parse ``FIELD=VALUE`` pairs as request defaults; a value is JSON where it parses as such, else a string.

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
                start_log.say(not_applied(name, unused))
    elif unused := next(iter(resolved.values())).unused(overrides):
        given = ", ".join(f"{key}={value}" for key, value in unused.items())
        raise click.UsageError(f"-C {given}: none of the models generates text, and other models do not use it")
    engines = {name: resolved[name].settings(overrides) for name in models}
    local = [name for name in models if name not in elsewhere]
    with_draft = with_drafts([resolved[name].bundle for name in local], [engines[name] for name in local], resolve)
    bundles = dict(zip(local, with_draft, strict=True))
    specs = []
    for name, uri in models.items():
        found, settings = resolved[name], engines[name]
        if version := named_version(uri, found.uri):
            start_log.say(version)
        specs.append(
            EndpointSpec(
                name=name,
                entity=uri,
                uri=found.uri,
                bundle=bundles.get(name, found.bundle),
                engine=settings,
                defaults=request_defaults(found.defaults, defaults or {}),
                given_defaults=dict(defaults or {}),
                profile=profile,
                created=int(time.time()),
            )
        )
    return tuple(specs)
