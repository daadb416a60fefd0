"""Read the configuration of an endpoint in the form of the Databricks management API.

Readers that carry their JSON schemas check the shape of the body; then the fields are checked against each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import msgspec

from ..interface.canary import NUMBERED, Canary
from ..interface.dialect_settings import NAMES as DIALECT_SETTINGS
from ..interface.dialect_settings import DialectSettings, batched
from ..interface.errors import InvalidField
from ..interface.guardrails import (
    BEHAVIORS,
    KEYWORD,
    KEYWORD_ALLOWED,
    MAX_KEYWORDS,
    MAX_SCORER_SECONDS,
    MAX_SCORERS,
    NO_SAFETY,
    PII_TYPES,
    SCORER,
    SCORER_ALLOWED,
    Guardrails,
    OnError,
)
from ..interface.payload_log import PayloadLog
from ..interface.readers import (
    Entry,
    any_of,
    boolean,
    integer,
    list_of,
    number,
    obj,
    one_of,
    reader,
    record,
    string,
    text,
)
from ..interface.settings import GRANTED, NAME, NAME_ALLOWED, EngineSettings, PrefixSharing, check_server_engine
from ..interface.shadow import Shadow
from ..interface.validated_struct import Checked
from ..model_files.entity_names import name_of_version
from ..model_files.model_uri import by_version
from ..modes.provisioned import check_throughput
from .config import EndpointConfig, EntityConfig, PlacementSetting, Route, moves
from .scale import Scale

ENTITY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,254}")
URI = re.compile(r"(models|runs):/+[^/\x00].{0,500}|/[^\x00]{1,1000}")
VERSION = re.compile(r"[0-9]{1,18}|@?[A-Za-z_-][A-Za-z0-9_-]{0,254}")
MAX_ENTITIES = 32
MAX_RATE = 10**9
MAX_REPLICAS = 64

name_in_urls = text(NAME, NAME_ALLOWED)
# a canary's name is read where a config is sent back as it was shown; ``_entity`` checks the others
_entity_name = text(re.compile(f"{NAME.pattern}({NUMBERED})?"), NAME_ALLOWED)
_MODEL = "the name of a registered model, or a model's URI"
_NUMBER = integer(0, 10**18 - 1)
_VERSION_ALLOWED = "a version number or an alias"
_VERSION = text(re.compile(f"{VERSION.pattern}|"), _VERSION_ALLOWED)


@reader(**any_of(_VERSION.schema, _NUMBER.schema))
def _version(value: Any, path: str) -> str:
    """Read a version number or an alias; empty for a URI, which has neither."""
    if isinstance(value, str):
        return _VERSION(value, path)
    try:
        return str(_NUMBER(value, path))
    except InvalidField:
        raise InvalidField(path, value, _VERSION_ALLOWED) from None


@reader(type="object", maxProperties=0)
def _nothing(value: Any, path: str) -> None:
    if value != {}:
        raise InvalidField(path, value, "no value: an entity runs on the server's own machine")


def _engine_schema() -> dict[str, Any]:
    schema = msgspec.json.schema(EngineSettings)["$defs"][EngineSettings.__name__]
    ours: dict[str, Any] = {
        "trust_remote_code": {"const": False},
        "in_process": {"const": False},
        "engine_python": {"const": None},
        "engine_args": {"const": {}},
    }
    return {"type": "object", "additionalProperties": False, "properties": schema["properties"] | ours}


@reader(**_engine_schema())
def engine_settings_of(value: Any, path: str) -> dict[str, Any]:
    """Read the engine settings that replace those saved with the model."""
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object")
    for name in GRANTED:
        if value.get(name):
            allowed = "false" if name == "trust_remote_code" else "none"
            allowed += ": it is granted on the server's command line only"
            raise InvalidField(f"{path}.{name}", value[name], allowed)
    check_server_engine(value, path)
    return value


def _schema_of(kind: type[Checked]) -> dict[str, Any]:
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return {"type": "object", "additionalProperties": False, "properties": schema["properties"]}


@reader(**_schema_of(Canary))
def _canary(value: Any, path: str) -> Canary:
    values = obj(value, path)
    with as_written(None, path):
        return Canary.read(values)


@reader(**_schema_of(Shadow))
def _shadow(value: Any, path: str) -> Shadow:
    values = obj(value, path)
    with as_written(None, path):
        return Shadow.read(values)


@reader(**_schema_of(Scale))
def _scale(value: Any, path: str) -> Scale:
    values = obj(value, path)
    with as_written(None, path):
        return Scale.read(values)


_RATE = Entry(integer(0, MAX_RATE), "tokens/s")
_ENTITY = {
    "name": Entry(
        _entity_name,
        "Traffic is routed by it, and requests can ask for it; by default the model's",
    ),
    "entity_name": Entry(text(re.compile(r"[^\x00]{1,1000}"), _MODEL), _MODEL, required=_MODEL),  # ``check_model``
    "entity_version": Entry(_version, "A number or an alias; none with a URI"),
    "min_provisioned_throughput": _RATE,
    "max_provisioned_throughput": _RATE,
    "scale_to_zero_enabled": Entry(boolean),
    "workload_size": Entry(one_of("Small", "Medium", "Large"), "Ignored: the provisioned throughput decides"),
    "workload_type": Entry(one_of("CPU")),
    "environment_vars": Entry(_nothing),
    "engine_settings": Entry(engine_settings_of, "Settings that replace those saved with the model"),
    "placement": Entry(
        one_of(*get_args(PlacementSetting)),
        "Where the engines run: on each gateway's host, or on hosts that have joined; by default as the endpoint's "
        "present ones",
    ),
    "replicas": Entry(integer(1, MAX_REPLICAS), "Engines on joined hosts, each on another one; by default 1"),
    "scale": Entry(_scale, "Hosts that a cluster's runtime starts for the engines; see docs/scale.md"),
    "defaults": Entry(obj, "Request fields for requests that lack them, over the model's own; null takes one away"),
    "follow_alias": Entry(boolean, "Move to another version when the alias does"),
    "canary": Entry(_canary, "Judge a new version by a share of the traffic before it gets all; see docs/endpoints.md"),
    "canary_of": Entry(string, "Shown of a running canary, which an update ends: its traffic goes back"),
    "shadow": Entry(_shadow, "Gets copies of the endpoint's requests, as these settings say, and no traffic"),
}
# the older names of fields, which older clients use
OLDER = {"served_entities": "served_models", "entity_name": "model_name", "entity_version": "model_version"}
_NEWER = {older: newer for newer, older in OLDER.items()}

_percentage = integer(0, 100)
_ENTITY_NAMES = ("served_model_name", "served_entity_name")
_ROUTE = record(
    served_model_name=Entry(string, "The name of a served entity"),
    served_entity_name=Entry(string, "The same by its newer name; one of the two"),
    traffic_percentage=Entry(_percentage, required="an integer from 0 to 100"),
)
_TRAFFIC = record(
    routes=Entry(list_of(_ROUTE, "a list of routes"), "A share of each served entity; they sum to 100"),
    sticky=Entry(boolean, "A key's requests go to one served entity"),
)


def _entities(spelling: Mapping[str, str]) -> Entry:
    entity = record(**{spelling.get(name, name): entry for name, entry in _ENTITY.items()})
    allowed = f"a list of 1 to {MAX_ENTITIES} served entities"
    return Entry(list_of(entity, allowed, minimum=1, maximum=MAX_ENTITIES), required=allowed)


def _setting(name: str) -> Entry:
    kind = msgspec.json.schema(DialectSettings)["$defs"][DialectSettings.__name__]["properties"][name]

    @reader(**{key: value for key, value in kind.items() if key != "default"})
    def read(value: Any, path: str) -> Any:
        parent, _, _ = path.rpartition(".")
        return getattr(DialectSettings.read({name: value}, parent), name)

    return Entry(read, "See docs/mindie.md")


@reader(**_schema_of(PayloadLog))
def _payload_log(value: Any, path: str) -> PayloadLog:
    values = obj(value, path)
    with as_written(None, path):
        return PayloadLog.read(values)


def _no_safety(value: Any, path: str) -> bool:
    if boolean(value, path):
        raise InvalidField(path, value, NO_SAFETY)
    return False


_KEYWORD = text(KEYWORD, KEYWORD_ALLOWED)
_PII = record(
    behavior=Entry(
        one_of(*BEHAVIORS), "What happens to a text with personal data", required="one of NONE, BLOCK, MASK"
    ),
    types=Entry(
        list_of(one_of(*PII_TYPES), "one or more of " + ", ".join(PII_TYPES), minimum=1, maximum=len(PII_TYPES)),
        "The kinds of personal data (all of them)",
    ),
)
_SCORER = record(
    scorer=Entry(text(SCORER, SCORER_ALLOWED), required=SCORER_ALLOWED),
    on_error=Entry(one_of(*get_args(OnError)), "What a failure means for the text (BLOCK)"),
    timeout=Entry(number(0.1, MAX_SCORER_SECONDS), "Seconds that it may take (10)"),
)
_RULES = record(
    invalid_keywords=Entry(
        list_of(_KEYWORD, f"at most {MAX_KEYWORDS} keywords", maximum=MAX_KEYWORDS), "Words that block a text"
    ),
    pii=Entry(_PII, "E-mail addresses, phone and card numbers, and others"),
    scorers=Entry(
        list_of(_SCORER, f"at most {MAX_SCORERS} scorers", maximum=MAX_SCORERS), "Scorers of MLflow's for whole texts"
    ),
    safety=Entry(reader(type="boolean", const=False)(_no_safety), NO_SAFETY),
)
_GUARDRAILS = record(
    input=Entry(_RULES, "Rules for what requests say"), output=Entry(_RULES, "Rules for what the model answers")
)


@reader(**_GUARDRAILS.schema)
def guardrails(value: Any, path: str) -> Guardrails:
    """Read guardrails in the form of Databricks' AI Gateway."""
    return msgspec.convert(_GUARDRAILS(value, path), Guardrails)


_COMMON = {
    **{name: _setting(name) for name in DIALECT_SETTINGS},
    "traffic_config": Entry(_TRAFFIC),
    "prefix_sharing": Entry(
        one_of(*get_args(PrefixSharing)),
        "Whose requests reuse each other's prompt prefixes; the server's own without it",
    ),
    "payload_log": Entry(_payload_log, "Keep the texts of requests, as these settings say; null keeps none"),
    "guardrails": Entry(guardrails, "Block or mask texts of requests and replies; null does neither"),
    "name": Entry(string, "In an update: the endpoint's own"),
}
NEW_SHAPE = record(served_entities=_entities({}), **_COMMON)
OLD_SHAPE = record(served_models=_entities(OLDER), **_COMMON)


@reader(**any_of(NEW_SHAPE.schema, OLD_SHAPE.schema))
def config_body(value: Any, path: str) -> EndpointConfig:
    """Read ``{"served_entities": […], "traffic_config": {"routes": […]}}`` into a config.

    ``served_models`` (``model_name``, ``model_version``) is the older spelling and is read the same way. Without
    routes, a single entity gets all traffic.
    """
    older = _is_older(value)
    found = (OLD_SHAPE if older else NEW_SHAPE)(value, path)
    listed = found["served_models" if older else "served_entities"]
    with as_written(value, path):
        return _config([{_NEWER.get(key, key): entry for key, entry in item.items()} for item in listed], found)


@contextmanager
def as_written(body: Any, parent: str) -> Iterator[None]:
    """Rename the fields in errors raised inside from the newer spelling to the one that ``body`` uses.

    ``parent`` is the path of ``body`` in the request.
    """
    try:
        yield
    except InvalidField as error:
        words = OLDER if _is_older(body) else {}
        field = re.sub(r"\w+", lambda word: words.get(word[0], word[0]), error.param or "")
        error.rename(".".join(filter(None, (parent, field))))
        raise


def _is_older(body: Any) -> bool:
    return isinstance(body, dict) and body.get("served_entities") is None and body.get("served_models") is not None


def _config(listed: list[dict[str, Any]], found: dict[str, Any]) -> EndpointConfig:
    dialects = DialectSettings(**{name: found[name] for name in DIALECT_SETTINGS if name in found})
    dialects.check()
    listed, found = _without_canaries(listed, found)
    entities = tuple(_entity(item, f"served_entities[{place}]", dialects) for place, item in enumerate(listed))
    names = [entity.name for entity in entities]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidField(f"served_entities[{place}].name", name, "a name that only one served entity has")
    shadows = {entity.name for entity in entities if entity.shadow is not None}
    if len(shadows) == len(entities):
        raise InvalidField("served_entities", len(entities), "at least one entity without shadow, which answers")
    traffic = found.get("traffic_config", {})
    routes = _routes(traffic.get("routes"), "traffic_config.routes", names, shadows)
    return EndpointConfig(
        served_entities=entities,
        routes=routes,
        sticky=traffic.get("sticky", False),
        prefix_sharing=found.get("prefix_sharing"),
        payload_log=found.get("payload_log"),
        guardrails=found.get("guardrails"),
        dialects=dialects,
    )


def _entity(item: dict[str, Any], field: str, dialects: DialectSettings) -> EntityConfig:
    entity_name, version = item["entity_name"], item.get("entity_version", "")
    uri = URI.fullmatch(entity_name) is not None
    if uri and version:
        raise InvalidField(f"{field}.entity_version", version, "none: a URI has no version beside it")
    if not version and ENTITY_NAME.fullmatch(entity_name):
        raise InvalidField(f"{field}.entity_version", item.get("entity_version"), _VERSION_ALLOWED)
    minimum, maximum = _throughput(item, field)
    _check_following(item, maximum, field)
    if item.get("shadow") is not None and maximum is not None:
        allowed = "none: copies of requests run in the time that others leave"
        raise InvalidField(f"{field}.max_provisioned_throughput", maximum, allowed)
    if item.get("shadow") is not None and item.get("canary") is not None:
        allowed = "none of a shadow, which has no traffic to share: it moves at once"
        raise InvalidField(f"{field}.canary", msgspec.to_builtins(item["canary"]), allowed)
    return EntityConfig(
        name=name_in_urls(item.get("name", name_of_version(entity_name, version)), f"{field}.name"),
        entity_name=entity_name,
        entity_version=version,
        min_provisioned_throughput=minimum,
        max_provisioned_throughput=maximum,
        scale_to_zero_enabled=item.get("scale_to_zero_enabled", False),
        engine_settings=batched(item.get("engine_settings", {}), dialects),
        defaults=item.get("defaults", {}),
        placement=item.get("placement"),
        replicas=item.get("replicas"),
        scale=item.get("scale"),
        follow_alias=item.get("follow_alias", False),
        canary=item.get("canary"),
        shadow=item.get("shadow"),
    )


def _check_following(item: dict[str, Any], maximum: int | None, field: str) -> None:
    if not item.get("follow_alias"):
        if item.get("canary") is not None:
            raise InvalidField(f"{field}.canary", msgspec.to_builtins(item["canary"]), "none without follow_alias")
        return
    name, version = item["entity_name"], item.get("entity_version", "")
    uri = by_version(name, version).uri if version else name
    if not moves(uri):
        raise InvalidField(f"{field}.follow_alias", True, f"false for {uri}: only an alias, or latest, can move")
    if item.get("canary") is not None and maximum is not None:
        allowed = "none with provisioned throughput, which would be reserved twice"
        raise InvalidField(f"{field}.canary", msgspec.to_builtins(item["canary"]), allowed)


def _without_canaries(
    listed: list[dict[str, Any]], found: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the entities and the other fields without canaries, whose traffic goes back to their originals.

    A client that sends back a config as it is shown, with a change, sends the canary that runs as well.
    """
    kept = [item for item in listed if item.get("canary_of") is None]
    routes = found.get("traffic_config", {}).get("routes")
    if len(kept) == len(listed):
        return listed, found
    if not kept:
        raise InvalidField("served_entities", [item.get("name") for item in listed], "an entity that is no canary")
    if routes is None:
        return kept, found
    originals = {item.get("name"): item["canary_of"] for item in listed if item.get("canary_of") is not None}
    shares: dict[str, int] = {}
    for route in routes:
        given = next((route[key] for key in _ENTITY_NAMES if key in route), "")
        name = originals.get(given, given)
        shares[name] = shares.get(name, 0) + route["traffic_percentage"]
    merged = tuple({"served_model_name": name, "traffic_percentage": share} for name, share in shares.items())
    return kept, found | {"traffic_config": found["traffic_config"] | {"routes": merged}}


def check_model(entity: EntityConfig, field: str, present: EndpointConfig | None) -> None:
    """Raise ``InvalidField`` for a model that may only be named on a command line, such as one of a hub.

    If the endpoint's ``present`` config has it, because a command line declared it, an update may keep it.
    """
    name = entity.entity_name
    if ENTITY_NAME.fullmatch(name) or URI.fullmatch(name):
        return
    if present is None or entity.uri not in {one.uri for one in present.served_entities}:
        raise InvalidField(f"{field}.entity_name", name, _MODEL)


def check_placement(entity: EntityConfig, field: str) -> None:
    """Raise ``InvalidField`` for settings that do not go with where the engines of ``entity`` run."""
    if not entity.is_hosted:
        if entity.replicas is not None:
            raise InvalidField(f"{field}.replicas", entity.replicas, "none unless placement is 'hosts'")
        if entity.scale is not None:
            allowed = "none unless placement is 'hosts': a runtime starts hosts"
            raise InvalidField(f"{field}.scale", msgspec.to_builtins(entity.scale), allowed)
        return
    if entity.scale is not None and entity.replicas is not None:
        raise InvalidField(f"{field}.replicas", entity.replicas, "none beside scale, which has min and max")
    if entity.provisioned:
        name, value = entity.reserve
        raise InvalidField(f"{field}.{name}", value, "none with placement 'hosts': it is for a gateway's own engines")
    if entity.scale_to_zero_enabled:
        allowed = "false with placement 'hosts': it is for a gateway's own engines"
        raise InvalidField(f"{field}.scale_to_zero_enabled", True, allowed)


def _throughput(item: dict[str, Any], field: str) -> tuple[int | None, int | None]:
    minimum, maximum = item.get("min_provisioned_throughput"), item.get("max_provisioned_throughput")
    if minimum is None and maximum is None:
        return None, None
    with as_written(None, field):
        check_throughput(minimum or 0, maximum)
    return minimum or 0, minimum if maximum is None else maximum


def _routes(
    listed: tuple[dict[str, Any], ...] | None, field: str, names: list[str], shadows: set[str]
) -> tuple[Route, ...]:
    if listed is None:
        answering = [name for name in names if name not in shadows]
        if len(answering) > 1:
            raise InvalidField(field, None, "a traffic percentage for each of several served entities")
        return (Route(served_model_name=answering[0], traffic_percentage=100),)
    routes = tuple(_route(item, f"{field}[{place}]", names) for place, item in enumerate(listed))
    if len({route.served_model_name for route in routes}) != len(routes):
        raise InvalidField(field, [route.served_model_name for route in routes], "one route for each served entity")
    for place, route in enumerate(routes):
        if route.served_model_name in shadows and route.traffic_percentage:
            allowed = f"0: {route.served_model_name} is a shadow, whose answers nobody gets"
            raise InvalidField(f"{field}[{place}].traffic_percentage", route.traffic_percentage, allowed)
    total = sum(route.traffic_percentage for route in routes)
    if total != 100:
        raise InvalidField(field, total, "percentages that sum to 100")
    return routes


def _route(item: dict[str, Any], field: str, names: list[str]) -> Route:
    given = {key: item[key] for key in _ENTITY_NAMES if key in item} or {_ENTITY_NAMES[0]: None}
    for key, name in given.items():
        if name not in names:
            raise InvalidField(f"{field}.{key}", name, "one of " + ", ".join(names))
    if len(set(given.values())) > 1:
        raise InvalidField(f"{field}.{key}", name, f"the same as {_ENTITY_NAMES[0]}, or only one of the two")
    return Route(served_model_name=name, traffic_percentage=item["traffic_percentage"])
