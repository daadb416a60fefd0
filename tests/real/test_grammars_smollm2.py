"""A real model within grammars, in the native step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "city": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "city", "age"],
    "additionalProperties": False,
}
FORM = Grammar(
    source=LLMatcher.grammar_from_json_schema(PERSON, overrides={"whitespace_flexible": False}), field="response_format"
)
ENDS = (2, 0)
Found = tuple[list[int], str]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def core(smollm2_dir: Path) -> Iterator[EngineCore]:
    model = str(smollm2_dir)
    bundle = Bundle(content_hash="smollm2", tasks=("completions",), model_dir=model, tokenizer_dir=model)
    core = EngineCore(bundle, EngineSettings(max_model_len=256, kv_cache_memory=1 << 29))
    yield core
    core.close()


def request(tokenizer: Any, number: int, grammar: Grammar | None) -> ValidRequest:
    prompt = tuple(tokenizer.encode(f"Person {number} as JSON with name, city and age:\n"))
    sampling = Sampling(max_tokens=60, temperature=1.0, stop_token_ids=ENDS, grammar=grammar)
    sequences = (Sequence(prompt_token_ids=prompt, seed=number),)
    return ValidRequest(request_id=f"r{number}", task="completions", model="m", sequences=sequences, sampling=sampling)


def run(core: EngineCore, *requests: ValidRequest) -> dict[str, Found]:
    """Run requests and return tokens and ends by request id."""
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    ends: dict[str, str] = {}
    for one in requests:
        core.add(one)
    while core.has_work() or core.waits:
        if not core.has_work():
            time.sleep(0.001)  # the grammar is being compiled
            continue
        for _, name, event in core.step():
            if isinstance(event, Tokens):
                tokens[name].extend(event.token_ids)
            else:
                assert isinstance(event, Finished), event
                ends[name] = event.reason
    return {name: (tokens[name], ends[name]) for name in tokens}


def test_instances_alone_and_in_a_batch(core: EngineCore, tokenizer: Any) -> None:
    """Every text at temperature 1 is an instance of its schema, and the same alone as in a batch."""
    held = [request(tokenizer, number, FORM) for number in range(6)]
    plain = [request(tokenizer, number, None) for number in range(6, 10)]
    found = run(core, *(one for pair in zip(held, plain, strict=False) for one in pair), *held[4:])
    for one in held:
        tokens, end = found[one.request_id]
        assert end == "stop"
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)
    for one in (*held[:3], *plain[:1]):
        assert run(core, one)[one.request_id] == found[one.request_id]


def test_resumed_at_every_token(core: EngineCore, tokenizer: Any) -> None:
    """With a real tokenizer too, forced text is split into the same tokens wherever a request is resumed."""
    one = request(tokenizer, 3, FORM)
    tokens, end = run(core, one)[one.request_id]
    source = one.sequences[0]
    cuts = range(len(tokens) + 1)
    resumed = [
        msgspec.structs.replace(
            one,
            request_id=f"cut {cut}",
            sequences=(msgspec.structs.replace(source, resumed_token_ids=tuple(tokens[:cut])),),
        )
        for cut in cuts
    ]
    found = run(core, *resumed)
    for cut in cuts:
        assert ([*tokens[:cut], *found[f"cut {cut}"][0]], found[f"cut {cut}"][1]) == (tokens, end), cut
