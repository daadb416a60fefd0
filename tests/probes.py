"""Values for comparing a reader with its JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANY = [None, True, False, 0, 1, -1, 5, 0.5, 2.0, 10**400, 1e300, "", "x", "1", "auto", "none"]
ANY += [[], {}, [0], [False], [1], [2.0], [1.5], [-1], [True], [None], ["a"], [""], ["a", 1], [1, "a"], ["text"]]
ANY += [[[]], [[1]], [[1], [2, 2.0]], [[1], "a"], [[True]], [2**31 - 1], [2**31], {"a": 1}, {"a": None}]
ANY += [{"type": "text"}, {"type": "json_object"}, {"1": 100}, {"1": 101}, {"1": None}, {"1": True}, {"x": 1}]
ANY += [{"1234567890": 1}, {str(i): 0 for i in range(1024)}, {str(i): 0 for i in range(1025)}]
ANY += [{"include_usage": given} for given in (True, None, 0, "x")]
ANY += [{"include_obfuscation": given} for given in (True, False, None, 0)]


def bounds(schema: Any) -> Iterator[Any]:
    """Return values at, inside and just outside of every bound, and every option, that a schema has."""
    if isinstance(schema, dict):
        for key in ("minimum", "maximum", "exclusiveMinimum"):
            if key in schema:
                yield from (schema[key], schema[key] - 1, schema[key] + 1, schema[key] - 1e-9, schema[key] + 1e-9)
        yield from schema.get("enum", ())
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from bounds(inner)
