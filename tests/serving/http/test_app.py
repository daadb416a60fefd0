"""Requests through the whole application, without a socket."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.dialects.json_body import MAX_OBJECTS
from mlflow_llm.serving.frontend import invoke
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.errors import InternalError, Overloaded
from mlflow_llm.serving.observability import access_record
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}


def events(data: bytes) -> list[str]:
    return [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/chat/completions", {"model": "assistant"}),
        ("/serving-endpoints/assistant/invocations", {}),
        ("/serving-endpoints/chat/completions", {"model": "assistant"}),
        ("/invocations", {}),
        ("/endpoints/assistant/invocations", {}),
    ],
)
def test_chat_on_every_route(client: FlaskClient, path: str, extra: dict) -> None:
    """Every chat route answers with a chat completion of the same text and exact usage."""
    answer = client.post(path, json=CHAT | extra)
    assert answer.status_code == 200, answer.text
    assert answer.json["object"] == "chat.completion"
    assert answer.json["usage"]["completion_tokens"] == 5
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.headers["X-Request-Id"].startswith("req-")


@pytest.mark.parametrize("path", ["/v1/completions", "/serving-endpoints/completions"])
def test_completions(client: FlaskClient, path: str) -> None:
    """Completions answer each prompt of a batch."""
    answer = client.post(path, json={"model": "assistant", "prompt": ["a", "b"], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert len(answer.json["choices"]) == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/serving-endpoints/embeddings", "/invocations"])
def test_embeddings(client: FlaskClient, path: str) -> None:
    """Embeddings answer one vector an input."""
    answer = client.post(path, json={"model": "assistant", "input": ["a", "b"]})
    assert answer.status_code == 200, answer.text
    assert [len(d["embedding"]) for d in answer.json["data"]] == [16, 16]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/serving-endpoints/assistant/invocations", "/invocations"])
def test_stream_joins_to_the_whole(client: FlaskClient, path: str) -> None:
    """A stream's deltas join to the text of the whole answer, and [DONE] is its last event."""
    whole = client.post(path, json=CHAT | {"model": "assistant"}).json["choices"][0]["message"]["content"]
    answer = client.post(path, json=CHAT | {"model": "assistant", "stream": True})
    assert answer.content_type.startswith("text/event-stream")
    found = events(answer.data)
    assert found[-1] == "[DONE]"
    deltas = [c["delta"].get("content") or "" for e in found[:-1] for c in json.loads(e)["choices"]]
    assert "".join(deltas) == whole


def test_a_finished_stream_leaves_nothing(client: FlaskClient, server: WorkerState) -> None:
    """After a stream, nothing is counted as running."""
    assert client.post("/v1/chat/completions", json=CHAT | {"model": "assistant", "stream": True}).data
    assert (len(server.in_flight), sum(server.load_shedder.running(e.engine) for e in server.endpoints)) == (0, 0)


def test_closing_a_stream_aborts(client: FlaskClient, server: WorkerState) -> None:
    """A client that leaves in the middle has its sequence aborted and its place given back."""
    body = CHAT | {"model": "assistant", "stream": True, "max_tokens": 3000}
    answer = client.post("/v1/chat/completions", json=body, buffered=False)
    next(answer.iter_encoded())
    answer.close()
    assert (len(server.in_flight), sum(server.load_shedder.running(e.engine) for e in server.endpoints)) == (0, 0)
    assert next(iter(server.endpoints)).engine.health().num_running == 0


def test_adapter_by_model_name(client: FlaskClient) -> None:
    """``endpoint:adapter`` in model reaches the adapter, whose text differs from the base's."""
    base = client.post("/v1/chat/completions", json=CHAT | {"model": "assistant"}).json
    adapted = client.post("/v1/chat/completions", json=CHAT | {"model": "assistant:pirate"}).json
    assert base["choices"][0]["message"]["content"] != adapted["choices"][0]["message"]["content"]


@pytest.mark.parametrize("empty", [{"model": "assistant:"}, {"model": "assistant", "adapter": ""}, {"adapter": ""}])
@pytest.mark.parametrize("path", ["/endpoints/assistant/invocations", "/invocations"])
def test_an_empty_adapter_is_not_the_base(client: FlaskClient, path: str, empty: dict) -> None:
    """An empty adapter name is an unknown adapter, in either spelling, and the answer lists the known ones."""
    answer = client.post(path, json={"prompt": "hello", "max_tokens": 4} | empty)
    assert (answer.status_code, "adapter ''" in answer.json["message"]) == (404, True), answer.json
    assert "pirate" in answer.json["message"]


PATHS = ["/serving-endpoints/assistant/invocations", "/endpoints/assistant/invocations"]


@pytest.mark.parametrize("path", PATHS)
def test_a_model_beside_the_path(client: FlaskClient, path: str) -> None:
    """With the endpoint in the path, the body's model may name it or one of its adapters; any other name is refused."""
    body = {"prompt": "hello", "max_tokens": 4, "seed": 1}
    base, adapted = (client.post(path, json=body | {"model": m}).json for m in ("assistant", "assistant:pirate"))
    assert base["choices"] == client.post(path, json=body).json["choices"]
    assert adapted["choices"] == client.post(path, json=body | {"adapter": "pirate"}).json["choices"]
    assert adapted["choices"] != base["choices"]
    assert client.post(path, json=body | {"model": "model-1"}).json["choices"] == base["choices"]
    assert client.post(path, json=body | {"model": "other"}).status_code == 404
    both = client.post(path, json=body | {"model": "assistant:pirate", "adapter": "formal"})
    assert (both.status_code, "'formal' is not allowed" in both.json["message"]) == (400, True)
    named = path.replace("assistant", "assistant:pirate")
    assert client.post(named, json=body | {"model": "assistant:nobody"}).status_code == 404
    assert client.post(named, json=body | {"model": "assistant"}).json["choices"] == adapted["choices"]


@pytest.mark.parametrize("model", ["nobody", "assistant:nobody", "nobody:pirate"])
def test_unknown_models(client: FlaskClient, model: str) -> None:
    """An unknown model is a 404 in OpenAI's words."""
    answer = client.post("/v1/chat/completions", json=CHAT | {"model": model})
    assert answer.status_code == 404
    assert answer.json["error"]["param"] == "model"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_bodies_that_are_not_objects(client: FlaskClient, body: bytes) -> None:
    """A body that is no JSON object is a 400 that says so, in the dialect of the route."""
    for path, key in (("/v1/chat/completions", "error"), ("/invocations", "error_code")):
        answer = client.post(path, data=body, content_type="application/json")
        assert answer.status_code == 400
        assert key in answer.json


def nested(depth: int, value: str = "1") -> str:
    return "[" * depth + value + "]" * depth


@pytest.mark.parametrize("depth", [70, 300, 700, 900, 5000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "arguments", "written arguments"])
def test_deep_values(client: FlaskClient, field: str, depth: int) -> None:
    """A value nested too deep is a 400 that names its field, whoever would have walked it."""
    value = f'{{"x":{nested(depth)}}}'
    message = '{"role": "user", "content": "x"}'
    if "arguments" in field:
        arguments = json.dumps(value) if "written" in field else value
        call = f'{{"id": "1", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
        body = f'{{"messages": [{message}, {{"role": "assistant", "tool_calls": [{call}]}}, {message}]}}'
    else:
        body = f'{{"messages": [{message}], "{field}": {value}}}'
    answer = client.post("/v1/chat/completions", data=body, content_type="application/json")
    assert answer.status_code == 400
    if depth < 900:  # else JSON's own decoder may be the first to refuse it
        assert answer.json["error"]["param"].endswith(field.split()[-1])
        assert "of at most 64 levels" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"messages": [{"role": "user", "content": "my secret is \\ud83d"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "ab \\ud83d cd"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "my secret is', "body"),
        (b'{"messages": [{"role": "user", "content": "my secret is"}], "metadata": {"x": NaN}}', "metadata.x"),
        (b'{"messages": [{"role": "user", "content": "my secret is"}], "metadata": {"x": "\\ud83d"}}', "metadata.x"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"\\ud83d": 1}}',
            "chat_template_kwargs",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": [1, {"b": 1e999}]}}',
            "chat_template_kwargs.a[1].b",
        ),
    ],
)
def test_values_that_json_does_not_allow(client: FlaskClient, body: bytes, field: str) -> None:
    """A value that JSON does not allow is refused with its field where there is one, without repeating the prompt."""
    answer = client.post("/v1/chat/completions", data=body, content_type="application/json")
    assert (answer.status_code, answer.json["error"]["param"]) == (400, field)
    if field == "body":
        assert "secret" not in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (b'"n": 1, "n": 2', "n"),
        (b'"logit_bias": {"1": 2, "2": 3, "1": 2}', "logit_bias.1"),
        (b'"metadata": {"a": [0, {"b": {}, "b": {}}]}', "metadata.a[1].b"),
        (b'"metadata": ' + b"[" * 60 + b'{"b": 1, "b": 1}' + b"]" * 60, "metadata" + "[0]" * 60 + ".b"),
        (
            b'"metadata": ' + b"[" * 900 + b'{"b": 1, "b": 1}' + b"]" * 900,
            ("metadata" + "[0]" * 40) + "…" + "[0]" * 42 + ".b",
        ),
        (b'"metadata": {"b": 1, "b": 1}, "user": ' + b"1" * 5000, "body"),
    ],
)
def test_a_key_that_is_there_twice(client: FlaskClient, fields: bytes, field: str) -> None:
    """A duplicate key in a body is refused with its path."""
    body = b'{"messages": [{"role": "user", "content": "x"}], ' + fields + b"}"
    answer = client.post("/v1/chat/completions", data=body, content_type="application/json")
    assert (answer.status_code, answer.json["error"]["param"]) == (400, field)
    assert ("there twice" in answer.json["error"]["message"]) == (field != "body")


@pytest.mark.parametrize("entry", [b"{}", b"[]", b'{"a": []}', b'"\\\\", []'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v2/models/m/generate"])
def test_too_many_objects(client: FlaskClient, path: str, entry: bytes) -> None:
    """A body with too many objects is refused before they are created; brackets within strings do not count, however
    escaped.
    """
    many = b'{"metadata": [' + b",".join([entry] * (MAX_OBJECTS + 1)) + b"]}"
    answer = client.post(path, data=many, content_type="application/json")
    assert answer.status_code in (400, 422)
    assert "objects, lists and keys are too many; at most 200,000" in answer.text
    text = json.dumps("\\" + '"{[:' * MAX_OBJECTS + "\\\\").encode()
    answer = client.post(
        path, data=b'{"text_input": ' + text + b', "temperature": "x"}', content_type="application/json"
    )
    assert answer.status_code in (400, 422)
    assert "too many" not in answer.text


@pytest.mark.parametrize(
    ("given", "field"), [([9999], "input[0]"), ([[9999]], "input[0][0]"), ([[1, 9999]], "input[0][1]")]
)
def test_a_token_that_does_not_exist(client: FlaskClient, given: list[Any], field: str) -> None:
    """A token id outside the vocabulary is refused with its path in the request."""
    answer = client.post("/v1/embeddings", json={"input": given})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, field)


def test_the_template_is_the_default_of_databricks_routes(client: FlaskClient) -> None:
    """``use_raw_prompt`` is false there unless given, as the document has it; OpenAI's and MLflow's prompts are raw."""

    def prompt_tokens(path: str, **given: bool) -> int:
        answer = client.post(path, json={"model": "assistant", "prompt": "hello", "max_tokens": 1} | given)
        return int(answer.json["usage"]["prompt_tokens"])

    raw = prompt_tokens("/v1/completions")
    assert prompt_tokens("/endpoints/assistant/invocations") == raw
    for path in (PATHS[0], "/serving-endpoints/completions"):
        assert prompt_tokens(path) == prompt_tokens(path, use_raw_prompt=False) > raw
        assert prompt_tokens(path, use_raw_prompt=True) == raw


def test_the_callers_own_user_is_in_the_log(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """``user`` is kept in the request's line; one of more than 256 characters is refused by name."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(access_record.logs, "event", lambda event, **facts: lines.append({"event": event, **facts}))
    client.post("/v1/chat/completions", json=CHAT | {"user": "ä" * 256})
    assert [line["user"] for line in lines if line["event"] == "request"] == ["ä" * 256]
    answer = client.post("/v1/chat/completions", json=CHAT | {"user": "a" * 257})
    assert answer.status_code == 400
    assert answer.json["error"]["message"].startswith("user: ")
    assert "a text of at most 256 characters" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/nothing", "error"), ("/serving-endpoints/a/b", "error_code"), ("/nothing", "error_code")],
)
def test_unknown_routes(client: FlaskClient, path: str, key: str) -> None:
    """An unknown route is a 404 in the dialect of its prefix."""
    answer = client.get(path)
    assert answer.status_code == 404
    assert key in answer.json


@pytest.mark.parametrize("path", ["/v1//chat/completions", "/v1/chat///completions", "/serving-endpoints//invocations"])
def test_repeated_slashes(client: FlaskClient, path: str) -> None:
    """Repeated slashes are one: no redirect, and an unknown route is reported in its dialect."""
    answer = client.post(path, json=CHAT | {"model": "assistant"}, headers={"X-Request-Id": "mine"})
    assert answer.headers["X-Request-Id"] == "mine"
    assert "Location" not in answer.headers
    if path.startswith("/v1"):
        assert answer.json["object"] == "chat.completion"
    else:
        assert (answer.status_code, list(answer.json)) == (404, ["error_code", "message"])


def test_wrong_method(client: FlaskClient) -> None:
    """A wrong method is a 405 with Allow, in the dialect of its prefix."""
    answer = client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert "POST" in answer.headers["Allow"]
    assert answer.json["error"]["code"] == "method_not_allowed"


def test_too_large_a_body(make: Callable[..., WorkerState]) -> None:
    """A body over the limit is a 413 whether or not its length is announced."""
    client = create_app(make(max_body_bytes=1000)).test_client()
    for path, key in (("/v1/chat/completions", "error"), ("/invocations", "error_code")):
        answer = client.post(path, data=b"x" * 2000, content_type="application/json")
        assert answer.status_code == 413
        assert key in answer.json


def test_logits_count_as_memory(make: Callable[..., WorkerState], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested logits count in the worker's memory budget until the reply is made."""
    server = make()
    added: list[int] = []
    add = server.memory.add
    monkeypatch.setattr(server.memory, "add", lambda caller, size, what: (added.append(size), add(caller, size, what)))
    monkeypatch.setattr(invoke, "logits_size", lambda request, vocab_size: (2**20, vocab_size))
    assert (
        create_app(server)
        .test_client()
        .post("/v1/completions", json={"model": "assistant", "prompt": "hi", "max_tokens": 2})
        .status_code
        == 200
    )
    assert max(added) > 2**20
    assert server.memory.used == 0


@pytest.mark.parametrize(
    "header", ["0", "-1", "nan", "inf", "soon", "1_0", "1e3", "+1", ".5", "1.", "0x10", "1 0", "", "9" * 400]
)
def test_bad_timeout_header(client: FlaskClient, header: str) -> None:
    """A time limit that is no positive number of seconds is refused by name."""
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Timeout": header})
    assert answer.status_code == 400
    assert "X-Request-Timeout" in answer.json["error"]["message"]


def test_timeout_header_ends_the_request(client: FlaskClient) -> None:
    """A time limit that passes is a 504."""
    answer = client.post(
        "/v1/chat/completions", json=CHAT | {"max_tokens": 3000}, headers={"X-Request-Timeout": "0.000001"}
    )
    assert answer.status_code == 504


def test_draining_refuses(client: FlaskClient, server: WorkerState) -> None:
    """A draining server answers 503 with Retry-After, and probes still answer."""
    server.load_shedder.draining = True
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert client.get("/ready").status_code == 503
    assert client.get("/ping").status_code == 200


def test_a_server_that_has_lost_its_database_is_not_ready(
    make: Callable[..., WorkerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer sends requests elsewhere once the database has not answered for some seconds, and no sooner."""

    class Away:
        away_seconds = 0.0

    server = dataclasses.replace(make(), ledger=Away())
    client = create_app(server).test_client()
    for seconds, status in ((0.0, 200), (4.0, 200), (6.0, 503), (0.0, 200)):
        Away.away_seconds = seconds
        answer = client.get("/ready")
        assert (answer.status_code, client.get("/v2/health/ready").status_code) == (status, status)
        assert client.get("/ping").status_code == client.get("/health").status_code == 200
        if status == 503:
            assert answer.json["message"] == "the database has not answered for 6 s"
            assert answer.headers["Retry-After"] == "5"


@pytest.mark.parametrize(
    ("serves", "missing", "status"),
    [(True, (), 200), (True, ("other",), 200), (False, (), 200), (False, ("a", "b"), 503)],
)
def test_a_server_that_serves_nothing_of_what_there_is_is_not_ready(
    make: Callable[..., WorkerState], serves: bool, missing: tuple[str, ...], status: int
) -> None:
    """A server without any endpoint is ready for the request that creates one; one whose engines do not come up while
    others serve the endpoints is not.
    """

    class Follower:
        pass

    Follower.missing = missing
    server = dataclasses.replace(make(), follower=Follower())
    if not serves:
        server = dataclasses.replace(server, endpoints=ServedEndpoints())
    answer = create_app(server).test_client().get("/ready")
    assert answer.status_code == status
    if status == 503:
        assert answer.json["message"] == "none of the endpoints is served here: a, b"


def test_full_queue(make: Callable[..., WorkerState], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the endpoint's queue full a request is a 503 with Retry-After before any work is done."""
    server = make(max_queued=0)
    answer = create_app(server).test_client().post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == Overloaded.status
    assert answer.headers["Retry-After"] == "1"
    assert sum(server.load_shedder.running(e.engine) for e in server.endpoints) == 0


def test_fault_shows_nothing(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is a 500 that shows no trace of the code, and gives its place back."""

    def boom(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("mlflow_llm.serving.frontend.invoke.prepare", boom)
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == InternalError.status
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


def test_request_id_is_echoed(client: FlaskClient) -> None:
    """A caller's plain request id comes back; a strange one is replaced."""
    assert client.get("/v1/models", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    assert client.get("/v1/models", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"].startswith("req-")


def test_lists(client: FlaskClient) -> None:
    """Models list endpoints and adapters; MLflow's list has every field its client reads."""
    assert [m["id"] for m in client.get("/v1/models").json["data"]] == ["assistant", "assistant:pirate"]
    assert client.get("/v1/models/assistant:pirate").json["parent"] == "assistant"
    entry = client.get("/api/2.0/endpoints/").json["endpoints"][0]
    assert entry == client.get("/api/2.0/endpoints/assistant").json
    assert set(entry) == {"name", "endpoint_type", "model", "endpoint_url", "limit"}
    assert client.get("/.well-known/databricks-config").json == {}


def test_probes_and_metrics(client: FlaskClient) -> None:
    """Health tells each engine's progress and metrics count a request by endpoint and adapter."""
    client.post("/v1/chat/completions", json=CHAT | {"model": "assistant:pirate"})
    assert client.get("/health").json["endpoints"]["assistant"]["status"] == "ready"
    text = client.get("/metrics").text
    assert (
        'mlflow_llm_requests_total{adapter="pirate",endpoint="assistant",entity="model-1",status="200",task="chat"}'
        in text
    )
    assert 'mlflow_llm_kv_tokens_total{endpoint="assistant",entity="model-1"}' in text


def test_docs_page(client: FlaskClient) -> None:
    """The documentation page has every route with its parameters and body's fields, and names no other host."""
    page = client.get("/docs")
    assert page.content_type.startswith("text/html")
    assert "://" not in page.text
    assert set(re.findall(r'href="([^"]*)"', page.text)) == {"openapi.json"}
    assert "<script" not in page.text
    document = client.get("/openapi.json").json
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            begin = page.text.index(f"<b>{method.upper()}</b><code>{path}</code>")
            reported = page.text[begin : page.text.index("</details>", begin)]
            for parameter in operation["parameters"]:
                assert f"<code>{parameter['in']}: {parameter['name']}</code>" in reported
            bodies = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for schema in bodies.get("oneOf", [bodies]):
                name = schema.get("$ref", "").rpartition("/")[2]
                found = document["components"]["schemas"][name] if name else schema
                assert all(f"<code>{field}</code>" in reported for field in found.get("properties", {}))
    assert "<td><code>n</code></td><td>integer in [1, 128] | null</td>" in page.text
    assert "<code>config.served_entities[].entity_name</code>" in page.text


def test_keys(make: Callable[..., WorkerState], tmp_path: Path) -> None:
    """With keys asked for, a request without one is a 401, with a wrong one too, with a right one answered."""
    from mlflow_llm.serving.metering.accounts.keys import Keys
    from mlflow_llm.serving.metering.store.store import Store

    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    try:
        keys = Keys(store)
        secret, _ = keys.create("team")
        client = create_app(make(keys=keys)).test_client()
        without = client.post("/v1/chat/completions", json=CHAT)
        assert (without.status_code, without.headers["WWW-Authenticate"]) == (401, "Bearer")
        wrong = client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer sk-no"})
        assert (wrong.status_code, wrong.headers["WWW-Authenticate"]) == (401, "Bearer")
        right = client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {secret}"})
        assert right.status_code == 200
        assert client.get("/health").status_code == 200
    finally:
        store.close()


@pytest.mark.parametrize(
    ("sent", "there"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/models", "/v1/models"),
    ],
)
def test_a_base_url_with_too_little_or_too_much(client: FlaskClient, sent: str, there: str) -> None:
    """A path without /v1, or with two, is a 404 that names the route and the base URLs of both kinds of clients."""
    refused = client.get(sent) if sent == "/models" else client.post(sent, json=CHAT)
    assert refused.status_code == 404
    text = refused.get_data(as_text=True)
    assert f"there is {there}: the base URL for OpenAI's clients is this server's with /v1 at its end" in text
    assert "Anthropic's without" in text
