"""The engine process on real weights: shared, killed in the middle of a text, and gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher
from processes import alive_after

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport import connect

SETTINGS = EngineSettings(idle_timeout=0.5, max_model_len=256)
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
PEOPLE = LLMatcher.grammar_from_json_schema({"type": "array", "items": PERSON, "minItems": 50})
FORM = Grammar(source=PEOPLE, field="response_format")


@pytest.fixture
def runtime() -> Iterator[str]:
    base = tempfile.mkdtemp(prefix="t", dir="/tmp")  # short: a socket's path has 107 bytes
    yield os.path.join(base, "r")
    shutil.rmtree(base, ignore_errors=True)


def read(engine, temperature, on_token=lambda: None, grammar=None):
    """Read token ids, ending and log probabilities of each of two sequences. Within a grammar no log probabilities are
    asked for, so that forced tokens are not sampled."""
    request = ValidRequest(
        request_id=uuid.uuid4().hex,
        task="completions",
        model="m",
        n=2,
        stream=True,
        sequences=tuple(Sequence(prompt_token_ids=(504, 3575, 282), seed=seed) for seed in (3, 4)),
        sampling=Sampling(max_tokens=40, temperature=temperature, grammar=grammar, logprobs=None if grammar else 2),
    )
    tokens, ends, logprobs = {0: [], 1: []}, {}, {0: [], 1: []}
    for event in engine.submit(request):
        if isinstance(event, Tokens):
            tokens[event.index].extend(event.token_ids)
            logprobs[event.index].extend(event.logprobs)
            on_token()
        elif isinstance(event, Finished):
            ends[event.index] = (event.reason, event.num_generated_tokens)
    return tokens, ends, logprobs


@pytest.mark.parametrize(("temperature", "grammar"), [(0.0, None), (1.0, None), (1.0, FORM)])
def test_killed_engine_keeps_the_text(
    smollm2_dir: Path, runtime: str, temperature: float, grammar: Grammar | None
) -> None:
    """After kill -9 in the middle of a text, within a grammar too, tokens, counts and log probabilities are bitwise the
    same, and nothing is left at the end."""
    model = str(smollm2_dir)
    bundle = Bundle(content_hash="smollm2", tasks=("completions",), model_dir=model, tokenizer_dir=model)
    with connect(bundle, SETTINGS, state_dir=runtime) as engine, connect(bundle, SETTINGS, state_dir=runtime) as other:
        first = engine.info.pid
        assert other.info.pid == first
        expected = read(engine, temperature, grammar=grammar)
        assert {index: len(ids) for index, ids in expected[0].items()} == {0: 40, 1: 40}
        middle, count = threading.Event(), [0]

        def on_token() -> None:
            count[0] += 1
            if count[0] == 20 and not middle.is_set():
                middle.set()
                os.kill(first, signal.SIGKILL)

        assert read(engine, temperature, on_token, grammar) == expected
        assert engine.info.pid != first
        last = engine.info.pid
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and os.path.exists(runtime):
        time.sleep(0.05)
    assert not alive_after([first, last], 20)
    assert not os.path.exists(runtime)
