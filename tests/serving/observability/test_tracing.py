"""Finished traces in a real MLflow store and at a collector."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import psutil
import pytest
from flask.testing import FlaskClient
from instant_model import write_instant_model
from processes import alive_after
from server_calls import BODY, ask, until
from serving_process import running
from stores import empty_store

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.observability.tracing import SOCKET, Outbox, Tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}


class Collector(http.server.BaseHTTPRequestHandler):
    """A collector that accepts OpenTelemetry's protobuf requests."""

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        self.server.taken.append(ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """Yield a collector's address and the requests it has received."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.taken = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.taken
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def exporting(directory: Path, **environment: str) -> Iterator[None]:
    """Run the exporter's process; leaving closes its standard input and waits until all is exported."""
    command = [sys.executable, "-m", "mlflow_llm.serving.observability.trace_exporter", str(directory), "served"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_TRACKING", "OTEL_"))}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=kept | environment)
    try:
        until = time.monotonic() + 240
        while not (directory / SOCKET).exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield
        _, output = process.communicate(timeout=240)
        assert process.returncode == 0, output
        assert b"not exported" not in output, output
    finally:
        process.kill()
        process.wait()


def traces(store: str) -> dict[str, Any]:
    """Return MLflow's traces by request id."""
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("served")
    found = client.search_traces(locations=[experiment.experiment_id], max_results=100)
    return {trace.data.spans[0].get_attribute("mlflow_llm.request_id"): trace for trace in found}


def spans(taken: list[Any]) -> dict[str, Any]:
    """Return the collector's spans by request id, with attributes as a dict."""
    found = {}
    for request in taken:
        for span in request.resource_spans[0].scope_spans[0].spans:
            attributes = {a.key: a.value for a in span.attributes}
            found[attributes["mlflow_llm.request_id"].string_value] = (span, attributes)
    return found


def usage_of(answer: Any) -> dict[str, int]:
    usages = answer["usage"]
    return {
        "input_tokens": usages["prompt_tokens"],
        "output_tokens": usages.get("completion_tokens", 0),
        "total_tokens": usages["total_tokens"],
    }


class Exported(NamedTuple):
    """``usages`` is the usage that each caller got, ``replies`` the texts of the request whose content is traced;
    ``found`` are MLflow's traces and ``sent`` the collector's spans, by the request's id."""

    usages: dict[str, dict[str, int]]
    body: dict[str, Any]
    replies: list[str]
    found: dict[str, Any]
    sent: dict[str, Any]


@pytest.fixture(scope="module")
def exported(make: Callable[..., WorkerState], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Trace requests of every kind with one exporter to a database and a collector."""
    store = empty_store(tmp_path_factory.mktemp("traces"))
    with tempfile.TemporaryDirectory(prefix="mlt-") as root, collecting() as collector:
        outbox = Outbox(Path(root))
        with exporting(Path(root), MLFLOW_TRACKING_URI=store, OTEL_EXPORTER_OTLP_ENDPOINT=collector[0]):
            usages = ask_all(create_app(make(tracer=Tracer(1.0, send=outbox))).test_client())
            body = CHAT | {"n": 2, "temperature": 1, "seed": 1, "stream": True}
            server = make(tracer=Tracer(1.0, content=True, send=outbox))
            replies = ask_streamed(create_app(server).test_client(), body)
            outbox.close()
            until = time.monotonic() + 240  # an exporter that is to end leaves what takes it longer than some seconds
            while not all("content" in found for found in (traces(store), spans(collector[1]))):
                assert time.monotonic() < until
                time.sleep(0.2)
        return Exported(usages, body, replies, traces(store), spans(collector[1]))


def ask_all(client: FlaskClient) -> dict[str, dict[str, int]]:
    """Ask whole and streamed, chat and embeddings, an adapter, in a caller's trace, refused and unsampled."""

    def ask(name: str, path: str, body: dict[str, Any], **headers: str) -> Any:
        return client.post(path, json=body, headers={"X-Request-Id": name, **headers})

    usages = {
        "whole": usage_of(ask("whole", "/v1/chat/completions", CHAT).json),
        "adapter": usage_of(ask("adapter", "/v1/chat/completions", CHAT | {"model": "assistant:pirate"}).json),
        "vectors": usage_of(ask("vectors", "/v1/embeddings", {"model": "assistant", "input": ["a", "bc"]}).json),
        "joined": usage_of(ask("joined", "/v1/chat/completions", CHAT, traceparent=HEADER).json),
    }
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events = ask("stream", "/v1/chat/completions", body).text.split("\n\n")
    usages["stream"] = usage_of(json.loads(events[-3].removeprefix("data: ")))
    too_long = CHAT | {"messages": [{"role": "user", "content": "x" * 9000}]}
    assert ask("refused", "/v1/chat/completions", too_long).status_code == 400
    assert ask("unsampled", "/v1/chat/completions", CHAT, traceparent=HEADER[:-2] + "00").status_code == 200
    return usages


def ask_streamed(client: FlaskClient, body: dict[str, Any]) -> list[str]:
    text = client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "content"}).text
    replies = ["", ""]
    for event in text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            replies[choice["index"]] += choice["delta"].get("content") or ""
    return replies


def test_usage_in_mlflow_and_at_a_collector(exported: Exported) -> None:
    """Every sampled request is a trace with the usage that its caller got, in both places; an unsampled one is none."""
    assert set(exported.found) == set(exported.sent) == {*exported.usages, "refused", "content"}
    for name, usage in exported.usages.items():
        (span,) = exported.found[name].data.spans
        assert span.get_attribute("mlflow.chat.tokenUsage") == usage
        assert exported.found[name].info.token_usage == usage
        attributes = exported.sent[name][1]
        assert attributes["gen_ai.usage.input_tokens"].int_value == usage["input_tokens"]
        assert attributes["gen_ai.usage.output_tokens"].int_value == usage["output_tokens"]


def test_a_trace_has_the_facts_of_its_request(exported: Exported) -> None:
    """State, kind and model are the request's; a refused one is an error; a stream has its first token."""
    found, sent = exported.found, exported.sent
    assert (found["whole"].info.state, found["refused"].info.state) == ("OK", "ERROR")
    assert found["refused"].data.spans[0].get_attribute("mlflow.chat.tokenUsage") is None
    assert found["adapter"].data.spans[0].model_name == "assistant:pirate"
    assert found["vectors"].data.spans[0].span_type == "EMBEDDING"
    assert [event.name for event in sent["stream"][0].events] == ["gen_ai.first_token"]


def test_a_callers_trace_goes_on(exported: Exported) -> None:
    """With a traceparent the span has the caller's trace and its span as parent, in both places."""
    assert exported.found["joined"].info.trace_id == f"tr-{TRACE}"
    assert exported.found["joined"].data.spans[0].parent_id == PARENT
    span = exported.sent["joined"][0]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_content_only_where_asked_for(exported: Exported) -> None:
    """Prompt and reply are in a trace only where content is traced, in the form MLflow shows as a conversation."""
    for name in exported.usages:
        (span,) = exported.found[name].data.spans
        assert (span.inputs, span.outputs) == (None, None)
    trace = exported.found["content"]
    (span,) = trace.data.spans
    assert span.inputs == exported.body
    assert [choice["message"]["content"] for choice in span.outputs["choices"]] == exported.replies
    assert trace.info.response_preview == "\n".join(exported.replies)


def test_a_server_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server with trace_sample exports a span, whose ids are in its log, and leaves no exporter behind."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[0])
        with running(write_instant_model(tmp_path), trace_sample=1.0) as server:
            exporters = [
                p for p in psutil.Process(server.process.pid).children() if "trace_exporter" in str(p.cmdline())
            ]
            status, text = ask(server, BODY)
            assert status == 200
            until(lambda: '"event": "request"' in server.log())
            (line,) = [json.loads(line) for line in server.log().splitlines() if '"event": "request"' in line]
            assert text.startswith(f'{{"id":"chatcmpl-{line["reply_id"]}"')
            until(lambda: line["request_id"] in spans(collector[1]))
            span, _ = spans(collector[1])[line["request_id"]]
            assert (span.trace_id.hex(), span.span_id.hex()) == (line["trace_id"], line["span_id"])
    assert len(exporters) == 1
    assert not alive_after(exporters)


def test_an_exporter_without_a_store_says_so(tmp_path: Path) -> None:
    """Without a trace store the exporter says that it cannot export and ends with status 1 as its input closes."""
    command = [sys.executable, "-m", "mlflow_llm.serving.observability.trace_exporter", str(tmp_path), "served"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "nonsense://nowhere"}
    done = subprocess.run(command, input=b"", capture_output=True, env=environment, timeout=600)
    assert done.returncode == 1
    assert b"traces cannot be exported" in done.stderr
