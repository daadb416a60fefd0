"""The options of ``endpoints create|update|split``, and the API's config that they ask for."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import click

from ...interface.settings import NAME
from ...model_files.model_uri import is_path, parse
from ..model_options import engine_overrides, request_fields

_SHORT = re.compile(r"(?P<name>[^/@:=]+)(?:/(?P<version>\d+)|@(?P<alias>[\w-]+))")
ENTITY_FIELDS = (
    "name", "entity_name", "entity_version", "min_provisioned_throughput", "max_provisioned_throughput",
    "scale_to_zero_enabled", "engine_settings", "defaults", "follow_alias", "canary", "shadow", "placement",
    "replicas", "scale",
)  # fmt: skip
OF_ENTITY = ("scale_to_zero_enabled", "placement", "replicas")
SCALE = "off, or a JSON object with runtime, min, max and resources"
GUARDRAILS = "off, or a JSON object with input, output or both"
THROUGHPUT = ("min_provisioned_throughput", "max_provisioned_throughput")


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a config; the command gets ``changes``, a ``dict`` for ``new_config`` and ``changed``."""

    @functools.wraps(command)
    def with_changes(
        *arguments: Any,
        models: tuple[str, ...],
        split: tuple[str, ...],
        config: tuple[str, ...],
        defaults: tuple[str, ...],
        payload_log: str | None,
        follow_alias: bool | None,
        canary: str | None,
        shadows: tuple[str, ...],
        shadow_sample: float | None,
        no_shadow: bool,
        guardrails: str | None,
        scale: str | None,
        **options: Any,
    ) -> Any:
        names = (*THROUGHPUT, *OF_ENTITY, "sticky")
        changes = {name: value for name in names if (value := options.pop(name)) is not None}
        changes["models"] = [entity_of(given) for given in models]
        changes["split"] = shares(split)
        if payload_log is not None:
            changes["payload_log"] = settings_of("--payload-log", payload_log)
        if follow_alias is not None:
            changes["follow_alias"] = follow_alias
        if canary is not None:
            changes["canary"] = settings_of("--canary", canary)
        if shadows and no_shadow:
            raise click.UsageError("--shadow or --no-shadow, not both")
        changes["shadows"] = [entity_of(given) | {"shadow": {}} for given in shadows]
        changes["shadow_sample"], changes["no_shadow"] = shadow_sample, no_shadow
        if scale is not None:
            changes["scale"] = settings_of("--scale", scale, SCALE)
        if guardrails is not None:
            changes["guardrails"] = settings_of("--guardrails", guardrails, GUARDRAILS)
        changes["engine_settings"], changes["defaults"] = engine_overrides(config), request_fields(defaults)
        return command(*arguments, changes=changes, **options)

    for option in reversed(
        (
            click.option(
                "-m",
                "--model",
                "models",
                multiple=True,
                metavar="MODEL[=NAME]",
                help="assistant/3, assistant@champion, a models:/ or runs:/ URI, or a directory of the server's "
                "machine, with the name of the served entity; repeatable.",
            ),
            click.option("--split", multiple=True, metavar="NAME=PERCENT,…", help="Traffic of each served entity."),
            click.option("--sticky/--no-sticky", default=None, help="Send all requests of a key to one served entity."),
            click.option("-C", "--config", "config", multiple=True, metavar="KEY=VALUE", help="Engine setting."),
            click.option("-D", "--default", "defaults", multiple=True, metavar="FIELD=VALUE", help="Request default."),
            click.option(
                "--min-throughput", THROUGHPUT[0], type=click.IntRange(0), help="Provisioned tokens/s, at least."
            ),
            click.option(
                "--max-throughput", THROUGHPUT[1], type=click.IntRange(0), help="Provisioned tokens/s, at most."
            ),
            click.option(
                "--scale-to-zero/--no-scale-to-zero", "scale_to_zero_enabled", default=None, help="Unload when idle."
            ),
            click.option(
                "--placement",
                type=click.Choice(["local", "hosts"]),
                help="Where the engines run: on each gateway's host, or on hosts that have joined the database.",
            ),
            click.option("--replicas", type=click.IntRange(1, 64), help="Engines on joined hosts."),
            click.option(
                "--scale",
                metavar="off|JSON",
                help="Hosts that a cluster's runtime starts for the engines: "
                '\'{"runtime": "ray", "min": 1, "max": 4, "resources": {"GPU": 1}}\'.',
            ),
            click.option(
                "--payload-log",
                metavar="on|off|JSON",
                help='Keep the texts of requests, as settings say: \'{"sample": 0.1, "max_age": 86400}\'.',
            ),
            click.option(
                "--follow-alias/--no-follow-alias", default=None, help="Move to another version when the alias does."
            ),
            click.option(
                "--canary",
                metavar="on|off|JSON",
                help="Judge a new version by a share of the traffic first: "
                '\'{"traffic_percentage": 5, "duration_s": 900}\'.',
            ),
            click.option(
                "--shadow",
                "shadows",
                multiple=True,
                metavar="MODEL[=NAME]",
                help="Model that gets copies of requests, and whose answers are dropped; repeatable.",
            ),
            click.option(
                "--shadow-sample",
                type=click.FloatRange(0, 1, min_open=True),
                help="Share of the requests that are copied (default: all).",
            ),
            click.option("--no-shadow", is_flag=True, help="Copy no requests any more."),
            click.option(
                "--guardrails",
                metavar="off|JSON",
                help='Block or mask texts: \'{"input": {"invalid_keywords": ["x"]}, "output": {"pii": {"behavior": '
                '"MASK"}}}\'.',
            ),
        )
    ):
        with_changes = option(with_changes)
    return with_changes


def entity_of(given: str) -> dict[str, Any]:
    """Return the API's fields of a model. Raises ``UsageError``."""
    uri, equals, name = given.rpartition("=")
    if not equals or os.path.exists(given) or not NAME.fullmatch(name):
        uri, name = given, ""
    entity = {"name": name} if name else {}
    short = None if os.path.exists(uri) else _SHORT.fullmatch(uri)
    if short is not None:
        return entity | {"entity_name": short["name"], "entity_version": short["version"] or f"@{short['alias']}"}
    named = parse(uri)
    if named is not None and named.alias is not None:
        return entity | {"entity_name": named.name, "entity_version": f"@{named.alias}"}
    if named is not None and named.version is not None and named.version.isdecimal():
        return entity | {"entity_name": named.name, "entity_version": named.version}
    if is_path(uri):
        if not uri.startswith(("/", ".", "~")) and not os.path.exists(uri):
            raise click.UsageError(f"-m {given}: add a version or an alias, as in {uri}/1 or {uri}@champion")
        return entity | {"entity_name": os.path.abspath(os.path.expanduser(uri))}
    return entity | {"entity_name": uri}


def shares(given: tuple[str, ...]) -> dict[str, int]:
    """Parse ``NAME=PERCENT`` pairs, each alone or several with commas. Raises ``UsageError``."""
    found: dict[str, int] = {}
    for pair in filter(None, (pair.strip() for text in given for pair in text.split(","))):
        name, _, percent = pair.rpartition("=")
        if not name or not percent.isascii() or not percent.isdigit() or not 0 <= int(percent[:4]) <= 100:
            raise click.UsageError(f"{pair!r}: expected NAME=PERCENT, such as v1=90, with PERCENT from 0 to 100")
        if name in found:
            raise click.UsageError(f"{name} has two shares")
        found[name] = int(percent)
    if found and sum(found.values()) != 100:
        raise click.UsageError(f"the shares sum to {sum(found.values())}; expected 100")
    return found


def settings_of(
    option: str, given: str, allowed: str = "on, off, or a JSON object of its settings"
) -> dict[str, Any] | None:
    """Return the settings that ``option`` is given; None for "off", none of its own for "on". Raises ``UsageError``."""
    if given == "off" or (given == "on" and allowed.startswith("on")):
        return {} if given == "on" else None
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.UsageError(f"{option} {given}: expected {allowed}")
    return found


def new_config(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a new endpoint. Raises ``UsageError``."""
    if not changes["models"]:
        raise click.UsageError("name a model with -m")
    answering = [_changed_entity(entity, changes) for entity in changes["models"]]
    return _config([*answering, *_shadows([], changes)], {}, changes)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``config``, as the API shows it, with ``changes``.

    Models take the place of all that are served, and shadows that of all shadows. The settings of an entity stay if its
    name does, or if one takes the place of one. A canary that runs is left out: an update ends it. Raises
    ``UsageError``.
    """
    config = _without_canary(config)
    every = [{key: one[key] for key in ENTITY_FIELDS if key in one} for one in config["served_entities"]]
    present = [one for one in every if "shadow" not in one]
    entities = present
    if changes["models"]:
        entities = [_settings_for(entity, present, len(changes["models"])) | entity for entity in changes["models"]]
    entities = [_changed_entity(entity, changes) for entity in entities]
    names = [entity.get("name") for entity in entities]
    kept = {} if changes["models"] and names != [one["name"] for one in present] else _traffic(config)
    entities += _shadows([one for one in every if "shadow" in one], changes)
    served = {entity.get("name") for entity in entities}
    kept = {name: share for name, share in kept.items() if name in served}
    more = {name: config[name] for name in config if name not in SHOWN_ONLY and name not in changes}
    return more | _config(entities, kept, changes, sticky=config["traffic_config"].get("sticky", False))


def _shadows(present: list[dict[str, Any]], changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entities that get copies of requests. Raises ``UsageError``."""
    given, sample = changes.get("shadows", []), changes.get("shadow_sample")
    if given:
        found = [_settings_for(entity, present, len(given)) | entity for entity in given]
    else:
        found = [] if changes.get("no_shadow") else present
    if sample is not None:
        if not found:
            raise click.UsageError("--shadow-sample goes with a --shadow")
        found = [entity | {"shadow": entity["shadow"] | {"sample": sample}} for entity in found]
    return [_changed_entity(entity, changes, pays=False) for entity in found]


SHOWN_ONLY = ("served_entities", "served_models", "traffic_config", "config_version", "start_time")


def _without_canary(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the traffic of a canary given back to the model that it may take the place of."""
    canaries = {one["name"]: one["canary_of"] for one in config["served_entities"] if "canary_of" in one}
    if not canaries:
        return config
    given: dict[str, int] = {}
    for name, share in _traffic(config).items():
        given[canaries.get(name, name)] = given.get(canaries.get(name, name), 0) + share
    routes = [{"served_model_name": name, "traffic_percentage": share} for name, share in given.items()]
    kept = [one for one in config["served_entities"] if one["name"] not in canaries]
    return config | {"served_entities": kept, "traffic_config": config["traffic_config"] | {"routes": routes}}


def _settings_for(entity: dict[str, Any], present: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the settings that a model takes over: from the entity of its name, or from the only one there is."""
    same = [one for one in present if one["name"] == entity.get("name")]
    if not same and count == len(present) == 1:
        same = present
    names = ("name", "entity_name", "entity_version")
    return {} if not same else {key: value for key, value in same[0].items() if key not in names}


def _changed_entity(entity: dict[str, Any], changes: dict[str, Any], *, pays: bool = True) -> dict[str, Any]:
    names = (*THROUGHPUT, *OF_ENTITY, "follow_alias", "canary", "scale")
    given = {name: changes[name] for name in names if name in changes and pays}
    merged = {name: entity.get(name, {}) | changes[name] for name in ("engine_settings", "defaults") if changes[name]}
    found = entity | given | merged
    return found if found.get("scale", {}) is not None else {name: found[name] for name in found if name != "scale"}


def _traffic(config: dict[str, Any]) -> dict[str, int]:
    return {one["served_model_name"]: one["traffic_percentage"] for one in config["traffic_config"]["routes"]}


def _config(
    entities: list[dict[str, Any]], kept: dict[str, int], changes: dict[str, Any], *, sticky: bool = False
) -> dict[str, Any]:
    split = changes["split"] or kept
    if sum("shadow" not in entity for entity in entities) > 1 and not split:
        raise click.UsageError("several models need a share each: --split NAME=PERCENT,NAME=PERCENT")
    traffic: dict[str, Any] = {}
    if split:
        routes = [{"served_model_name": name, "traffic_percentage": share} for name, share in split.items()]
        traffic["routes"] = routes
    if changes.get("sticky", sticky):
        traffic["sticky"] = True
    log = {name: changes[name] for name in ("payload_log", "guardrails") if changes.get(name) is not None}
    return {"served_entities": entities} | ({"traffic_config": traffic} if traffic else {}) | log
