"""Generation within grammars, by models with every kind of tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from engine_runs import Outcome, run
from grammar_runs import Texts, bundle_of, lark, regex, schema
from tiny_models import request_of
from tokenizer_kinds import KINDS

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.request import ValidRequest
from mlflow_llm.serving.settings import EngineSettings

SETTINGS = EngineSettings(kv_cache_memory=1 << 24, max_num_seqs=40)
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
END = 2
CAN_WRITE_JSON = [kind for kind in KINDS if kind != "word_piece"]  # which has a space before every brace


@pytest.fixture(scope="module", params=CAN_WRITE_JSON)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def bytes_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of("byte_level", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def core(bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(bundle, SETTINGS)
    yield core
    core.close()


@pytest.fixture(scope="module")
def bytes_core(bytes_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(bytes_bundle, SETTINGS)
    yield core
    core.close()


def within(request_id: str, prompt: tuple[int, ...], grammar: Any, **more: Any) -> ValidRequest:
    defaults = {"temperature": 1.0, "max_tokens": 120, "stop_token_ids": (END,)}
    return request_of(request_id, prompt, grammar=grammar, **defaults | more)


def reasons(outcome: Outcome) -> list[str]:
    return [outcome.finished[index].reason for index in sorted(outcome.finished)]


def test_texts_follow_their_schema(core: EngineCore, bundle: Bundle) -> None:
    """Whatever a random model would say at temperature 1, its texts are instances of the schema, whole and nothing
    beside; each of n choices is its own."""
    texts = Texts(bundle)
    prompt = texts.ids("the quick brown fox")
    found = run(core, *(within(f"s{seed}", prompt, schema(PERSON), seed=10 * seed, n=3) for seed in range(6)))
    said = set()
    for outcome in found.values():
        assert reasons(outcome) == ["stop"] * 3
        for text in texts.texts(outcome).values():
            jsonschema.validate(json.loads(text), PERSON)
            said.add(text)
    assert len(said) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_and_grammars(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Regular expressions and Lark grammars hold with every kind of tokenizer."""
    bundle = bundle_of(kind, tmp_path_factory.mktemp("kinds"))
    core, texts = EngineCore(bundle, SETTINGS), Texts(bundle)
    prompt = texts.ids("the quick brown")
    asked = {
        "choice": regex("(yes|no)( no)?"),
        "lark": lark('start: "yes" | "no" start'),
        "letters": regex("[abc]{3,9}"),
    }
    wanted = {"choice": "(yes|no)( no)?", "lark": "(no)*yes", "letters": "[abc]{3,9}"}
    found = run(core, *(within(name, prompt, grammar) for name, grammar in asked.items()))
    for name, outcome in found.items():
        if reasons(outcome) == ["stop"]:
            assert re.fullmatch(wanted[name], texts.of(outcome.tokens[0])), (kind, name)
        else:
            assert name == "lark"  # no end of text may ever be likely
    core.close()
