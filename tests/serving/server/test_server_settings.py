"""Real servers with more connections than they have places for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from instant_model import write_instant_model
from server_calls import BODY, ask, asking, until
from serving_process import Running, free_port, running

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.errors import InvalidField

WORKERS = 3
PLACES = 90
FOR_EVER = 3600.0
HELD = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)
SLOW_TURNS = """
from mlflow_llm.serving.http.gunicorn import accept_balancing
accept_balancing.HUNG_SECONDS  # the name that is read
accept_balancing.HUNG_SECONDS = 240.0  # on a busy machine a slow worker is not taken for hung
"""


@contextlib.contextmanager
def three_workers(model_dir: Path, **settings: object) -> Iterator[Running]:
    """Yield a server of three workers with 90 places each, which wait without limit for a first byte."""
    bundle = write_instant_model(model_dir, step_delay=0.01)
    waits = {"io_timeout": FOR_EVER, "first_byte_timeout": FOR_EVER}
    places = {"max_connections": PLACES, "max_connections_per_address": PLACES}
    with running(bundle, workers=WORKERS, in_worker=SLOW_TURNS, **places, **waits, **settings) as server:
        until(lambda: all_take(server))
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """Yield a server of such workers and the URL of its probes."""
    port = free_port()
    with three_workers(tmp_path_factory.mktemp("guarded"), probe_port=port) as server:
        yield server, f"http://127.0.0.1:{port}"


def workers(server: Running) -> dict[int, int]:
    """Return the accepted connections of each listening worker, those included that only the client has closed."""
    found = {}
    for process in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            mine = [c for c in process.net_connections("tcp") if c.laddr.port == server.port]
            is_worker = "control.main" not in " ".join(process.cmdline())
            if is_worker and any(c.status == psutil.CONN_LISTEN for c in mine):
                found[process.pid] = sum(c.status in HELD for c in mine)
    return found


def all_take(server: Running) -> bool:
    """Return whether every worker accepts connections, by opening as many."""
    with idle(server, WORKERS):
        until(lambda: sum(workers(server).values()) == WORKERS)
        return min(workers(server).values()) == 1 and len(workers(server)) == WORKERS


@contextlib.contextmanager
def idle(server: Running, number: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections open without sending anything."""
    with contextlib.ExitStack() as held:
        yield [
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=240)) for _ in range(number)
        ]
    until(lambda: sum(workers(server).values()) == 0)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=240) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def ended(caller: socket.socket) -> bool:
    """Return whether the server has closed an idle connection."""
    caller.setblocking(False)
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_burst_is_shared(tmp_path: Path) -> None:
    """No worker has more than 1.5 times its share of 120 concurrent connections, even after one was killed and
    replaced.
    """
    with three_workers(tmp_path / "model") as server:
        for _ in range(2):
            with idle(server, 120):
                until(lambda: sum(workers(server).values()) == 120)
                assert max(workers(server).values()) <= 1.5 * 120 / WORKERS
                victim = next(iter(workers(server)))
                os.kill(victim, signal.SIGKILL)
            until(lambda: victim not in workers(server) and all_take(server))  # noqa: B023


def test_the_oldest_makes_room(guarded: tuple[Running, str]) -> None:
    """With more idle connections than places requests are served, and the oldest idle ones are closed."""
    server, _ = guarded
    with idle(server, 2 * WORKERS * PLACES) as callers:
        assert status(f"{server.url}/ping") == 200
        assert ask(server, BODY)[0] == 200
        until(lambda: sum(map(ended, callers)) >= WORKERS * PLACES)
        gone = [number for number, caller in enumerate(callers) if ended(caller)]
        newest = range(len(callers) - WORKERS * PLACES // 4, len(callers))
        assert not set(gone) & set(newest)
        assert sum(workers(server).values()) <= WORKERS * PLACES


def test_probes_have_a_listener_of_their_own(guarded: tuple[Running, str]) -> None:
    """The probe listener answers probes and metrics alone; the gateway answers probes and no metrics."""
    server, probes = guarded
    assert [status(f"{probes}/{path}") for path in ("ping", "health", "ready", "metrics")] == [200] * 4
    assert [status(f"{probes}/{path}") for path in ("v1/models", "docs", "openapi.json", "nothing")] == [404] * 4
    assert [status(f"{server.url}/{path}") for path in ("ping", "health", "ready", "metrics")] == [200, 200, 200, 404]
    refused = urllib.request.Request(f"{probes}/health", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403") as error:
        urllib.request.urlopen(refused, timeout=240)
    error.value.close()


def test_a_full_server_without_idle_connections(tmp_path: Path) -> None:
    """If no connection can be closed, one beyond its address's limit gets a 429, probes are still answered, and freed
    places are used again.
    """
    port = free_port()
    bundle = write_instant_model(tmp_path / "model", step_delay=0.05)
    with running(bundle, max_connections=3, max_connections_per_address=2, probe_port=port) as server:
        long = BODY | {"stream": True, "max_tokens": 4000}
        with asking(server, long) as one, asking(server, long) as other:
            for answer in (one, other):
                assert answer.readline()
            with asking(server, BODY) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
                assert b"too many connections" in refused.read()
            assert [status(f"http://127.0.0.1:{port}/{path}") for path in ("ping", "health", "ready")] == [200] * 3
        until(lambda: status(f"{server.url}/ping") == 200)
        until(lambda: '"refused"' in server.log())
        lines = [json.loads(line) for line in server.log().splitlines() if '"refused"' in line]
        assert {(line["address"], line["status"]) for line in lines} == {("127.0.0.1", 429)}


def test_a_client_that_reads_nothing_is_evicted(guarded: tuple[Running, str]) -> None:
    """Connections of clients that read nothing of their answers (Slow Read) are evicted for others."""
    server, _ = guarded
    with ExitStack() as held:
        for number in range(WORKERS * PLACES + 2 * WORKERS):
            caller = held.enter_context(socket.socket())
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            caller.bind((f"127.0.0.{2 + number % 4}", 0))
            caller.settimeout(240)
            caller.connect(("127.0.0.1", server.port))
            caller.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(f"{server.url}/ping") == 200
        assert ask(server, BODY)[0] == 200


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"probe_host": "127.0.0.1"}, "probe_host"),
        ({"probe_port": 8000}, "probe_port"),
        ({"probe_port": -1}, "probe_port"),
    ],
)
def test_invalid_probe_addresses_are_refused(values: dict[str, object], field: str) -> None:
    """An address for probes without a port, or the gateway's own, is refused."""
    with pytest.raises(InvalidField, match=field):
        ServerSettings(**values)
