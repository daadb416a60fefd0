"""Enumerations in the OpenAPI document have one type each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from mlflow_llm.serving.http.openapi.document import document
from mlflow_llm.serving.http.openapi.plain_enums import plain_enums
from mlflow_llm.serving.http.routes import ROUTES


@pytest.mark.parametrize(
    "values",
    [
        [None, []],
        [False, True, "never"],
        [None, False],
        ["a", None],
        [1, 2, None],
        [{}, None],
        [1, True],
        [["a"], None],
        [{"a": 1}, False],
        [{"a": "b"}],
    ],
)
def test_a_mixed_enumeration_accepts_the_same(values: list[Any]) -> None:
    """The choice accepts each value of the enumeration, and no others."""
    made = plain_enums({"enum": values, "description": "words"})
    assert made["description"] == "words"
    assert "enum" not in made
    check = jsonschema.Draft202012Validator(made)
    others = ([1], ["a"], ["a", "a"], ["b"], {"a": 1}, {"a": "b"}, {"a": 1, "b": 1})
    for value in (None, [], {}, False, True, "never", "a", "b", 1, 2, 3, *others):
        assert check.is_valid(value) == any(type(value) is type(one) and value == one for one in values), value


def test_names_and_texts_stay() -> None:
    """Fields that are called like a keyword are schemas, examples are not, and an enumeration of texts stays."""
    shape = {"properties": {"default": {"enum": [None, False]}, "enum": {"enum": ["a", "b"]}}, "example": {"enum": [1]}}
    made = plain_enums(shape)
    assert "anyOf" in made["properties"]["default"]
    assert made["properties"]["enum"] == {"type": "string", "enum": ["a", "b"]}
    assert made["example"] == {"enum": [1]}


@pytest.mark.parametrize("value", [False, True])
def test_a_constant_truth_value_is_no_const(value: bool) -> None:
    """A truth value is written without ``const``, of which generators make code that does not compile."""
    made = plain_enums({"const": value, "description": "words"})
    assert made == {"type": "boolean", "not": {"const": not value}, "description": "words"}
    assert [jsonschema.Draft202012Validator(made).is_valid(one) for one in (value, not value, None)] == [
        True,
        False,
        False,
    ]


def test_arrays_say_what_is_in_them() -> None:
    """An array without ``items`` gets some that allow everything, and others keep theirs."""
    assert plain_enums({"type": "array"}) == {"type": "array", "items": {}}
    assert plain_enums({"type": "array", "prefixItems": []}) == {"type": "array", "prefixItems": []}


def test_the_document_has_no_mixed_enumeration() -> None:
    """No enumeration of the document has values of several types, or whole lists and objects."""
    for values in enumerations(document(ROUTES)):
        assert len(set(map(type, values))) == 1, values
        assert not isinstance(values[0], list | dict), values


def enumerations(node: Any) -> Any:
    if isinstance(node, dict):
        if isinstance(node.get("enum"), list):
            yield node["enum"]
        node = list(node.values())
    for entry in node if isinstance(node, list) else ():
        yield from enumerations(entry)


def test_a_member_that_is_always_null_is_an_enumeration() -> None:
    """No member of an object is of type ``null`` alone, which openapi-generator cannot make Python of; its meaning and
    what is said of it stay."""
    made = plain_enums({"type": "object", "properties": {"refusal": {"type": "null", "description": "words"}}})
    assert made["properties"]["refusal"] == {"enum": [None], "description": "words"}
    check = jsonschema.Draft202012Validator(made)
    assert check.is_valid({"refusal": None})
    assert not check.is_valid({"refusal": "no"})
    assert all(member.get("type") != "null" for member in _members(document(ROUTES)))


def _members(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, list):
        for entry in schema:
            yield from _members(entry)
    elif isinstance(schema, dict):
        found = schema.get("properties")
        if isinstance(found, dict):
            yield from (one for one in found.values() if isinstance(one, dict))
        for key, value in schema.items():
            if key not in ("example", "examples"):
                yield from _members(value)
