"""Bodies of the Messages API that are nearly sound: hypothesis looks for one that is a fault of ours, or miscounted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects.anthropic.requests import COUNT_BODY
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app

TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "t", "name": "w", "input": {"x": [1, None, "é"]}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
THINKING = {"type": "thinking", "thinking": "a", "signature": "s"}
TEXTS = st.text(max_size=6) | st.sampled_from(["</s>", "<assistant>", "\ufdd0", "a ", "\n", "{{ 7 }}", "\ud800"])
BLOCKS = st.one_of(
    st.sampled_from([TEXT, CALL, RESULT, THINKING, {"type": "redacted_thinking", "data": "x"}, {"type": "image"}]),
    st.builds(lambda text: {**TEXT, "text": text}, TEXTS),
    st.builds(lambda text, error: {**RESULT, "content": text, "is_error": error}, TEXTS, st.booleans()),
    st.builds(lambda text: {**CALL, "id": text}, TEXTS),
)
ANY_TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | st.lists(BLOCKS, max_size=3)}
    ),
    max_size=5,
)
HI = {"role": "user", "content": "hi"}
ROUND = [HI, {"role": "assistant", "content": [THINKING, TEXT, CALL]}, {"role": "user", "content": [RESULT, TEXT]}]
SOUND_TURNS = st.lists(st.sampled_from([[HI], ROUND, [HI, {"role": "assistant", "content": "b"}]]), min_size=1).map(
    lambda found: [turn for turns in found[:3] for turn in turns]
)
SCHEMAS = st.sampled_from([{"type": "object"}, {"type": "object", "properties": 5}, {"type": "object", "$ref": "#"}])
TOOLS = st.fixed_dictionaries(
    {"name": st.sampled_from(["w", "v"]), "input_schema": SCHEMAS},
    optional={"strict": st.booleans(), "description": TEXTS},
)
CHOICES = [
    {"type": "auto"},
    {"type": "auto", "disable_parallel_tool_use": True},
    {"type": "any"},
    {"type": "tool", "name": "w"},
    {"type": "none"},
]
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "system": TEXTS | st.lists(st.just(TEXT), max_size=2),
        "tools": st.lists(TOOLS, max_size=3),
        "tool_choice": st.sampled_from(CHOICES),
        "thinking": st.sampled_from([{"type": "disabled"}, {"type": "adaptive"}]),
        "stream": st.booleans(),
        "stop_sequences": st.lists(TEXTS, max_size=3),
        "temperature": st.floats(0, 1),
        "top_k": st.integers(0, 2**40),
        "output_config": st.builds(lambda schema: {"format": {"type": "json_schema", "schema": schema}}, SCHEMAS),
        "max_tokens": st.integers(-1, 12) | st.just(5000),
    },
)


@pytest.fixture(scope="module")
def patient(make: Callable[..., WorkerState]) -> FlaskClient:
    return create_app(make(refusals_per_minute=0)).test_client()


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(messages=ANY_TURNS | SOUND_TURNS | SOUND_TURNS, fields=FIELDS)
def test_no_message_is_a_fault(patient: FlaskClient, messages: list[Any], fields: dict[str, Any]) -> None:
    """Any mutated message is answered with the counted number of tokens, or refused in the API's form."""
    body = {"model": "assistant", "max_tokens": 4, "messages": messages, **fields}
    answer = post(patient, "/v1/messages", body)
    assert answer.status_code in (200, 400), answer.text
    assert "event: error" not in answer.text
    if answer.status_code == 400:
        assert answer.json["type"] == "error"
    elif not fields.get("stream"):
        usage = answer.json["usage"]
        known = COUNT_BODY.schema["properties"]
        counted = post(patient, "/v1/messages/count_tokens", {name: body[name] for name in body if name in known})
        assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def post(client: FlaskClient, path: str, body: dict[str, Any]) -> Any:
    return client.post(path, data=json.dumps(body), content_type="application/json")
