"""The schemas that pydantic 2 generates from Python's types."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal, NamedTuple

import grammar_texts as texts
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter

from mlflow_llm.serving.interface.errors import InvalidField


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str


class Dog(BaseModel):
    kind: Literal["dog"]
    age: int = Field(ge=0, le=30, description="in years")


class Tree(BaseModel):
    value: int
    children: list[Tree] = []
    parent: Tree | None = None


class Sealed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    note: str | None = None


class Pair(NamedTuple):
    first: int
    second: str


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "decimal": (decimal.Decimal, ["1.5", '"1.50"'], ["true"]),
    "uuid4": (pydantic.UUID4, ['"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d"'], ['"9b1deb4d-3b7d-1bad-9bdd-2b0d7b3dcb6d"']),
    "uuid": (uuid.UUID, ['"9b1deb4d-3b7d-1bad-9bdd-2b0d7b3dcb6d"'], ['"x"']),
    "path": (pathlib.Path, ['"/a/b"'], ["1"]),
    "bytes": (bytes, ['"abc"'], ["1"]),
    "named keys": (dict[Literal["a", "b"], int], ['{"a":1}', '{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": "x"}']),
    "enum keys": (dict[Colour, int], ['{"red":1}'], ['{"green":1}']),
    "dates as keys": (dict[datetime.date, str], ['{"2024-02-29":"x"}'], ['{"2023-02-29":"x"}', '{"x":"y"}']),
    "keys of a shape": (
        dict[Annotated[str, Field(pattern="^a")], int],
        ['{"ab":1,"ac":2}'],
        ['{"b":1}'],
    ),
    "any keys": (dict[str, int], ['{"x":1}', "{}"], ['{"x":"y"}']),
    "date-time": (
        datetime.datetime,
        ['"2024-02-29T23:59:59.123456Z"', '"2024-01-31T00:00:00+02:00"'],
        ['"2023-02-29T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"0000-01-01T00:00:00Z"', '"2024-01-01 00:00:00Z"'],
    ),
    "time": (datetime.time, ['"12:30:00Z"'], ['"12:30:60Z"']),
    "duration": (datetime.timedelta, ['"P3DT2H"', '"PT5M"'], ['"P"', '"PT"', '"3 days"']),
    "bounded integer": (Annotated[int, Field(gt=1, le=9, multiple_of=2)], ["2", "8"], ["1", "3", "10", "-2", "02"]),
    "bounded number": (Annotated[float, Field(gt=0.5, lt=2)], ["0.51", "1.9999"], ["0.5", "2", "2.0", "0.4"]),
    "bounded text": (Annotated[str, Field(min_length=2, max_length=3)], ['"né"', '"a\\nb"'], ['"a"', '"abcd"']),
    "union by tag": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        ['{"kind":"cat","name":"x"}', '{"kind": "dog", "age": 30}'],
        ['{"name":"x"}', '{"kind":"dog","age":31}', '{"kind":"cat","age":1}', '{"kind":"cow","name":"x"}'],
    ),
    "optional": (int | None, ["1", "null"], ['"x"']),
    "recursive": (
        Tree,
        ['{"value":1}', '{"value":1,"children":[{"value":2,"children":[]}],"parent":{"value":3,"parent":null}}'],
        ["{}", '{"value":1,"children":[1]}'],
    ),
    "root model": (RootModel[list[int]], ["[]", "[1,2]"], ["{}", '["a"]']),
    "tuple": (tuple[int, str], ['[1,"a"]'], ["[1]", '[1,"a",2]', '["a",1]']),
    "named tuple": (Pair, ['[1,"a"]'], ["[1]"]),
    "long tuple": (tuple[int, ...], ["[]", "[1,2,3]"], ['["a"]']),
    "set of few": (set[Literal["a", "b", "c"]], ["[]", '["a","c"]'], ['["a","a"]', '["a","b","a"]']),
    "address": (ipaddress.IPv4Address, ['"127.0.0.1"'], ['"256.0.0.1"']),
    "url": (pydantic.AnyUrl, ['"https://a.example/b?c=d"'], ['"no url"', '""']),
    "secret": (pydantic.SecretStr, ['"x"'], ["1"]),
    "json": (pydantic.Json[Any], ['"{}"'], ["{}"]),
    "expression": (re.Pattern[str], ['"a+"'], ["1"]),
    "size": (pydantic.ByteSize, ["1", '"1 kb"'], ["-1", '"kb"']),
    "literals": (Literal[1, "a", None, True], ["1", '"a"', "null", "true"], ["2", '"1"', "false"]),
    "sealed": (
        Sealed,
        ['{"pet":{"kind":"cat","name":"x"},"note":null}'],
        ['{"pet":{"kind":"cat","name":"x"},"more":1}'],
    ),
    "anything": (Any, ["1", '{"a":[null]}'], ["nul"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_type_of_pydantic_is_held_to(name: str) -> None:
    """Values of the type are taken, others are not, whether the schema is for reading or for writing."""
    kind, right, wrong = CASES[name]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    made = texts.of("json_schema", adapter.json_schema())
    assert [text for text in right if not texts.takes(made, text)] == []
    assert [text for text in wrong if texts.takes(made, text)] == []
    for text in right:
        adapter.validate_json(text)
    texts.of("json_schema", adapter.json_schema(mode="serialization"))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-1.50", ".5", "12.", "+0"], ["", "-", ".", "1e5", "1.2.3"]),
        (
            r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)",
            ["1234.56", "0.5", "1."],
            ["12345", "1.234", "."],
        ),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$", ["1234567.89"], ["1.234"]),
        (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)", ["123", "1.23", ".123"], ["1234", "12.34"]),
    ],
)
def test_the_decimals_of_older_pydantic_are_taken_without_their_look_ahead(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    """The decimal patterns of older pydantic are accepted as if without their look-ahead, and with a bounded number of
    digits.
    """
    made = texts.of("json_schema", {"type": "string", "pattern": pattern})
    assert [text for text in right if not texts.takes(made, json.dumps(text)) or not re.search(pattern, text)] == []
    assert [text for text in wrong if texts.takes(made, json.dumps(text))] == []
    assert not texts.takes(made, json.dumps("1" * 50))


def test_a_set_of_anything_is_refused() -> None:
    """A set of anything is refused, since no grammar can forbid duplicates in it."""
    with pytest.raises(InvalidField, match=r"^field#/properties/tags: 'uniqueItems' is not allowed; expected "):
        texts.of("json_schema", pydantic.create_model("Tagged", tags=(set[str], ...)).model_json_schema())
