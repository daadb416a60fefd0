"""Schemas that are refused: by keyword and JSON pointer, and never with another error."""

from __future__ import annotations

import json
from typing import Any

import grammar_texts as texts
import pytest

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.grammar import grammar_of

FIELD = "response_format.json_schema.schema"


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidField) as raised:
        grammar_of(Constraint(kind="json_schema", value=schema, field=FIELD))
    assert raised.value.param == FIELD
    assert raised.value.message.startswith(FIELD)
    return raised.value.message.removeprefix(FIELD)


def of_a(schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "null"}}, "#/properties/a: 'not' is not allowed"),
        ({"if": {}, "then": {}}, "#/properties/a: 'if' is not allowed"),
        ({"type": "array", "contains": {"type": "null"}}, "#/properties/a: 'contains'"),
        ({"type": "array", "items": {}, "unevaluatedItems": False}, "#/properties/a: 'unevaluatedItems'"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, "#/properties/a: 'uniqueItems'"),
        ({"$dynamicRef": "#x"}, "#/properties/a: '$dynamicRef'"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, "#/properties/a: 'oneOf'"),
        (
            {"oneOf": [{"type": "string"}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
            "#/properties/a: 'oneOf'",
        ),
        ({"$ref": "https://example.com/schema.json"}, "#/properties/a/$ref: 'https://example.com/schema.json'"),
        ({"$ref": "#/$defs/missing"}, "#/properties/a/$ref: '#/$defs/missing'"),
        ({"$ref": "#/properties/a"}, "#/properties/a: '$ref'"),
        ({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}, "#/properties/a: '$ref'"),
        ({"type": "text"}, "#/properties/a/type: 'text'"),
        ({"type": []}, "#/properties/a/type: []"),
        ({"enum": []}, "#/properties/a/enum: []"),
        ({"anyOf": []}, "#/properties/a/anyOf: []"),
        ({"type": "string", "minLength": -1}, "#/properties/a/minLength: -1"),
        ({"type": "string", "minLength": 10**9}, "#/properties/a/minLength: 1000000000"),
        ({"type": "array", "minItems": 10**9}, "#/properties/a/minItems: 1000000000"),
        ({"type": "integer", "multipleOf": 0}, "#/properties/a/multipleOf: 0"),
        ({"type": "integer", "multipleOf": 123457}, "#/properties/a/multipleOf: 123457"),
        ({"type": "integer", "minimum": 10**30}, "#/properties/a/minimum: 1"),
        ({"type": "integer", "minimum": 2**53 + 1}, "#/properties/a/minimum: 9007199254740993"),
        ({"enum": [2**53 + 1]}, "#/properties/a/enum: 9007199254740993"),
        ({"const": -9.727837981879871e26}, "#/properties/a/const: -9.727837981879871e+26"),
        ({"type": "object", "minProperties": 10**20}, "#/properties/a/minProperties: 1"),
        ({"const": "\x01"}, "#/properties/a/const: '\\x01'"),
        ({"type": "string", "pattern": "(?=x)"}, "#/properties/a/pattern: '(?=x)'"),
        ({"patternProperties": {"a": {}, "b": {}}}, "#/properties/a: 'patternProperties'"),
        (
            {"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "^b"}},
            "#/properties/a: 'propertyNames'",
        ),
        (
            {"properties": {"b": {}}, "additionalProperties": True, "minProperties": 1},
            "#/properties/a: 'minProperties'",
        ),
        ({"x-guidance": {}}, "#/properties/a: 'x-guidance'"),
        ({"properties": 5}, "#/properties/a/properties: 5"),
        ({"items": 5}, "#/properties/a/items: 5"),
        (False, ": 'the schema' is not allowed; expected a schema that some value satisfies"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, ": 'the schema'"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, ": 'the schema'"),
        (5, "#/properties: "),
    ],
    ids=str,
)
def test_what_is_refused_says_what_and_where(schema: Any, message: str) -> None:
    """The error names the request field, the JSON pointer and the keyword or its value."""
    assert refusal(of_a(schema)).startswith(message)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"unused": {"x-guidance": {"lenient": True}}}},
        {"allOf": [{"x-guidance": {"whitespace_flexible": True}}]},
        {"x-guidance": {"lenient": True}, "type": "object"},
        {"type": "array", "items": {"x-guidance": 1}},
        {"$ref": "#/components/a", "components": {"a": {"x-guidance": 1}}},
    ],
    ids=str,
)
def test_x_guidance_options_are_refused(schema: Any) -> None:
    """x-guidance is refused wherever it is a keyword."""
    assert "x-guidance" in refusal(schema)


def test_a_property_may_be_called_x_guidance() -> None:
    """A property may be called x-guidance and hold an object with that key: neither is taken for an option."""
    schema = {
        "type": "object",
        "properties": {"x-guidance": {"const": {"x-guidance": 1}}},
        "examples": [{"x-guidance": 1}],
    }
    assert texts.takes(texts.of("json_schema", schema), '{"x-guidance": {"x-guidance": 1}}')


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _itself() -> Any:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    return schema


def _chain(length: int) -> Any:
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE: list[Any] = [
    _nested(1000),
    _nested(40),
    _itself(),
    _chain(1000),
    {"enum": list(range(60_000))},
    {"type": "object", "description": "x" * 2_000_000},
    {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(20)]} for i in range(20)]},
    {
        "anyOf": [{"properties": {f"p{i}": {"anyOf": [{"const": i}, {"type": "null"}]}}} for i in range(3000)],
        "$schema": "x",
    },
    {"allOf": [{"properties": {f"p{i}": {}}, "additionalProperties": True} for i in range(5000)]},
    {
        "properties": {f"p{i}": {} for i in range(8000)},
        "required": [f"r{i}" for i in range(8000)],
        "maxProperties": 9000,
    },
    {"type": "object", "properties": {f"p{i}": {} for i in range(8000)}, "minProperties": 1},
    {"patternProperties": {f"^p{i}x": {} for i in range(8000)}},
    {"oneOf": [{"const": i} for i in range(4000)]},
    {
        "$defs": {
            name: {"properties": {side: {"$ref": f"#/$defs/{name}"} for side in sides}, "required": [*sides]}
            for name, sides in (("a", ("l", "m", "r")), ("b", ("l", "m", "r")))
        },
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    {"const": float("nan")},
    {"const": 10**400},
    {"properties": {1: {}}},
    {"const": {1, 2}},
    {"const": "\ud800"},
    {"$ref": "#/" + "a/" * 10_000},
    {"$ref": "http://[::1"},
    {"$ref": 5},
    {"$schema": "http://json-schema.org/draft-03/schema#"},
    {"$schema": 5},
    "a text",
    None,
    [],
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_schemas_are_refused(number: int) -> None:
    """Schemas that are too large, too deep, endless or not JSON are refused with their field, soon and without
    recursion.
    """
    assert refusal(HOSTILE[number])


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"nullable": True, "type": "string", "xml": {}, "minLenght": 5}, ['"a"'], ["null"]),
        ({"type": "string", "format": "binary", "contentEncoding": "base64", "deprecated": True}, ['"%"'], ["1"]),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "type": "null",
                "definitions": {"a": {"type": "integer"}},
            },
            ["1"],
            ["null"],
        ),
        (
            {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer", "minimum": 3}}},
            ["3", "5"],
            ["2", "6"],
        ),
        (
            {"$id": "https://a.example/s", "$ref": "#thing", "$defs": {"a": {"$anchor": "thing", "const": 1}}},
            ["1"],
            ["2"],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "allOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}],
            },
            ['{"a":1,"b":2}', '{"b":2}'],
            ['{"a":1}', '{"a":1,"b":2,"c":3}'],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
            ['{"a":1,"b":2}'],
            ['{"b":1,"a":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1},
            ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
            ["{}"],
        ),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "maxProperties": 1},
            ["{}", '{"b":2}'],
            ['{"a":1,"b":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "dependentRequired": {"a": ["b"]}},
            ["{}", '{"b":2}', '{"a":1,"b":2}'],
            ['{"a":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "oneOf": [{"required": ["a"]}, {"properties": {"a": False}}],
            },
            ["{}", '{"a":1}'],
            ['{"b":1}'],
        ),
        (
            {
                "oneOf": [
                    {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False, "type": "object"},
                    {"properties": {"b": {}}, "required": ["b"], "additionalProperties": False, "type": "object"},
                ]
            },
            ['{"a":1}', '{"b":1}'],
            ["{}", '{"a":1,"b":1}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
            ['{"a":1,"b":[]}'],
            ['{"a":1}'],
        ),
        ({"type": ["integer", "string"], "minimum": 3, "minLength": 2}, ["3", '"ab"'], ["2", '"a"']),
        ({"enum": [1, "a", None, 2], "type": ["integer", "null"], "minimum": 2}, ["2", "null"], ["1", '"a"']),
        ({"properties": {"a": {"type": "string"}}}, ['{"a":"x"}'], ['"x"']),
        ({"type": "number", "multipleOf": 0.01}, ["1.25", "-3", "0.1"], ["1.255"]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 2},
            ["[]", "[1]", '[1,"a"]'],
            ['["a"]', '[1,"a","b"]'],
        ),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        (
            {"type": "object", "patternProperties": {"^(en|fr)$": {"type": "integer"}}, "required": ["fr"]},
            ['{"en":1,"fr":2}', '{"fr":2}'],
            ["{}", '{"en":1}', '{"fr":"x"}', '{"fr":1,"fr":2}', '{"de":1,"fr":1}'],
        ),
        (
            {"type": "object", "patternProperties": {"^en|fr$": {"type": "integer"}}},
            ['{"end":1,"le fr":2}'],
            ['{"other":1}', '{"end":"x"}'],
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_people_send_is_held_to(schema: Any, right: list[str], wrong: list[str]) -> None:
    """Common schemas are enforced: references with siblings, annotations, property choices, property counts."""
    made = texts.of("json_schema", schema)
    assert [text for text in right if not texts.takes(made, text)] == []
    assert [text for text in wrong if texts.takes(made, text)] == []


def test_a_schema_that_refers_to_itself_nests_to_an_end() -> None:
    """A recursive schema allows 24 levels of arrays and objects."""
    made = texts.of("json_schema", {"type": "array", "items": {"$ref": "#"}})
    assert texts.takes(made, "[" * 24 + "]" * 24)
    assert not texts.takes(made, "[" * 25 + "]" * 25)
