"""The types of arguments, from the schemas of tools."""

import pytest

from mlflow_llm.serving.interface.request import Tool
from mlflow_llm.serving.tool_calls.argument_types import argument_types

DEFS = {"Unit": {"enum": ["c", "f"]}, "Loop": {"$ref": "#/$defs/Loop"}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"type": "number", "nullable": True}, ("number", "null")),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("string", "null")),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, ("integer",)),
        ({"enum": ["a", 1, None]}, ("string", "integer", "null")),
        ({"const": True}, ("boolean",)),
        ({"$ref": "#/$defs/Unit"}, ("string",)),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "https://elsewhere/schema"}, None),
        ({}, None),
        (True, None),
    ],
)
def test_types(schema, types):
    """Types come from type, enum, const, unions and local references of the schema; open schemas have none."""
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": schema}, "$defs": DEFS})
    assert argument_types([tool]) == {"f": {"x": types} if types else {}}


def test_tools_without_parameters():
    """A tool without parameters, or with a schema that has no properties, has no types."""
    tools = [Tool(name="f"), Tool(name="g", parameters={"properties": 3}), Tool(name="h", parameters={})]
    assert argument_types(tools) == {"f": {}, "g": {}, "h": {}}
