"""The Messages API over HTTP: the unmodified ``anthropic`` client, and requests that it would not send."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import ThreadUnsupportedRequestError
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Store
from mlflow_llm.serving.metering.usage.usage import Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken

HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "assistant", "max_tokens": 8, "messages": HI}
ASK = BODY | {"extra_body": {"temperature": 0}}  # the same text each time, which does not end by itself
PROMPT = len("<user>hi<assistant>") + 1  # a byte a token, and one that ends the turn


def connected(server: WorkerState, **options: Any) -> anthropic.Anthropic:
    """Yield Anthropic's client of an application without a server around it."""
    transport = httpx2.WSGITransport(app=create_app(server), remote_addr="127.0.0.1")
    given = {"api_key": "unused", "base_url": "http://localhost:8000", "max_retries": 0} | options
    return anthropic.Anthropic(http_client=httpx2.Client(transport=transport), **given)


@pytest.fixture
def claude(server: WorkerState) -> Iterator[anthropic.Anthropic]:
    with connected(server) as found:
        yield found


class Metered:
    """A server with keys and a ledger."""

    def __init__(self, server: WorkerState, store: Store, secret: str) -> None:
        self.server, self.store, self.secret = server, store, secret

    def rows(self) -> list[Any]:
        return list(Usage(self.store).rows(UsageFilter()))


@pytest.fixture
def metered(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[Metered]:
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    ledger, keys = Ledger(store, state_dir=tmp_path), Keys(store)
    secret, _ = keys.create("acme")
    yield Metered(make(keys=keys, mode=PayPerToken(ledger), ledger=ledger), store, secret)
    ledger.close()
    store.close()


def test_a_message(claude: anthropic.Anthropic) -> None:
    """A message has the requested number of tokens, its stop reason and a usage that agrees with ``count_tokens``."""
    found = claude.messages.create(**ASK)
    assert (found.type, found.role, found.model) == ("message", "assistant", "assistant")
    assert (found.stop_reason, found.usage.input_tokens, found.usage.output_tokens) == ("max_tokens", PROMPT, 8)
    counted = claude.messages.count_tokens(model="assistant", messages=HI)
    assert counted.input_tokens == PROMPT
    assert (found._request_id or "").startswith("req-")


def test_a_stream_is_the_message(claude: anthropic.Anthropic) -> None:
    """The stream helper's final message equals the whole reply, except for its id."""
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        found = stream.get_final_message()
    assert text == "".join(block.text for block in found.content if block.type == "text")
    assert found.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_a_reply_goes_back_in(claude: anthropic.Anthropic) -> None:
    """A reply's blocks, as the client holds them, are accepted in the next turn, streamed or not."""
    with claude.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for found in (claude.messages.create(**ASK), streamed):
        turns = [*HI, {"role": "assistant", "content": found.content}, *HI]
        assert claude.messages.create(**ASK | {"messages": turns}).usage.input_tokens > PROMPT


def test_a_reply_goes_on_where_it_was_begun(claude: anthropic.Anthropic, client: FlaskClient) -> None:
    """The prompt ends, to the token, in the text with which the caller began the reply."""
    begun = [*HI, {"role": "assistant", "content": "The answer is ("}]
    chat = {"messages": begun, "continue_final_message": True}
    expected = client.post("/tokenize", json=chat).json["count"]
    assert claude.messages.create(**ASK | {"messages": begun}).usage.input_tokens == expected
    assert expected == PROMPT + len("The answer is (")


def test_more_tokens_than_there_is_room_for(claude: anthropic.Anthropic) -> None:
    """With more max_tokens than room the text fills the context and its stop reason says so."""
    long = [{"role": "user", "content": "a" * 4068}]
    found = claude.messages.create(**ASK | {"messages": long, "max_tokens": 5000})
    assert found.stop_reason == "model_context_window_exceeded"
    assert found.usage.input_tokens + found.usage.output_tokens == 4096


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    """The stop sequence that ended the text is named and is not part of it."""
    ask = ASK | {"max_tokens": 64}
    text = claude.messages.create(**ask).content[0].text
    stop = text[10:12]
    found = claude.messages.create(**ask, stop_sequences=[stop, "never"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in found.content) == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("fields", "error", "kind", "message"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error", "nobody"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens: 0 is not allowed"),
        (
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "prompt is too long: messages: 50",
        ),
        ({"stop_sequences": ["a" * 33000]}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences: "),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages: "),
        (
            {"extra_headers": {"anthropic-version": "2020-01-01"}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "anthropic-version: '2020-01-01' is not allowed",
        ),
        (
            {"thinking": {"type": "adaptive"}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "thinking.type: 'adaptive' is not allowed",
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_errors(
    claude: anthropic.Anthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    message: str,
    streamed: bool,
) -> None:
    """A refusal is the client's exception of its status, and names the field."""
    with pytest.raises(error) as found:
        claude.messages.create(**ASK | fields, stream=streamed)
    assert found.value.type == kind
    assert (found.value.request_id or "").startswith("req-")
    assert (found.value.api_message or "").startswith(message) or kind == "not_found_error"


def test_threads_are_refused_as_clients_know_it(claude: anthropic.Anthropic) -> None:
    """Threads are refused with the error code that makes the client's tool runner send whole conversations."""

    @anthropic.beta_tool
    def now() -> str:
        """Return the time."""
        return "noon"

    with pytest.raises(ThreadUnsupportedRequestError, match="conversations are not stored"):
        claude.beta.messages.create(**ASK, thread={"type": "create"})
    runner = claude.beta.messages.tool_runner(**ASK, tools=[now])
    assert runner.until_done().usage.output_tokens == 8


def test_unknown_paths_below_the_api(client: FlaskClient) -> None:
    """Unknown routes, wrong methods and non-JSON bodies below the API's path are refused in its form."""
    for method, path, status, kind in (
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ):
        answer = client.open(path, method=method, json={})
        assert (answer.status_code, answer.json["error"]["type"]) == (status, kind)
    answer = client.post("/v1/messages?beta=true", data="{", content_type="application/json")
    assert (answer.status_code, answer.json["type"]) == (400, "error")


def test_counting(claude: anthropic.Anthropic) -> None:
    """Counts equal the usage of the message with any content, and a prompt over the context is counted too."""
    ask: dict[str, Any] = {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [*HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "Grüße </s>"}],
        "model": "assistant",
    }
    used = claude.messages.create(**ask, max_tokens=1).usage.input_tokens
    assert claude.messages.count_tokens(**ask).input_tokens == used
    long = [{"role": "user", "content": "x" * 5000}]
    assert claude.messages.count_tokens(model="assistant", messages=long).input_tokens == PROMPT - 2 + 5000
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: 1 is not allowed: no such field"):
        claude.messages.count_tokens(model="assistant", messages=HI, extra_body={"max_tokens": 1})
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        claude.messages.count_tokens(model="assistant", messages=HI, extra_headers={"anthropic-version": "1"})


def test_counting_tools(claude: anthropic.Anthropic) -> None:
    """Many tools, large schemas, calls and results count exactly as they are used."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "d" * 20} for i in range(20)}}
    tools: Any = [{"name": f"tool_{i}", "description": "t" * 50, "input_schema": schema} for i in range(2)]
    turns: Any = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "tool_1", "input": {"p1": "</s>"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "r", "is_error": True}]},
    ]
    for choice in ({"type": "auto"}, {"type": "none"}):
        ask: Any = {"model": "assistant", "messages": turns, "tools": tools, "tool_choice": choice}
        used = claude.messages.create(**ask, max_tokens=1).usage.input_tokens
        assert claude.messages.count_tokens(**ask).input_tokens == used
        assert (used > 3000) == (choice["type"] == "auto")
    with pytest.raises(anthropic.BadRequestError, match=r"^Error code: 400.*tools\[1\].name"):
        claude.messages.create(**ASK, tools=[tools[0], tools[0]])


def test_models(claude: anthropic.Anthropic) -> None:
    """The client lists the endpoints."""
    assert "assistant" in [model.id for model in claude.models.list()]


def test_both_places_of_a_key(metered: Metered) -> None:
    """A key is taken from x-api-key or Authorization, or from both if equal; messages are billed to it and counts are
    not.
    """
    key = metered.secret
    for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
        with connected(metered.server, api_key=None, default_headers=headers) as claude:
            claude.messages.create(**ASK)
            claude.messages.count_tokens(model="assistant", messages=HI)
    with connected(metered.server, api_key=key, default_headers={"x-api-key": key}) as claude:
        claude.messages.create(**ASK, stream=True).close()
        with claude.messages.stream(**ASK) as stream:
            stream.until_done()
    rows = metered.rows()
    assert len(rows) == 4
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows].count((PROMPT, 8)) >= 3, "one was closed early"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "sk-unknown"},
        {"x-api-key": "Bearer {key}"},
        {"x-api-key": "sk-unknown", "Authorization": "Bearer {key}"},
        {"x-api-key": "{key}", "Authorization": "Basic {key}x"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"])
def test_keys_that_are_refused(metered: Metered, headers: dict[str, str], path: str) -> None:
    """A missing or unknown key is refused, and so are two different ones."""
    client = create_app(metered.server).test_client()
    given = {name: value.format(key=metered.secret) for name, value in headers.items()}
    answer = client.post(path, json=BODY, headers=given)
    assert answer.status_code == 401
    assert answer.json["error"]["type"] == "authentication_error"
    assert metered.rows() == []


def test_an_agents_request(client: FlaskClient) -> None:
    """The fields and headers of a coding agent's request are accepted, or refused by name, but never ignored."""
    body = BODY | {
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "user_" + "0" * 120},
        "temperature": 1,
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    answer = client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.content_type.startswith("text/event-stream")
    events = [event.partition("\n")[0] for event in answer.text.split("\n\n") if event]
    assert events[0] == "event: message_start"
    assert events[-2:] == ["event: message_delta", "event: message_stop"]
    refused = client.post("/v1/messages", json=body | {"context_management": {"edits": [{"type": "x"}]}})
    assert refused.status_code == 400
    assert json.loads(refused.data)["error"]["message"].startswith("context_management: ")


def test_the_list_of_models(server: WorkerState, claude: anthropic.Anthropic) -> None:
    """``models.list`` and ``models.retrieve`` have Anthropic's shape for its client, which pages through all of them;
    without the header the same routes have OpenAI's."""
    plain = create_app(server).test_client().get("/v1/models").json
    names = [card["id"] for card in plain["data"]]
    assert (plain["object"], len(names) > 1) == ("list", True)
    for limit in (1, 20):
        assert [model.id for model in claude.models.list(limit=limit)] == names
    assert [model.id for model in claude.models.list(before_id=names[-1], limit=1).data] == [names[-2]]
    assert claude.models.list(lifecycle=["retired"]).data == []
    for name in names:
        found = claude.models.retrieve(name)
        assert (found.id, found.display_name, found.type, found.lifecycle) == (name, name, "model", "active")
        assert (found.created_at.timestamp(), found.max_input_tokens) == (1, 4096)
        assert found._request_id is not None


@pytest.mark.parametrize(
    ("query", "said"), [("limit=0", "limit"), ("limit=x", "limit"), ("after_id=b", "after_id"), ("size=1", "size")]
)
def test_a_list_that_is_refused(server: WorkerState, query: str, said: str) -> None:
    """A wrong parameter is refused by name in Anthropic's form, and so are unknown models and versions."""
    client = create_app(server).test_client()
    refused = client.get(f"/v1/models?{query}", headers={"anthropic-version": "2023-06-01"})
    assert (refused.status_code, refused.json["type"]) == (400, "error")
    assert refused.json["error"]["message"].startswith(f"{said}: ")
    missing = client.get("/v1/models/nobody", headers={"anthropic-version": "2023-06-01"})
    assert (missing.status_code, missing.json["error"]["type"]) == (404, "not_found_error")
    unknown = client.get("/v1/models", headers={"anthropic-version": "1"})
    assert (unknown.status_code, unknown.json["type"]) == (400, "error")


def test_a_list_without_a_key(metered: Metered) -> None:
    """A refused key is an error in the caller's form too."""
    client = create_app(metered.server).test_client()
    refused = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (refused.status_code, refused.json["error"]["type"]) == (401, "authentication_error")
    assert client.get("/v1/models").json["error"]["code"] == "invalid_api_key"
