"""Request bodies of the Databricks management API: create an endpoint, change its tags and its rate limits."""

from __future__ import annotations

from typing import Any

from ..interface.errors import InvalidField
from ..interface.readers import Entry, Reader, integer, list_of, one_of, reader, record, refused, string
from .config_body import MAX_RATE, config_body, name_in_urls


def _short(minimum: int, maximum: int) -> Reader[str]:
    allowed = f"a text of {minimum} to {maximum} characters" if minimum else f"a text of at most {maximum} characters"

    @reader(type="string", maxLength=maximum, **({"minLength": minimum} if minimum else {}))
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or not minimum <= len(value) <= maximum:
            raise InvalidField(path, value, allowed)
        if "\0" in value:  # PostgreSQL stores no NUL
            raise InvalidField(path, value, f"{allowed} without NUL")
        return string(value, path)

    return read


_TAG_KEY = _short(1, 127)
_TAGS = list_of(
    record(key=Entry(_TAG_KEY, required="a text of 1 to 127 characters"), value=Entry(_short(0, 255))), "a list of tags"
)


@reader(**_TAGS.schema)
def tags(value: Any, path: str) -> dict[str, str]:
    """Read ``[{"key": …, "value": …}]``; a missing value becomes ""."""
    return {tag["key"]: tag.get("value", "") for tag in _TAGS(value, path)}


SET_BY_LIMITS = "are set with /api/2.0/limits or mlflow-llm limits"
AI_GATEWAY = (
    "guardrails and payload_log are fields of config, rate_limits has calls a minute, and all other limits "
    "are set with /api/2.0/limits; usage is always in the ledger"
)
_CALLS = record(
    calls=Entry(integer(0, MAX_RATE), required=f"an integer from 0 to {MAX_RATE}; limits on tokens {SET_BY_LIMITS}"),
    tokens=Entry(refused(f"limits {SET_BY_LIMITS} (itpm, otpm)"), "Refused: input and output have limits of their own"),
    principal=Entry(refused(f"limits {SET_BY_LIMITS} (scope key or tenant)"), "Refused: a limit is for each caller"),
    soft=Entry(refused(f"limits {SET_BY_LIMITS} --soft"), "Refused: what is set here refuses requests"),
    key=Entry(
        one_of("endpoint", "user"),
        '"endpoint" (the default): all requests together; "user": those of each user',
    ),
    renewal_period=Entry(one_of("minute"), required='"minute"'),
)
_RATE_LIMITS = list_of(_CALLS, "a list of limits")


@reader(**_RATE_LIMITS.schema)
def rate_limits(value: Any, path: str) -> dict[tuple[str, str], int]:
    """Read ``[{"calls": 100, "key": "endpoint", "renewal_period": "minute"}]`` into {(scope, kind): value}."""
    found: dict[tuple[str, str], int] = {}
    for place, limit in enumerate(_RATE_LIMITS(value, path)):
        scope = limit.get("key", "endpoint")
        if (scope, "qpm") in found:
            raise InvalidField(f"{path}[{place}].key", scope, "one limit for each key")
        found[scope, "qpm"] = limit["calls"]
    return found


NEW_ENDPOINT = record(
    name=Entry(name_in_urls, required="the name of the endpoint"),
    config=Entry(config_body, required="what the endpoint serves"),
    description=Entry(_short(0, 4096)),
    tags=Entry(tags),
    rate_limits=Entry(rate_limits),
    ai_gateway=Entry(refused(AI_GATEWAY), "Refused: its parts have fields of their own"),
    # MLflow's Databricks client always sends it
    route_optimized=Entry(one_of(False, why="all routes are direct")),
)
TAG_CHANGES = record(
    add_tags=Entry(tags),
    delete_tags=Entry(list_of(_short(0, 127), "a list of keys"), "Keys to delete; unknown ones are ignored"),
)
ROLLBACK = record(
    config_version=Entry(
        integer(1, 2**31 - 1), "The version to restore; without it, the one that was active before the present one"
    ),
)
NEW_RATE_LIMITS = record(rate_limits=Entry(rate_limits))
