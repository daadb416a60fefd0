"""The Responses API over HTTP: the unmodified ``openai`` client, and requests that it would not send."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.openapi.plain_enums import plain_enums
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Store
from mlflow_llm.serving.metering.usage.usage import Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken

ASK: dict[str, Any] = {"model": "assistant", "input": "hi", "max_output_tokens": 8, "temperature": 0}
PROMPT = len("<user>hi<assistant>") + 1  # a byte a token, and one that ends the turn
# what two responses to one question have of their own: ids, and when they were made
SAME: dict[str, Any] = {
    "exclude": {"id": True, "created_at": True, "completed_at": True, "output": {"__all__": {"id"}}}
}


def connected(server: WorkerState, **options: Any) -> openai.OpenAI:
    """Yield OpenAI's client of an application without a server around it."""
    transport = httpx.WSGITransport(app=create_app(server), remote_addr="127.0.0.1")
    given = {"api_key": "unused", "base_url": "http://localhost:8000/v1", "max_retries": 0} | options
    return openai.OpenAI(http_client=httpx.Client(transport=transport), **given)


@pytest.fixture
def gpt(server: WorkerState) -> Iterator[openai.OpenAI]:
    with connected(server) as found:
        yield found


@pytest.fixture
def metered(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[tuple[openai.OpenAI, Store]]:
    """Yield a client with a key of a server with a ledger, and its store."""
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    ledger, keys = Ledger(store, state_dir=tmp_path), Keys(store)
    secret, _ = keys.create("acme")
    with connected(make(keys=keys, mode=PayPerToken(ledger), ledger=ledger), api_key=secret) as client:
        yield client, store
    ledger.close()
    store.close()


def test_a_response(gpt: openai.OpenAI) -> None:
    """A response has the requested number of tokens, the reason it is incomplete and the request's own settings."""
    found = gpt.responses.create(**ASK, instructions="be", metadata={"a": "b"})
    assert (found.object, found.model, found.status) == ("response", "assistant", "incomplete")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (PROMPT + len("<system>be") + 1, 8)
    assert (found.instructions, found.metadata, found.max_output_tokens) == ("be", {"a": "b"}, 8)
    assert len(found.output_text) > 0


def test_a_stream_is_the_response(gpt: openai.OpenAI) -> None:
    """The events' texts together, and the response of the last one, are the reply that is not streamed."""
    whole = gpt.responses.create(**ASK)
    events = list(gpt.responses.create(**ASK, stream=True))
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.model_dump(**SAME) == whole.model_dump(**SAME)


def test_the_stream_helper(gpt: openai.OpenAI) -> None:
    """The client's own accumulation is the response that ends by a stop string."""
    stop = gpt.responses.create(**ASK).output_text[4]
    ask = ASK | {"max_output_tokens": 64, "extra_body": {"stop": [stop]}}
    with gpt.responses.stream(**ask) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        found = stream.get_final_response()
    assert found.status == "completed"
    assert texts[-1] == found.output_text
    assert found.output_text == gpt.responses.create(**ask).output_text


def test_when_it_was_completed(gpt: openai.OpenAI) -> None:
    """A completed response has the Unix time, whole and streamed; an incomplete one has none."""
    stop = gpt.responses.create(**ASK).output_text[4]
    ask = ASK | {"max_output_tokens": 64, "extra_body": {"stop": [stop]}}
    first, *_, last = gpt.responses.create(**ask, stream=True)
    assert (first.response.completed_at, last.type) == (None, "response.completed")
    for found in (gpt.responses.create(**ask), last.response):
        assert found.created_at <= found.completed_at <= time.time()
    assert gpt.responses.create(**ASK).completed_at is None


def test_a_reply_goes_back_in(gpt: openai.OpenAI) -> None:
    """The output of a response is input of the next, as the client holds it and as it dumps it."""
    found = gpt.responses.create(**ASK)
    (item,) = found.output
    user = {"role": "user", "content": "hi"}
    for form in (item, item.model_dump(), item.model_dump(exclude_unset=True)):
        again = gpt.responses.create(**ASK | {"input": [user, form, user]})
        assert again.usage is not None
        assert again.usage.input_tokens > PROMPT


def test_counting(gpt: openai.OpenAI) -> None:
    """Counts equal the usage of the response with any input, and an input over the context is counted too."""
    ask: dict[str, Any] = {"model": "assistant", "instructions": "be", "input": [{"role": "user", "content": "Grüße"}]}
    used = gpt.responses.create(**ask, max_output_tokens=1).usage.input_tokens
    found = gpt.responses.input_tokens.count(**ask)
    assert (found.object, found.input_tokens) == ("response.input_tokens", used)
    assert gpt.responses.input_tokens.count(model="assistant", input="x" * 5000).input_tokens == PROMPT - 2 + 5000
    with pytest.raises(openai.BadRequestError, match="stream"):
        gpt.responses.input_tokens.count(**ask, extra_body={"stream": True})


def test_logprobs(gpt: openai.OpenAI) -> None:
    """Included log probabilities have an entry for each token with the requested alternatives, streamed or not."""
    ask = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = gpt.responses.create(**ask).output[0].content[0]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 8
    events = gpt.responses.create(**ask, stream=True)
    entries = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [(entry.token, entry.logprob) for entry in entries] == [(e.token, e.logprob) for e in part.logprobs]


@pytest.mark.parametrize(
    ("fields", "error", "param", "message"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "nobody"),
        ({"store": True}, openai.BadRequestError, "store", "store: True is not allowed"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id", "not stored"),
        ({"max_output_tokens": 9999}, openai.BadRequestError, "max_output_tokens", "max_output_tokens: 9999"),
        ({"input": "x" * 5000}, openai.BadRequestError, "input", "input (messages): 5018 tokens"),
        ({"reasoning": {"effort": "low"}}, openai.BadRequestError, "reasoning.effort", "none or null"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "the request has no tools"),
        ({"extra_body": {"stop": ["a" * 33000]}}, openai.BadRequestError, "stop", "stop: "),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_errors(
    gpt: openai.OpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    message: str,
    streamed: bool,
) -> None:
    """A refusal is the client's exception of its status, and names the field as this API calls it."""
    with pytest.raises(error) as found:
        gpt.responses.create(**ASK | fields, stream=streamed)
    assert found.value.param == param
    assert message in found.value.message


def test_effort_none_without_reasoning(gpt: openai.OpenAI) -> None:
    """Reasoning effort none is accepted for a model that does not reason."""
    assert gpt.responses.create(**ASK, reasoning={"effort": "none"}).reasoning.effort == "none"


def test_truncation(metered: tuple[openai.OpenAI, Store]) -> None:
    """A pay-per-token endpoint truncates the beginning of an overlong input, and the reply says so."""
    client, _ = metered
    found = client.responses.create(**ASK | {"input": "x" * 5000}, truncation="auto")
    assert (found.truncation, found.usage.input_tokens) == ("auto", 4096 - 8)
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.create(**ASK | {"input": "x" * 5000})


def test_the_ledger(metered: tuple[openai.OpenAI, Store]) -> None:
    """Each response is a row of its tokens, and its headers say what is left."""
    client, store = metered
    Limits(store).set("tenant", "acme", "otpm", 100)
    raw = client.responses.with_raw_response.create(**ASK)
    assert raw.headers["x-ratelimit-limit-output-tokens"] == "100"
    with client.responses.create(**ASK, stream=True) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    rows = list(Usage(store).rows(UsageFilter()))
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(PROMPT, 8)] * 2


def test_a_large_request_is_counted_while_its_reply_is_made(make: Callable[..., WorkerState]) -> None:
    """The part of a request that a response repeats counts in the memory budget until the reply has been sent."""
    server = make()
    client = create_app(server).test_client()
    tools = [{"type": "function", "name": "f", "strict": False, "parameters": {"description": "x" * 10**6}}]
    body = ASK | {"tools": tools, "tool_choice": "none", "stream": True}
    answer = client.post("/v1/responses", json=body, buffered=False)
    assert answer.status_code == 200
    assert server.memory.used > 10**6
    *_, last = (block for block in answer.text.split("\n\n") if block)
    answer.close()
    assert json.loads(last.partition("data: ")[2])["response"]["tools"] == tools_shown(tools)
    assert server.memory.used == 0


def tools_shown(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"description": None} | tool for tool in tools]


def test_the_document_has_it(client: FlaskClient) -> None:
    """The OpenAPI document and its page have the route, its fields and its form of error."""
    document = client.get("/openapi.json").json
    operation = document["paths"]["/v1/responses"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/responses_chat_request"}
    schema = document["components"]["schemas"]["responses_chat_request"]
    assert schema == plain_enums(json.loads(json.dumps(DIALECTS["responses"].request_schemas["chat"])))
    assert schema["required"] == ["input"]
    assert "/v1/responses" in client.get("/docs").text


def test_paths_that_are_not_served(client: FlaskClient) -> None:
    """Stored responses have no routes, and say so in OpenAI's form."""
    for method, path, status, code in (
        ("GET", "/v1/responses/resp_1", 404, "not_found"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "not_found"),
        ("GET", "/v1/responses", 405, "method_not_allowed"),
    ):
        answer = client.open(path, method=method)
        assert (answer.status_code, answer.json["error"]["code"]) == (status, code)


def test_one_question_to_both_apis(client: FlaskClient) -> None:
    """A response and a chat completion of the same request are the same text and the same counts."""
    chat = {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], "seed": 7}
    one = client.post("/v1/chat/completions", json=chat | {"max_tokens": 8}).json
    two = client.post(
        "/v1/responses", json={"instructions": "be", "input": "hi", "seed": 7, "max_output_tokens": 8}
    ).json
    assert two["output"][0]["content"][0]["text"] == one["choices"][0]["message"]["content"]
    assert two["usage"]["input_tokens"] == one["usage"]["prompt_tokens"]


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
ITEMS = st.sampled_from([
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
])  # fmt: skip
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: "}},
]
VALUES: dict[str, Any] = {
    "tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "json_object"}},
    "stream": True, "instructions": "be", "reasoning": {"effort": "high"}, "truncation": "auto",
    "include": ["message.output_text.logprobs"], "top_logprobs": 20, "parallel_tool_calls": False, "stop": ["a"],
    "metadata": {"a": "b"}, "temperature": 0.5, "guided_regex": "(", "max_output_tokens": 3,
}  # fmt: skip
ODD = st.sampled_from(
    [None, True, 0, -1, 2**70, 1e308, "", "x", "\x00", "é" * 100, [], [[]], {}, {"type": "x"}, {"a": 1}]
)


@settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_is_a_fault(client: FlaskClient, data: st.DataObject) -> None:
    """Sound requests with something changed in them anywhere are answered or refused by name."""
    names = data.draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=4))
    body = ASK | {"input": data.draw(st.lists(ITEMS, min_size=1, max_size=5))} | {name: VALUES[name] for name in names}
    body = json.loads(json.dumps(body))
    for _ in range(data.draw(st.integers(0, 2))):
        place: Any = body
        while place:
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = copy.deepcopy(data.draw(ODD))  # the next change may be in it
            break
    answer = client.post("/v1/responses", json=body)
    if answer.status_code == 200:
        assert b"response.failed" not in answer.data
    else:
        assert answer.status_code in (400, 404)
        assert answer.json["error"]["message"]
