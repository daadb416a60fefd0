"""Real servers whose parts are killed, and whose clients leave, stall or read slowly."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from gated_core import steps_up_to
from instant_model import write_instant_model
from server_calls import (
    BODY,
    LONG,
    ask,
    asking,
    engine_pid,
    health,
    idle,
    lines,
    text_and_usage,
    until,
    well,
    worker_of,
)
from serving_process import Running, running

MIB = 2**20


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_server_is_ended_while_its_workers_start(tmp_path: Path, ending: signal.Signals) -> None:
    """A signal that comes before the workers are ready ends them at once, not when their time to drain is over."""
    bundle = write_instant_model(tmp_path / "model")
    with running(bundle, workers=2, until="listening", drain_timeout=300) as server:
        server.process.send_signal(ending)
        assert server.process.wait(240) == 0
        log = server.log()
    assert "SIGKILL" not in log
    assert "Traceback" not in log


FULL = """
import errno, os
if os.path.exists({flag!r}):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""


UNREAD = """
import fcntl, os
unread, stderr = os.pipe()
fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
os.dup2(stderr, 2)
"""


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """Requests, health and shutdown work while a worker's standard error is a full pipe."""
    with running(write_instant_model(tmp_path), in_worker=UNREAD) as server:
        for _ in range(50):
            assert ask(server, BODY)[0] == 200
        assert health(server)["status"] == "ready"
        server.terminate()
        assert server.process.wait(240) == 0


def serving(server: Running) -> list[int]:
    """Return the pids of the workers that have begun to serve, in that order."""
    entries = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    return [entry["pid"] for entry in entries if entry["event"] == "serving"]


def test_workers_that_cannot_begin_are_tried_again(tmp_path: Path) -> None:
    """Workers that cannot start (full disk) are retried; the others go on, and a server without any recovers."""
    bundle, flag = write_instant_model(tmp_path / "model"), tmp_path / "full"
    with running(bundle, workers=2, in_worker=FULL.format(flag=str(flag))) as server:
        until(lambda: len(serving(server)) == 2)
        first, second = serving(server)
        flag.touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: server.log().count("a worker could not start") >= 2)
        assert ask(server, BODY)[0] == 200
        os.kill(second, signal.SIGKILL)
        until(lambda: server.log().count("a worker could not start") >= 4)
        flag.unlink()
        until(lambda: len(serving(server)) == 4)
        assert ask(server, BODY)[0] == 200
        server.terminate()
        assert server.process.wait(240) == 0


def test_a_server_whose_workers_cannot_begin_ends(tmp_path: Path) -> None:
    """A server that has never served ends with the reason if its workers cannot start."""
    bundle, flag = write_instant_model(tmp_path / "model"), tmp_path / "full"
    flag.touch()
    with running(bundle, in_worker=FULL.format(flag=str(flag)), until="failed to boot") as server:
        assert server.process.wait(240) != 0
        assert "No space left on device" in server.log()


def test_a_killed_worker_loses_only_its_own(unsteady: Running) -> None:
    """kill -9 of a worker ends its connections, aborts their sequences, and leaves the other worker's streams whole."""
    body = LONG | {"max_tokens": 300}
    with asking(unsteady, body) as answer:
        expected = text_and_usage(answer.read())
    with asking(unsteady, body) as one:
        owner = worker_of(unsteady)
        assert owner is not None
        for _ in range(20):
            with asking(unsteady, body) as other:
                if worker_of(unsteady, besides={owner}) is None:
                    continue
                one.readline()
                os.kill(owner.pid, signal.SIGKILL)
                assert text_and_usage(other.read()) == expected
                break
        else:
            pytest.fail("all connections went to one worker")
    until(lambda: idle(unsteady))
    assert ask(unsteady, BODY)[0] == 200


def test_a_worker_starts_beside_an_engine_that_stands_still(deliberate: Running) -> None:
    """A killed worker's successor answers although no engine takes a step, since it waits for no token."""
    until(lambda: idle(deliberate))
    with steps_up_to(deliberate.model_dir, 0), socket.create_connection(("127.0.0.1", deliberate.port)):
        until(lambda: worker_of(deliberate) is not None)
        killed = worker_of(deliberate)
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(240)
        until(lambda: idle(deliberate))
    assert ask(deliberate, BODY)[0] == 200


def test_health_comes_back_by_itself(deliberate: Running) -> None:
    """With nothing asked of it, a server whose engine is killed is unhealthy, and healthy again with the next one."""
    until(lambda: idle(deliberate))
    pid = engine_pid(deliberate)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not well(deliberate))
    until(lambda: well(deliberate))
    assert engine_pid(deliberate) != pid


@contextlib.contextmanager
def a_stream(server: Running, path: str) -> Iterator[None]:
    with asking(server, LONG, path) as answer:
        answer.readline()
        yield


@contextlib.contextmanager
def a_whole_reply(server: Running, path: str) -> Iterator[None]:
    """Return a request whose reply has no byte before its last token."""
    payload = json.dumps(LONG | {"stream": False, "stream_options": None}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(head.encode() + payload)
        yield


@pytest.mark.parametrize("asked_for", [a_stream, a_whole_reply])
def test_a_disconnect_aborts_before_the_next_step(
    deliberate: Running, asked_for: Callable[[Running, str], AbstractContextManager[None]]
) -> None:
    """A client that leaves between two steps is noticed without another token, and its request is aborted before the
    next step and counted as delivered.
    """
    path = "/endpoints/assistant/invocations"
    until(lambda: idle(deliberate))
    before, known = steps_at_rest(deliberate), len(lines(deliberate, path))
    with steps_up_to(deliberate.model_dir, before + 8):
        with asked_for(deliberate, path):
            until(lambda: health(deliberate)["steps"] == before + 8)
            for _ in range(3):  # the worker's loop goes round, and every reader that waited for a token has it
                assert health(deliberate)["running"] == 1
        until(lambda: len(lines(deliberate, path)) > known)
        until(lambda: idle(deliberate))
        found = lines(deliberate, path)[-1]
        assert found["status"] == 499
        assert 6 <= found["completion_tokens"] <= 8  # a character that lacks a byte is held back
        assert steps_at_rest(deliberate) == before + 8


def steps_at_rest(server: Running, more_than: int = -1) -> int:
    """Return an idle engine's number of steps from its heartbeat, once it exceeds the given number."""
    until(lambda: idle(server) and health(server)["steps"] > more_than)
    return int(health(server)["steps"])


def test_a_reader_that_stops_holds_up_nobody(fast: Running) -> None:
    """A client that reads nothing of a huge stream delays no other, costs no memory and no steps, and is disconnected
    after ``io_timeout``.
    """
    path = "/serving-endpoints/chat/completions"
    with asking(fast, LONG) as answer:
        expected = text_and_usage(answer.read())
    with asking(fast, LONG | {"max_tokens": 10**6}, path) as stuck, ThreadPoolExecutor(8) as pool:
        worker = worker_of(fast)
        assert worker is not None
        before = worker.memory_info().rss
        others = list(pool.map(lambda _: ask(fast, LONG), range(64)))
        assert [text_and_usage(text.encode()) for _, text in others] == [expected] * 64
        until(lambda: "a client stalled" in fast.log())
        assert worker.memory_info().rss - before < 64 * MIB
        until(lambda: idle(fast))
        until(lambda: bool(lines(fast, path)))
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            stuck.read()
    found = lines(fast, path)[-1]
    assert found["status"] == 499
    assert found["completion_tokens"] > 100


def test_a_reader_of_nothing_at_real_lengths(fast: Running) -> None:
    """If a client reads nothing of a long reply its request leaves the engine with most tokens not generated, and it is
    disconnected after ``io_timeout``.
    """
    path = "/endpoints/assistant/invocations"
    until(lambda: idle(fast))
    before = steps_at_rest(fast)
    with asking(fast, LONG | {"max_tokens": 10**6}, path):
        until(lambda: bool(lines(fast, path)))
    found = lines(fast, path)[-1]
    assert found["status"] == 499
    assert 10 < found["completion_tokens"] < 3000
    assert steps_at_rest(fast) - before < 10**6 // 2  # the request to pause takes a while to arrive


def test_a_slow_reader_gets_everything(fast: Running) -> None:
    """A client that pauses again and again, for less than ``io_timeout``, gets what a steady one gets."""
    body = LONG | {"max_tokens": 30_000, "temperature": 1.0, "seed": 5}
    with asking(fast, body) as answer:
        expected = text_and_usage(answer.read())
    found = b""
    with asking(fast, body) as slow:
        while part := slow.read(MIB):
            found += part
            time.sleep(0.3)
    assert text_and_usage(found) == expected
