"""Schemas of the test suite, changed at random: refused or held to, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import grammar_texts as texts
import jsonschema
import llguidance
import numpy as np
import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.document import DRAFTS
from mlflow_llm.serving.structured.keywords import SHAPES

SUITE = json.loads((Path(__file__).parent / "json_schema_test_suite.json").read_text())["drafts"]
SCHEMAS = [schema for files in SUITE.values() for cases in files.values() for _, schema, _ in cases]
KEYWORDS = [*SHAPES, "const", "$ref", "$id", "$anchor", "if", "then", "$defs", "discriminator"]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, 10**20, 1e308, "", "a", "#", "#/$defs/a", "^a", "string", "integer"),
    *([], {}, [{}], ["a"], [True, False], {"a": True}, {"a": {"$ref": "#"}}, ["string", "null"]),
    [{"type": "string"}, {"type": "object", "properties": {"a": {"const": 1}}}],
    [1, 1.0, True, None, "a", {"a": 1}, [1]],
]
MAX_BYTES = 300


def changed(draw: random.Random) -> Any:
    schema = copy.deepcopy(draw.choice(SCHEMAS))
    for _ in range(draw.randint(1, 4)):
        node = schema
        for _ in range(draw.randint(0, 4)):
            below = [value for value in node.values() if isinstance(value, dict)] if isinstance(node, dict) else []
            node = draw.choice(below) if below else node
        if isinstance(node, dict):
            node[draw.choice(KEYWORDS)] = copy.deepcopy(draw.choice(VALUES if draw.random() < 0.6 else SCHEMAS))
    if isinstance(schema, dict) and draw.random() < 0.3:
        schema = {"$schema": draw.choice([*DRAFTS]), **schema}
    return schema


def drawn(made: llguidance.LLMatcher, draw: random.Random) -> bytes | None:
    """Return a text of randomly drawn allowed bytes, or None if it has not ended or is not UTF-8."""
    assert made.reset()
    written = bytearray()
    for _ in range(MAX_BYTES):
        bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: texts.END]).tolist()
        if made.is_stopped() or not allowed or (bits[texts.END] and draw.random() < 0.4):
            break
        likely = [byte for byte in allowed if byte in b'"]}'] if draw.random() < 0.4 else []
        likely = likely or [byte for byte in allowed if byte in b'"]}abfo01,:{[2']
        byte = draw.choice(likely or allowed)
        assert made.consume_token(byte)
        written.append(byte)
    return bytes(written) if made.is_accepting() else None


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_schema_is_refused_or_held_to(seed: int) -> None:
    """A mutated schema is refused, does not compile, or gives texts that ``jsonschema`` finds valid."""
    draw, judged = random.Random(seed), 0
    for _ in range(1500):
        schema = changed(draw)
        try:
            made = texts.of("json_schema", schema)
        except (InvalidField, ValueError):
            continue
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError:
            continue  # not a schema by JSON Schema's definition, so it has no meaning
        for _ in range(2):
            text = drawn(made, draw)
            if text is not None and text.decode(errors="ignore").encode() == text:
                judged += 1
                assert kind(schema).is_valid(json.loads(text)), f"{json.dumps(schema)}\n{text!r}"
    assert judged > 100
