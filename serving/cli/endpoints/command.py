"""``mlflow-llm endpoints``: what a server serves, and changing it through the management API."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click
from click.core import ParameterSource

from ...http.management.paths import SERVING_ENDPOINTS
from ...system.escape import visible_line
from ..http import Client, url_options
from . import listing
from .config_options import changed, config_options, new_config, shares
from .payloads import payloads

POLL_SECONDS = 0.2
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(invoke_without_command=True)
@url_options
@_JSON
@click.pass_context
def endpoints(context: click.Context, /, url: str, key: str | None, as_json: bool) -> None:
    """List endpoints and their load; create and change them.

    Without a command, prints the models and versions of each endpoint, its traffic split, state and load, and below
    the table why an update failed. A server shows what the key may see; changes need the scope "manage".
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    found, told = listing.listed(Client(url, key, timeout=30))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        listing.show(found, told)


def _refuse_options(context: click.Context) -> None:
    """Raise ``UsageError`` for options before a command's name: the command has its own, and another server's endpoint
    could be changed."""
    for parameter in context.command.params:
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
            option, name = parameter.opts[0], context.invoked_subcommand
            raise click.UsageError(f"{option} goes behind the command: mlflow-llm endpoints {name} … {option}")


def _waiting(command: Callable[..., Any]) -> Callable[..., Any]:
    wait = click.option("--wait/--no-wait", default=True, help="Wait until the new config is served (default).")
    seconds = click.option(
        "--timeout", default=1200.0, show_default=True, type=click.FloatRange(0), help="Seconds to wait at most."
    )
    return wait(seconds(command))


@endpoints.command()
@click.argument("name")
@config_options
@click.option("--description", help="Text that is shown with the endpoint.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag of the endpoint; repeatable.")
@_waiting
@url_options
@_JSON
def create(
    name: str,
    changes: dict[str, Any],
    description: str | None,
    tags: tuple[str, ...],
    wait: bool,
    timeout: float,
    url: str,
    key: str | None,
    as_json: bool,
) -> None:
    """Create the endpoint NAME.

    If its models cannot be served, the endpoint stays, with the reason; update it, or delete it.
    """
    body: dict[str, Any] = {"name": name, "config": new_config(changes)}
    if description is not None:
        body["description"] = description
    if tags:
        pairs = [tag.partition("=") for tag in tags]
        body["tags"] = [{"key": left, "value": right} for left, _, right in pairs]
    client = Client(url, key)
    _finish(client, client.post(SERVING_ENDPOINTS, body), wait, timeout, as_json)


@endpoints.command()
@click.argument("name")
@config_options
@_waiting
@url_options
@_JSON
def update(
    name: str, changes: dict[str, Any], wait: bool, timeout: float, url: str, key: str | None, as_json: bool
) -> None:
    """Change what NAME serves, without dropping a request.

    Models given with -m take the place of all that are served; the settings of the model that they replace stay. If the
    new config cannot be served, the present one goes on.
    """
    client = Client(url, key)
    config = changed(_config(client, name), changes)
    _finish(client, client.put(f"{_path(name)}/config", config), wait, timeout, as_json)


@endpoints.command()
@click.argument("name")
@click.argument("split", nargs=-1, required=True, metavar="ENTITY=PERCENT...")
@_waiting
@url_options
@_JSON
def split(
    name: str, split: tuple[str, ...], wait: bool, timeout: float, url: str, key: str | None, as_json: bool
) -> None:
    """Split the traffic of NAME among the models that it serves."""
    found, client = shares(split), Client(url, key)
    config = _config(client, name)
    there = [one["name"] for one in config["served_entities"]]
    for entity in found:
        if entity not in there:
            raise click.UsageError(f"{name} has no served entity {entity!r}; it has {', '.join(there)}")
    changes = {"models": [], "split": found, "engine_settings": {}, "defaults": {}}
    _finish(client, client.put(f"{_path(name)}/config", changed(config, changes)), wait, timeout, as_json)


@endpoints.command()
@click.argument("name")
@url_options
@_JSON
def history(name: str, url: str, key: str | None, as_json: bool) -> None:
    """Show the versions of the config of NAME, the newest first."""
    client = Client(url, key)
    found = client.get(f"{_path(name)}/config-versions")
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    with client.understood():
        rows = [_version(one) for one in found["versions"]]
    listing.table([("VERSION", "STATE", "BY", "CREATED", "MODELS", "NOTE"), *rows])


@endpoints.command()
@click.argument("name")
@click.argument("version", required=False, type=click.IntRange(1))
@_waiting
@url_options
@_JSON
def rollback(
    name: str, version: int | None, wait: bool, timeout: float, url: str, key: str | None, as_json: bool
) -> None:
    """Serve an earlier VERSION of the endpoint NAME again.

    Without VERSION, it is the one that was served before the present one. It becomes a new version with the same models
    and settings, also where an alias means another model by now.
    """
    client = Client(url, key)
    body = {} if version is None else {"config_version": version}
    _finish(client, client.post(f"{_path(name)}/rollback", body), wait, timeout, as_json)


@endpoints.command("give-back")
@click.argument("name")
@_waiting
@url_options
@_JSON
def give_back(name: str, wait: bool, timeout: float, url: str, key: str | None, as_json: bool) -> None:
    """Go back to the config of the command line.

    The endpoint NAME serves again what the servers' command lines declare.
    A config that was set over the API stays, whatever server is started with -m, until it is given back.
    """
    client = Client(url, key)
    with client.understood():
        given = client.delete(f"{_path(name)}/config")
    _finish(client, given, wait, timeout, as_json)


@endpoints.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@url_options
@_JSON
def delete(name: str, yes: bool, url: str, key: str | None, as_json: bool) -> None:
    """Delete the endpoint NAME, after its running requests. Its usage is kept."""
    client = Client(url, key)
    client.get(_path(name))  # a name that is wrong is told before the question
    if not yes:
        click.confirm(f"delete {visible_line(name)}, with its config, history, tags and limits?", abort=True, err=True)
    client.delete(_path(name))
    if as_json:
        click.echo(json.dumps({"deleted": name}))
    else:
        click.echo(f"deleted {visible_line(name)}", err=True)


endpoints.add_command(payloads)


def _path(name: str) -> str:
    return f"{SERVING_ENDPOINTS}/{quote(name, safe='')}"


def _config(client: Client, name: str) -> dict[str, Any]:
    """Return the config that is served. Raises ``ClickException`` for an endpoint that has none yet."""
    with client.understood():
        endpoint = client.get(_path(name))
        config = endpoint.get("config") or endpoint.get("pending_config")
        if config is None and endpoint["permission_level"] != "CAN_MANAGE":
            raise click.ClickException("the key may not change endpoints; it needs the scope manage")
        if config is None:
            message = endpoint["state"].get("message", "")
            raise click.ClickException(f"{visible_line(name)} has never been served ({message}); delete and create it")
        return dict(config)


def _finish(client: Client, endpoint: dict[str, Any], wait: bool, timeout: float, as_json: bool) -> None:
    """Wait for an update where that is asked for, and print what became of it. Raises ``ClickException``."""
    with client.understood():
        name = endpoint["name"]
        if wait and endpoint["state"]["config_update"] == "IN_PROGRESS":
            click.echo(f"{visible_line(name)}: loading the new config", err=True)
        until = time.monotonic() + timeout
        while wait and endpoint["state"]["config_update"] == "IN_PROGRESS":
            if time.monotonic() >= until:
                raise click.ClickException(f"{visible_line(name)} is not ready after {timeout:g} s; it goes on loading")
            time.sleep(POLL_SECONDS)
            endpoint = client.get(_path(name))
        if as_json:
            click.echo(json.dumps(endpoint, indent=2))
        if endpoint["state"]["config_update"] == "UPDATE_FAILED":
            kept = f"; version {endpoint['config']['config_version']} is still served" if "config" in endpoint else ""
            message = endpoint["state"].get("message", "no message")
            raise click.ClickException(f"{visible_line(name)}: the update failed: {visible_line(message)}{kept}")
        if not as_json:
            _tell(endpoint)


def _tell(endpoint: dict[str, Any]) -> None:
    pending = endpoint["state"]["config_update"] == "IN_PROGRESS"
    config = endpoint["pending_config" if pending else "config"]
    verb = "is loading" if pending else "serves"
    click.echo(f"{endpoint['name']} {verb} version {config['config_version']}: {_models(config)}")


def _models(config: dict[str, Any]) -> str:
    split = {one["served_model_name"]: one["traffic_percentage"] for one in config["traffic_config"]["routes"]}
    several = sum("shadow" not in one for one in config["served_entities"]) > 1
    shown = []
    for one in config["served_entities"]:
        version = one.get("resolved_version") or one.get("entity_version", "")
        model = f"{one['entity_name']}/{version}" if version else one["entity_name"]
        if "shadow" in one:
            shown.append(f"{model} (shadow of {one['shadow']['sample']:.4g})")
        else:
            shown.append(f"{model} {split.get(one['name'], 0)} %" if several else model)
    return visible_line(", ".join(shown))


def _version(one: dict[str, Any]) -> tuple[str, ...]:
    time_ = datetime.datetime.fromtimestamp(one["creation_timestamp"] / 1000).strftime("%Y-%m-%d %H:%M:%S")
    note = f"restores {one['restores']}" if "restores" in one else ""
    note = ": ".join(filter(None, (note, one.get("message", ""))))
    return (str(one["config_version"]), one["state"], one["creator"] or "-", time_, _models(one["config"]), note)
