"""Texts drawn at random from what a grammar allows: every one satisfies its schema, and comes to an end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema_rs
import llguidance
import numpy as np
import pytest
from random_schemas import random_schema
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from mlflow_llm.serving.engine.constraints.grammar_state import GrammarState, unpacked
from mlflow_llm.serving.engine.constraints.grammar_tokenizer import GrammarTokenizer, make
from mlflow_llm.serving.engine.constraints.grammars import compile_grammar
from mlflow_llm.serving.interface.constraint import Constraint, Grammar
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Sampling
from mlflow_llm.serving.structured.grammar import grammar_of

MAX_TOKENS = 2_000
SCHEMAS = 200
ENDS = b'"]}'

WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country, e.g. Bogotá, Colombia"},
        "units": {"type": ["string", "null"], "enum": ["celsius", "fahrenheit", None]},
    },
    "required": ["location", "units"],
    "additionalProperties": False,
}
STEPS = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
        "final_answer": {"type": "string"},
    },
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
            "required": ["explanation", "output"],
            "additionalProperties": False,
        }
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
USER_INTERFACE = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["div", "button", "form"]},
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "attributes": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["type", "label", "children"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    """Return a tokenizer of a few hundred JSON tokens, some of which hold a whole key or more."""
    trained = ByteLevelBPETokenizer()
    sample = json.dumps({"name": "a", "value": [1, 2.5], "items": {"a": "b", "id": None}})
    texts = [sample, sample.replace(" ", ""), '{"a":1,"a":2}', '"a","a":"a"', "2024-02-29T10:00:00Z é"]
    trained.train_from_iterator(texts * 50, vocab_size=700, min_frequency=2, show_progress=False)
    return make(Tokenizer.from_str(trained.to_str()), frozenset(), trained.get_vocab_size())


def grammar_state(grammar: Grammar, tokenizer: GrammarTokenizer) -> GrammarState:
    matcher = compile_grammar(grammar.source, tokenizer)
    assert isinstance(matcher, llguidance.LLMatcher), matcher
    return GrammarState(matcher, tokenizer, Sampling(max_tokens=MAX_TOKENS, grammar=grammar), grammar)


def drawn(grammar: Grammar, tokenizer: GrammarTokenizer, seed: int) -> str | None:
    """Return a text of randomly drawn allowed tokens, biased towards endings, or None if deep nesting kept it from
    ending.
    """
    draw, written = random.Random(seed), bytearray()
    made = grammar_state(grammar, tokenizer)
    for _ in range(MAX_TOKENS):
        if made.is_complete:
            break
        tokens = made.forced()
        if not tokens:
            made.take(np.frombuffer(made.matcher.compute_bitmask(), np.uint32).copy())
            may_end = bool(unpacked(made.allowed[None], tokenizer.vocab_size + 1)[0, -1])
            if not made.check() or (may_end and draw.random() < 0.5):
                break
            allowed = np.flatnonzero(unpacked(made.allowed[None], tokenizer.vocab_size)[0])
            ending = [token for token in allowed if set(tokenizer.table[token]) & set(ENDS)]
            tokens = [int(draw.choice(ending if ending and draw.random() < 0.4 else list(allowed)))]
        made.consume(tokens)
        written += b"".join(tokenizer.table[token] for token in tokens)
    else:
        outside = re.sub(rb'"(?:[^"\\\\]|\\\\.)*"', b"", written)
        assert not re.search(rb"[0-9]{20}|\s\s", outside), f"a run without end: {outside!r}"
        return None
    return written.decode()


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(pairs) == len(dict(pairs)), f"a key twice: {pairs}"
    return dict(pairs)


def check(schema: Any, text: str | None) -> None:
    if text is None:
        return
    value = json.loads(text, object_pairs_hook=distinct)
    jsonschema.Draft202012Validator(schema).validate(value)
    jsonschema_rs.Draft202012Validator(schema).validate(value)


def schemas() -> Iterator[tuple[Any, Grammar]]:
    """Yield the random schemas, of seeds from 0, that are not refused."""
    for seed in range(10 * SCHEMAS):
        schema = random_schema(seed)
        try:
            yield schema, grammar_of(Constraint(kind="json_schema", value=schema, field="field"))
        except InvalidField as error:
            if "oneOf" not in error.message and "some value satisfies" not in error.message:
                raise


def test_every_text_that_a_grammar_allows_satisfies_its_schema(tokenizer: GrammarTokenizer) -> None:
    """For 200 schemas random texts under their masks are valid by two validators, have distinct keys and end."""
    cut = 0
    for seed, (schema, grammar) in zip(range(SCHEMAS), schemas(), strict=False):
        text = drawn(grammar, tokenizer, seed)
        cut += text is None
        try:
            check(schema, text)
        except Exception as error:
            raise AssertionError(f"{json.dumps(schema)}\n{text}") from error
    assert cut <= SCHEMAS // 25


@pytest.mark.parametrize("schema", [WEATHER, STEPS, USER_INTERFACE, {"type": "object"}, True], ids=str)
def test_schemas_of_documents_are_held_to(schema: Any, tokenizer: GrammarTokenizer) -> None:
    """Texts drawn from the grammars of OpenAI's documented schemas, and of free JSON, satisfy them."""
    grammar = grammar_of(Constraint(kind="json_schema", value=schema, field="field"))
    for seed in range(10):
        check(schema, drawn(grammar, tokenizer, seed))
