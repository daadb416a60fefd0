"""A real server: gunicorn's arbiter, a gevent worker, a controller process and an engine process, on a loopback
port."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from instant_model import write_instant_model
from processes import alive_after
from server_calls import BODY, ask, asking, draining, health, until
from serving_process import Running, running


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server whose engine takes 10 ms a step."""
    bundle = write_instant_model(tmp_path_factory.mktemp("slow"), step_delay=0.01)
    with running(bundle, drain_timeout=1.0) as server:
        yield server


def test_answers_and_streams(slow: Running) -> None:
    """The same request gives the same text whole and streamed, over keep-alive connections."""
    whole = json.loads(ask(slow, BODY)[1])
    found = ask(slow, BODY | {"stream": True})[1]
    lines = [line[6:] for line in found.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    deltas = [c["delta"].get("content") or "" for line in lines[:-1] for c in json.loads(line)["choices"]]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]


def test_disconnect_aborts_a_stream(slow: Running) -> None:
    """A client that closes in the middle of a stream has its sequence aborted."""
    with asking(slow, BODY | {"stream": True, "max_tokens": 4000}) as answer:
        answer.readline()
        until(lambda: health(slow)["running"] == 1)
    until(lambda: health(slow)["running"] == 0)


def test_disconnect_aborts_a_whole_reply(slow: Running) -> None:
    """A client that closes while it waits for a reply that is not streamed has its sequence aborted."""
    payload = json.dumps(BODY | {"max_tokens": 4000}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow.port)) as caller:
        caller.sendall(head.encode() + payload)
        until(lambda: health(slow)["running"] == 1)
    until(lambda: health(slow)["running"] == 0)


def test_a_large_body_holds_up_nobody(slow: Running) -> None:
    """While 2 MB are tokenised (and refused as too long), a small request is answered."""
    payload = json.dumps(BODY | {"messages": [{"role": "user", "content": "word " * 400_000}]}).encode()
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(ask, slow, payload)
        assert ask(slow, BODY)[0] == 200
        status, text = large.result()
    assert status == 400
    assert json.loads(text)["error"]["code"] == "context_length_exceeded"


def test_a_large_body_names_an_adapter(slow: Running) -> None:
    """A body large enough for a thread may name an adapter, which is looked up there."""
    for adapter, expected in (("pirate", 200), ("nobody", 404)):
        body = json.dumps(BODY | {"adapter": adapter}).encode() + b" " * 10_000
        with asking(slow, body, "/invocations") as answer:
            assert answer.status == expected, answer.read()


def test_metrics_of_all_processes(slow: Running) -> None:
    """A scrape gives the workers' counters and the engine's gauges."""
    assert ask(slow, BODY)[0] == 200
    with urllib.request.urlopen(f"{slow.url}/metrics", timeout=240) as answer:
        text = answer.read().decode()
    assert 'mlflow_llm_tokens_total{adapter="",endpoint="assistant",entity="model-1",kind="completion"}' in text
    assert 'mlflow_llm_engine_ready{endpoint="assistant",entity="model-1"} 1.0' in text


def test_drain_ends_streams_with_a_final_event(tmp_path: Path) -> None:
    """After SIGTERM new requests get a 503; over the limit a stream ends with an error event and a whole reply is a
    503; no process is left."""
    with running(write_instant_model(tmp_path, step_delay=0.01), drain_timeout=8.0) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool, asking(server, BODY | {"stream": True, "max_tokens": 4000}) as answer:
            answer.readline()
            whole = pool.submit(ask, server, BODY | {"max_tokens": 4000})
            until(lambda: health(server)["running"] == 2)
            server.terminate()
            until(lambda: draining(server))
            with asking(server, BODY) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            rest = answer.read().decode()
            status, text = whole.result()
            assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
        lines = [line.removeprefix("data: ") for line in rest.strip().split("\n\n")]
        assert json.loads(lines[-2])["error"]["code"] == "shutting_down"
        assert lines[-1] == "[DONE]"
        assert server.process.wait(240) == 0, server.log()[-4000:]
        assert not alive_after(family, 240)
