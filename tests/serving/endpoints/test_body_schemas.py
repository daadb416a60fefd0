"""The JSON schemas of the management API's bodies take what their readers take, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from probes import ANY, bounds

from mlflow_llm.serving.endpoints.config_body import NEW_SHAPE, OLD_SHAPE, config_body
from mlflow_llm.serving.endpoints.management_body import NEW_ENDPOINT, NEW_RATE_LIMITS, ROLLBACK, TAG_CHANGES
from mlflow_llm.serving.http.management.paths import SERVING_ENDPOINTS
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.readers import Reader

ENTITY = {
    "name": "Llama-3.1",
    "entity_name": "assistant",
    "entity_version": "1",
    "min_provisioned_throughput": 1,
    "max_provisioned_throughput": 2,
    "scale_to_zero_enabled": True,
    "workload_size": "Small",
    "workload_type": "CPU",
    "environment_vars": {},
    "engine_settings": {"max_num_seqs": 4, "device": "cpu"},
}
ROUTE = {"served_model_name": "Llama-3.1", "served_entity_name": "Llama-3.1", "traffic_percentage": 100}
TRAFFIC = {"routes": [ROUTE], "sticky": True}
CONFIG = {"name": "chat", "served_entities": [ENTITY], "traffic_config": TRAFFIC}
OLDER = {"entity_name": "model_name", "entity_version": "model_version"}
OLD_CONFIG = {
    "served_models": [{OLDER.get(key, key): value for key, value in ENTITY.items()}],
    "traffic_config": TRAFFIC,
}
TAGS = [{"key": "team", "value": "a"}, {"key": "b"}]
LIMITS = [{"calls": 5, "key": "user", "renewal_period": "minute"}]
CREATE = {
    "name": "chat",
    "config": CONFIG,
    "description": "d",
    "tags": TAGS,
    "rate_limits": LIMITS,
    "route_optimized": False,
}
BODIES = [
    pytest.param(NEW_SHAPE, CONFIG, id="config"),
    pytest.param(OLD_SHAPE, OLD_CONFIG, id="config in the older spelling"),
    pytest.param(NEW_ENDPOINT, CREATE, id="create"),
    pytest.param(TAG_CHANGES, {"add_tags": TAGS, "delete_tags": ["x"]}, id="tags"),
    pytest.param(NEW_RATE_LIMITS, {"rate_limits": LIMITS}, id="rate limits"),
    pytest.param(ROLLBACK, {"config_version": 1}, id="rollback"),
]
TEXTS = ["a b", "a/b", "x" * 63, "x" * 64, "x" * 127, "x" * 128, "x" * 255, "x" * 256, "é" * 4097, "@a", "-1", "a@b"]
TEXTS += ["models:/a/1", "models:/", "runs:/x/model", "/srv/models/a b", "7" * 18, "7" * 19, "Small", "CPU", "cuda:0"]
INTEGERS = [10**9, 10**9 + 1, 10**18 - 1, 10**18]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.copy(body)
    body[path[0]] = changed(body[path[0]], path[1:], value)
    return body


def without(body: Any, path: tuple[Any, ...]) -> Any:
    inner = copy.deepcopy(body)
    last = inner
    for key in path[:-1]:
        last = last[key]
    del last[path[-1]]
    return inner


def taken(reader: Reader[Any], body: Any) -> bool:
    try:
        reader(body, "")
    except InvalidField:
        return False
    return True


def probes(body: Any, schema: Any) -> Iterator[Any]:
    """Yield the body with each of its values replaced or removed, and with an unknown field."""
    values = [*ANY, *TEXTS, *INTEGERS, *dict.fromkeys(bounds(schema))]
    for path in places(body):
        here = body
        for key in path:
            here = here[key]
        if isinstance(here, dict):
            yield changed(body, path, here | {"colour": 1})
        if isinstance(here, list):
            yield changed(body, path, here * 33)
        if path:
            yield without(body, path)
        # Settings are no floats: 2.0 is an integer to JSON Schema and to all other readers
        floats = "engine_settings" not in path
        yield from (changed(body, path, value) for value in values if floats or not isinstance(value, float))


@pytest.mark.parametrize(("reader", "body"), BODIES)
def test_schema_and_reader_take_the_same_bodies(reader: Reader[Any], body: Any) -> None:
    """Schema and reader accept the same bodies, except for relations between fields, which the reader alone checks."""
    validator = jsonschema.Draft202012Validator(reader.schema)
    assert validator.is_valid(body)
    assert taken(reader, body)
    for probe in probes(body, reader.schema):
        if taken(reader, probe):
            assert validator.is_valid(probe), probe
        elif validator.is_valid(probe):
            with pytest.raises(InvalidField, match=r"traffic_config|one limit for each key|served_entities|entity_v"):
                reader(probe, "")
            assert reader in (NEW_ENDPOINT, NEW_RATE_LIMITS), probe


def test_both_spellings_are_one_schema() -> None:
    """Both spellings have one schema, and a body that mixes them is refused."""
    validator = jsonschema.Draft202012Validator(config_body.schema)
    for body, valid in ((CONFIG, True), (OLD_CONFIG, True), (CONFIG | OLD_CONFIG, False), ({}, False)):
        assert validator.is_valid(body) == taken(config_body, body) == valid
    assert config_body(CONFIG, "") == config_body(OLD_CONFIG, "")


def test_routes_of_the_management_api_have_the_readers_schemas() -> None:
    """The management routes have the readers' schemas, and each is a valid JSON Schema."""
    bodies = {(route.method, route.path): route.body for route in ROUTES if route.body is not None}
    one = f"{SERVING_ENDPOINTS}/<name>"
    assert {place: body for place, body in bodies.items() if place[1].startswith(SERVING_ENDPOINTS)} == {
        ("POST", SERVING_ENDPOINTS): NEW_ENDPOINT,
        ("PUT", f"{one}/config"): config_body,
        ("PUT", f"{one}/rate-limits"): NEW_RATE_LIMITS,
        ("POST", f"{one}/rollback"): ROLLBACK,
        ("PATCH", f"{one}/tags"): TAG_CHANGES,
    }
    for reader in bodies.values():
        jsonschema.Draft202012Validator.check_schema(reader.schema)
