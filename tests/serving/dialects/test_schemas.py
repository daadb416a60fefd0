"""The JSON schemas of request bodies take what the tables' readers take, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probes import ANY, bounds
from tool_probes import PROBES

from mlflow_llm.serving.dialects import FIELDS, REFUSED_FIELDS
from mlflow_llm.serving.dialects.fields.fields import Table
from mlflow_llm.serving.dialects.fields.scoring_fields import ScoreTable
from mlflow_llm.serving.dialects.fields.tables import DATABRICKS, MLFLOW, OPENAI, RERANK
from mlflow_llm.serving.interface.errors import InvalidField

HI = [{"role": "user", "content": "hi"}]
REQUIRED = {"messages": HI, "prompt": "x", "input": "x"}
TABLES = [
    pytest.param(table, id=f"{dialect}-{task}")
    for dialect, tables in (("openai", OPENAI), ("databricks", DATABRICKS), ("mlflow", MLFLOW))
    for task, table in tables.items()
    if task != "score"
]
SCORE_TABLES = [OPENAI["score"], DATABRICKS["score"], RERANK]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONTENTS = ["x", "", None, 5, [], ["x"], [{"type": "text", "text": "x"}], [{"type": "text"}], [{"type": "image_url"}]]
CONTENTS += [[{"type": "text", "text": "x", "more": 1}], [{"type": "text", "text": None}]]
URLS = [{"url": "https://h.example/a.png"}, {"url": "/a.png", "detail": "auto"}, {"url": "data:image/gif;base64,aGk="}]
URLS += [{"url": "file:///a.png", "detail": None}, {"url": ""}, {"url": 5}, {"url": None}, {}, "x", None, 5]
URLS += [{"url": "/a.png", **more} for more in ({"detail": "low"}, {"detail": 5}, {"more": 1})]
CONTENTS += [[{"type": "image_url", "image_url": given}] for given in URLS]
CONTENTS += [[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": URLS[0], "more": 1}]]
CALLS = [None, [], {}, 5, [CALL], [{}], [CALL | {"type": "x"}], [CALL | {"id": None}], [CALL | {"more": 1}]]
CUSTOM_CALL = {"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}
CALLS += [
    [CUSTOM_CALL],
    [CUSTOM_CALL | {"type": "function"}],
    [CUSTOM_CALL | {"custom": {"name": "f"}}],
    [CALL, CUSTOM_CALL],
]
CALLS += [[{"id": "a", "custom": {"name": "f", "input": "x"}}], [CUSTOM_CALL | {"custom": {"name": "f", "input": {}}}]]
CALLS += [[CALL | {"function": {"name": "f", "arguments": given}}] for given in ({}, {"a": 1}, None, 5, [])]
OTHERS = [{"refusal": given} for given in (None, [], {}, "x", False, 0)]
OTHERS += [{"name": given} for given in (None, "x", 5)] + [{"colour": 1}, {"annotations": []}]


def messages() -> Iterator[Any]:
    yield from (
        [],
        {},
        "hi",
        HI,
        [*HI, *HI],
        ["hi"],
        [*HI, {}],
        [{"content": "x"}],
        [{"role": ["user"], "content": ""}],
    )
    for role in ("system", "developer", "user", "assistant", "tool", "wizard", None):
        plain = {"role": role, "content": "x"}
        yield [{"role": role}]
        yield from ([plain | {"content": content}] for content in CONTENTS)
        yield from ([plain | more] for more in OTHERS)
        for id_ in (None, "", "a", 5):
            yield [plain | {"tool_call_id": id_}]
        for calls in CALLS:
            yield [plain | {"tool_calls": calls}]
            yield [{"role": role, "content": None, "tool_calls": calls}]
            yield [{"role": role, "tool_calls": calls}]


def taken(table: Table, body: dict[str, Any]) -> bool:
    try:
        table.read(body)
    except InvalidField:
        return False
    return True


@pytest.mark.parametrize("table", TABLES)
def test_schema_and_reader_take_the_same_values(table: Table) -> None:
    """Schema and reader agree for each field, refused ones too, on null, wrong types and values around the bounds."""
    properties = table.schema()["properties"]
    assert set(properties) == {*table.fields, *table.refused}
    for name, schema in properties.items():
        validator = jsonschema.Draft202012Validator(schema)
        probes = [*ANY, *bounds(schema), *(messages() if name == "messages" else PROBES.get(name, ()))]
        for value in probes:
            body = {table.required: REQUIRED[table.required], name: value}
            assert validator.is_valid(value) == taken(table, body), (name, str(value)[:200])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aé1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a1", max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*FIELDS["chat"], *FIELDS["completions"], *FIELDS["embeddings"], *REFUSED_FIELDS})


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    task=st.sampled_from(["chat", "completions", "embeddings"]),
)
def test_schema_and_table_take_the_same_bodies(body: dict[str, Any], task: str) -> None:
    """Schema and table accept the same junk bodies, with and without the field that a task needs."""
    table = MLFLOW[task]
    for given_body in (body, body | {table.required: REQUIRED[table.required]}):
        assert jsonschema.Draft202012Validator(table.schema()).is_valid(given_body) == taken(table, given_body)


def test_schemas_are_schemas() -> None:
    """Each schema is a valid JSON Schema, with null only where it means the default."""
    for tables in (OPENAI, DATABRICKS, MLFLOW):
        for task, table in tables.items():
            schema = table.schema()
            jsonschema.Draft202012Validator.check_schema(schema)
            if task == "score":
                continue
            for name, known in schema["properties"].items():
                assert ({"type": "null"} in known.get("anyOf", ())) == (name != table.required)


TEXTS = ["x", "", ["x"], [{"text": "y"}], {"text": "x"}, [], {}, [[]], [None], {"text": 1}, {"more": "x"}, 5, None]


@pytest.mark.parametrize("table", SCORE_TABLES, ids=["openai", "databricks", "rerank"])
def test_schemas_of_comparisons(table: ScoreTable) -> None:
    """Schema and table accept the same bodies of comparisons: two sides under one pair of names, other names null."""
    schema = jsonschema.Draft202012Validator(table.schema())
    jsonschema.Draft202012Validator.check_schema(table.schema())
    names = sorted({name for form in table.forms for name in form})
    bodies = [{}, *({name: "x"} for name in names)]
    for first, second in itertools.permutations(names, 2):
        bodies += [{first: "x", second: given} for given in TEXTS]
        bodies += [{first: "x", second: "x", third: given} for third in names for given in ("x", None)]
    for form in table.forms:
        both = dict.fromkeys(form, "x")
        for name, field in table.fields.items():
            if name not in names:
                bodies += [both | {name: value} for value in [*ANY, *bounds(field.read.schema)]]
    for body in bodies:
        only_ranked = body.get("query") is None and not {"top_n", "return_documents"}.isdisjoint(body)
        assert only_ranked or schema.is_valid(body) == taken(table, body), body
