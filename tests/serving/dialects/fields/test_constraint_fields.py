"""The fields that constrain a reply's form, each read into one ``Constraint``."""

import pytest
from tool_probes import FORM, SCHEMA

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField

HI = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "x"}
GRAMMAR = 'start: "a"'


def _constraint(dialect="openai", body=HI, **fields):
    return DIALECTS[dialect].read({**body, **fields}).sampling.constraint


@pytest.mark.parametrize("dialect", ["openai", "databricks", "mlflow"])
@pytest.mark.parametrize("body", [HI, PROMPT], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "value", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
        ({"response_format": FORM}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json", "value": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.value",
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.value",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
            "response_format.value.schema",
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+", "response_format.value"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": '{"type": "null"}'}, "json_schema", {"type": "null"}, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b"), "guided_choice"),
        ({"guided_grammar": GRAMMAR}, "lark", GRAMMAR, "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "lark", GRAMMAR, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "json": None, "json_object": False, "disable_fallback": True}},
            "regex",
            "a",
            "structured_outputs.regex",
        ),
    ],
)
def test_each_field_becomes_a_constraint(dialect, body, fields, kind, value, field):
    """Each constraint field is read into a kind, a value and the field's path."""
    assert _constraint(dialect, body, **fields) == Constraint(kind=kind, value=value, field=field)


@pytest.mark.parametrize(
    ("fields", "compact"),
    [
        ({"json": SCHEMA, "disable_any_whitespace": True}, True),
        ({"json_object": True, "disable_any_whitespace": True}, True),
        ({"json": SCHEMA, "disable_any_whitespace": False}, False),
        ({"json": SCHEMA, "disable_any_whitespace": None}, False),
        ({"regex": "a b", "disable_any_whitespace": True}, False),
    ],
)
def test_json_without_white_space(fields, compact):
    """``disable_any_whitespace`` makes JSON compact and does not change a regular expression."""
    assert _constraint(structured_outputs=fields).compact is compact


def test_strict_or_not_is_the_same():
    """``strict`` makes no difference: the schema is enforced with any value."""
    for strict in (True, False, None):
        form = {**FORM, "json_schema": {**FORM["json_schema"], "strict": strict, "description": "d"}}
        assert _constraint(response_format=form) == _constraint(response_format=FORM)


def test_type_text_overrides_the_model_and_null_does_not():
    """Type text overrides what a model was logged with, and gives way to another field; null says nothing."""
    assert _constraint(response_format={"type": "text"}) == Constraint(kind="text", field="response_format")
    assert _constraint(response_format={"type": "text"}, guided_regex="a").kind == "regex"
    assert _constraint(response_format=None, guided_json=None, structured_outputs=None) is None


@pytest.mark.parametrize(
    ("fields", "param", "other"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "guided_choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json", "structured_outputs.regex"),
    ],
)
def test_two_forms_are_refused_by_both_names(fields, param, other):
    """A second constraint is refused with its own field, and the message names the first."""
    with pytest.raises(InvalidField, match=f"null: {other} says") as caught:
        _constraint(**fields)
    assert caught.value.param == param
    assert "regex" not in caught.value.message.partition(" is not allowed")[0].removeprefix(param)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        ({"response_format": {"type": "json"}}, "response_format.value", "an object"),
        ({"response_format": {"type": "json", "value": "{}"}}, "response_format.value", "an object"),
        ({"response_format": {"type": "json", "schema": {}}}, "response_format.schema", "null with type json"),
        ({"response_format": {"type": "text", "value": "a"}}, "response_format.value", "null with type text"),
        ({"response_format": {"type": "regex", "value": ""}}, "response_format.value", "not empty"),
        (
            {"response_format": {"type": "json_object", "value": {}, "schema": {}}},
            "response_format.schema",
            "response_format.value says it",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "a JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "a name",
        ),
        (
            {"response_format": {**FORM, "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "letters",
        ),
        ({"response_format": {"type": "json_object", "grammar": {}}}, "response_format.grammar", "no such field"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "null with"),
        ({"guided_json": "{"}, "guided_json", "the text of one"),
        ({"guided_json": '{"a": '}, "guided_json", "the text of one"),
        ({"guided_json": "{" + '"a":{' * 5000 + "}" * 5001}, "guided_json", "the text of one"),
        ({"guided_json": {"a": object()}}, "guided_json", "JSON's values"),
        ({"guided_json": {"a": "\ud800"}}, "guided_json", "JSON's values"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "not empty"),
        ({"guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern", "white space"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "llguidance"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of json, regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "null"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "null"),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "additionalProperties",
        ),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml", "no such field"),
    ],
)
def test_invalid_constraints_name_their_path(fields, param, words):
    """An invalid constraint is refused with the path of the value at fault and what is allowed there."""
    with pytest.raises(InvalidField) as caught:
        _constraint(**fields)
    assert caught.value.param == param
    assert words in caught.value.message
    assert len(caught.value.message) < 500
