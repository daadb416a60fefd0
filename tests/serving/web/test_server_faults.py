"""A real server whose parts are killed or hang while it serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator

import psutil
import pytest
from instant_model import write_instant_model
from serving_process import Running, running
from test_server import BODY, ask, asking, health, until

from mlflow_llm.serving.settings import EngineSettings

LONG = BODY | {"max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two workers; an engine of 10 ms a step that counts as hanging after 2 s without one."""
    bundle = write_instant_model(tmp_path_factory.mktemp("faults"), step_delay=0.01)
    settings = EngineSettings(idle_timeout=0.3, stall_timeout=2.0)
    with running(bundle, workers=2, engine=settings) as found:
        yield found


def told(lines: bytes) -> tuple[str, dict]:
    """Text and usage of a stream's bytes."""
    events = [line[6:] for line in lines.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-2:]
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    return text, next(chunk["usage"] for chunk in chunks if chunk.get("usage"))


def idle(server: Running) -> bool:
    """Healthy (a worker answers 503 until it has found the new engine) and with nothing left to do."""
    try:
        return health(server)["running"] == 0
    except urllib.error.HTTPError as error:
        error.close()
        return False


def engine_pid(server: Running) -> int:
    """The engine of this server: the process whose command line names its runtime directory's engine."""
    (found,) = {int(json.loads(p.read_text())["pid"]) for p in server.runtime.glob("*/status.json")}
    return found


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_outlives_its_engine(server: Running, fault: signal.Signals, temperature: float) -> None:
    """An engine killed or stopped in the middle of a stream: text and usage are those of an undisturbed one."""
    body = LONG | {"temperature": temperature, "seed": 7}
    with asking(server, body) as answer:
        expected = told(answer.read())
    with asking(server, body) as answer:
        start = b"".join(answer.readline() for _ in range(40))
        os.kill(engine_pid(server), fault)
        assert told(start + answer.read()) == expected
    until(lambda: idle(server))


def test_a_whole_reply_outlives_its_engine(server: Running) -> None:
    """The same for a reply of two choices that is not streamed."""
    body = BODY | {"max_tokens": 150, "n": 2, "temperature": 1.0, "seed": 3}
    expected = json.loads(ask(server, body)[1])
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(head.encode() + payload)
        until(lambda: health(server)["running"] >= 1)
        os.kill(engine_pid(server), signal.SIGKILL)
        caller.settimeout(30)
        found = b"".join(iter(lambda: caller.recv(65536), b""))
    reply = json.loads(found.partition(b"\r\n\r\n")[2])
    assert (reply["choices"], reply["usage"]) == (expected["choices"], expected["usage"])


def test_a_killed_worker_loses_only_its_own(server: Running) -> None:
    """kill -9 of a worker ends its connections, aborts their sequences, and leaves the other worker's streams whole."""
    body = LONG | {"max_tokens": 300}
    with asking(server, body) as answer:
        expected = told(answer.read())
    port = server.port
    with asking(server, body) as one:
        owner = worker_of(server, port)
        for _ in range(20):
            with asking(server, body) as other:
                if worker_of(server, port, besides={owner}) is None:
                    continue
                one.readline()
                os.kill(owner.pid, signal.SIGKILL)
                assert told(other.read()) == expected
                break
        else:
            pytest.fail("all connections went to one worker")
    until(lambda: idle(server))
    assert ask(server, BODY)[0] == 200


def worker_of(server: Running, port: int, besides: set[psutil.Process] = frozenset()) -> psutil.Process | None:
    """A worker, but none of ``besides``, that has an accepted connection."""
    for process in psutil.Process(server.process.pid).children():
        connections = process.net_connections("tcp")
        mine = [c for c in connections if c.status == "ESTABLISHED" and c.laddr.port == port]
        if mine and process not in besides:
            return process
    return None


def test_a_slow_reader_holds_up_nobody(server: Running) -> None:
    """While one client reads nothing, another's stream is whole; then the slow one gets all of its own."""
    with asking(server, LONG) as answer:
        expected = told(answer.read())
    with asking(server, LONG) as slow:
        time.sleep(0.2)
        with asking(server, LONG) as answer:
            assert told(answer.read()) == expected
        assert told(slow.read()) == expected
