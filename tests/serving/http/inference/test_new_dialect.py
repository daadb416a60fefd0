"""A dialect of another framing than JSON is one object: the server takes its routes, bytes and headers from it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS, Encoded, Head, InferenceRoute
from mlflow_llm.serving.dialects.base import Exchange
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.inference import info_routes
from mlflow_llm.serving.http.openapi.document import documented
from mlflow_llm.serving.http.routes import inference_routes
from mlflow_llm.serving.interface.errors import InvalidField, ServingError
from mlflow_llm.serving.interface.reply import Delta, Piece, Reply
from mlflow_llm.serving.interface.request import RawCompletion, RawRequest, RawSampling, Task, ValidRequest


class Framed:
    """A dialect of token ids as little-endian uint32 with a length header; ``v<version>`` is the number to generate."""

    name = "framed"
    routes = (
        InferenceRoute("/framed/<name>/v<version>", "completions", "Whole", ("application/octet-stream",)),
        InferenceRoute("/framed/<name>/v<version>/stream", "completions", "Streamed", ("application/octet-stream",)),
    )
    prefixes = ("/framed",)
    request_id_header = "X-Framed-Id"
    request_schemas: Mapping[Task, Mapping[str, Any]] = {"completions": {"type": "string", "format": "binary"}}
    error_schema: Mapping[str, Any] = {"type": "string"}

    def exchanges(self, route: InferenceRoute) -> Mapping[Task, Exchange]:
        form = {"event": bytes} if route is self.routes[1] else {"whole": bytes}
        media = {"media": ("application/octet-stream",), "stream_media": "application/x-framed"}
        return {"completions": Exchange(**form, **media)}

    def decode(self, head: Head, body: bytes) -> RawRequest:
        size = int(head.headers.get("x-ids-length") or 0)
        if size != len(body):
            raise InvalidField("X-Ids-Length", size, f"{len(body)}")
        sampling = RawSampling(max_tokens=int(head.path["version"]), ignore_eos=True)
        stream = head.route is self.routes[1]
        echoed = (head.headers.get("x-label") or "").encode()
        return RawCompletion(
            prompts=(struct.unpack(f"<{size // 4}I", body),), sampling=sampling, stream=stream, echoed=echoed
        )

    def encode(self, request: ValidRequest, reply: Reply, echoed: bytes = b"") -> Encoded:
        body = ids_bytes(reply.choices[0].token_ids)
        headers = {"X-Ids-Length": str(len(body)), "X-Label": echoed.decode()}
        return Encoded(body=body, content_type="application/octet-stream", headers=headers)

    def stream(self, request: ValidRequest, echoed: bytes = b"") -> FramedStream:
        return FramedStream(echoed)

    def error(self, error: ServingError) -> Encoded:
        return Encoded(status=error.status, body=f"!{error.message}".encode(), content_type="text/x-framed")


class FramedStream:
    content_type = "application/x-framed"

    def __init__(self, echoed: bytes) -> None:
        self.headers: Mapping[str, str] = {"X-Framed": "1", "X-Label": echoed.decode()}

    def encode(self, piece: Piece) -> bytes:
        return ids_bytes(piece.token_ids) if isinstance(piece, Delta) else b""

    def waiting(self) -> bytes:
        return b""

    def error(self, error: ServingError) -> bytes:
        return b"!"


def ids_bytes(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@pytest.fixture
def client(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a client of a server that has the test's dialect beside its own."""
    framed = Framed()
    monkeypatch.setitem(DIALECTS, framed.name, framed)
    return create_app(server, documented(inference_routes(framed) + info_routes.ROUTES)).test_client()


IDS = ids_bytes((1, 2, 3))
HEADERS = {"Content-Type": "application/octet-stream", "X-Ids-Length": "12"}


def test_bytes_and_headers_both_ways(client: Any) -> None:
    """Headers decide how a body is decoded, and replies, streamed or not, have the dialect's own type and headers."""
    whole = client.post("/framed/assistant/v5", data=IDS, headers=HEADERS)
    assert (whole.status_code, whole.content_type) == (200, "application/octet-stream")
    assert len(whole.data) == int(whole.headers["X-Ids-Length"]) == 4 * 5
    streamed = client.post("/framed/assistant/v5/stream", data=IDS, headers=HEADERS)
    assert (streamed.content_type, streamed.headers["X-Framed"]) == ("application/x-framed", "1")
    assert len(streamed.data) == 4 * 5
    for answer in (whole, streamed, client.post("/framed/nothing")):
        assert answer.headers["X-Framed-Id"] == answer.headers["X-Request-Id"]


def test_what_a_reply_repeats(client: Any) -> None:
    """The dialect gets back what its decoding kept of the same request, for streamed and whole replies."""
    for path in ("/framed/assistant/v5", "/framed/assistant/v5/stream"):
        for label in ("one", ""):
            answer = client.post(path, data=IDS, headers=HEADERS | {"X-Label": label})
            assert (answer.status_code, answer.headers["X-Label"]) == (200, label)
            assert answer.data


@pytest.mark.parametrize(
    ("path", "headers", "status", "message"),
    [
        ("/framed/assistant/v5", {"X-Ids-Length": "11"}, 400, b"!X-Ids-Length: 11 is not allowed; expected 12"),
        ("/framed/assistant/v5", {"Content-Type": "application/json"}, 415, b"!Content-Type: 'application/json'"),
        ("/framed/nobody/v5", {}, 404, b"!no endpoint is called 'nobody'"),
        ("/framed/nothing", {}, 404, b"!no route /framed/nothing"),
    ],
)
def test_refusals_have_its_form(client: Any, path: str, headers: dict[str, str], status: int, message: bytes) -> None:
    """Errors of decoding, errors before it and errors of unknown paths have the dialect's form."""
    answer = client.post(path, data=IDS, headers=HEADERS | headers)
    assert (answer.status_code, answer.content_type) == (status, "text/x-framed")
    assert answer.data.startswith(message)


def test_the_document_has_it(client: Any) -> None:
    """The OpenAPI document has the dialect's routes, media types, schemas and error form."""
    document = client.get("/openapi.json").json
    operation = document["paths"]["/framed/{name}/v{version}"]["post"]
    (content,) = operation["requestBody"]["content"].items()
    assert content == (
        "application/octet-stream",
        {"schema": {"$ref": "#/components/schemas/framed_completions_request"}},
    )
    assert document["components"]["schemas"]["framed_completions_request"] == {"type": "string", "format": "binary"}
    assert document["components"]["schemas"]["framed_error"] == {"type": "string"}
    binary = {"schema": {"type": "string", "format": "binary"}}
    assert operation["responses"]["200"]["content"] == {"application/octet-stream": binary}
    assert list(operation["responses"]["400"]["content"]) == ["text/x-framed"]
