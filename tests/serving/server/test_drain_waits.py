"""A drain waits for every request that came before it, from its head to the last byte of its answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from gated_core import steps_up_to
from instant_model import write_instant_model
from server_calls import health, until
from serving_process import GATED_CORE, Running, running


@contextlib.contextmanager
def post(server: Running, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def status_of(server: Running, body: dict[str, Any]) -> int:
    with post(server, "/v1/completions", body) as answer:
        return answer.status


def await_line(server: Running, text: str) -> None:
    until = time.monotonic() + 240
    while text not in server.log():
        assert time.monotonic() < until, server.log()[-2000:]
        time.sleep(0.02)


def test_a_reply_that_is_still_being_read(tmp_path: Path) -> None:
    """A reader that pauses while the server shuts down gets all of a large reply."""
    with running(write_instant_model(tmp_path, embedding_dim=1000), drain_timeout=240.0) as server:
        body = {"model": "assistant", "input": [f"t{i}" for i in range(600)]}
        with post(server, "/v1/embeddings", body) as reply:
            begin = reply.read(1000)
            server.terminate()
            await_line(server, '"draining"')
            time.sleep(1.5)  # longer than a worker that had dropped the reply would live
            whole = begin + reply.read()
        assert len(json.loads(whole)["data"]) == 600
        assert server.process.wait(240) == 0


SLOW_STORE = """
from mlflow_llm.serving.metering.ledger import ledger
ledger.ADMISSION_TIMEOUT = 600.0
real = ledger.Ledger.reserve
def reserve(self, *args, **options):
    print("a request comes to its admission", flush=True)
    return real(self, *args, **options)
ledger.Ledger.reserve = reserve
"""


def test_a_request_that_waits_for_its_admission(tmp_path: Path) -> None:
    """A request that waits for a busy store when the signal comes is answered and counted."""
    database = tmp_path / "serving.db"
    body = {"model": "assistant", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    options: dict[str, Any] = {"database": f"sqlite:///{database}", "drain_timeout": 240.0, "in_worker": SLOW_STORE}
    with running(write_instant_model(tmp_path), **options) as server:
        assert status_of(server, body) == 200
        known = server.log().count("comes to its admission")
        answers: list[int] = []
        with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            asking = threading.Thread(target=lambda: answers.append(status_of(server, body)))
            asking.start()
            until(lambda: server.log().count("comes to its admission") > known)
            server.terminate()
            await_line(server, '"draining"')
            other.execute("ROLLBACK")
        asking.join(240)
        assert server.process.wait(240) == 0
        assert answers == [200], server.log()[-2000:]
        with contextlib.closing(sqlite3.connect(database)) as other:
            rows = other.execute("SELECT status, completion_tokens FROM ledger").fetchall()
        assert rows == [("ok", 3), ("ok", 3)]


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    """After SIGHUP to arbiter and workers, even twice, running requests are finished; gunicorn's reload and scaling
    signals change nothing before.
    """
    body = {"model": "assistant", "prompt": "a", "max_tokens": 60, "ignore_eos": True}
    with running(write_instant_model(tmp_path), core=GATED_CORE, drain_timeout=240.0) as server:
        arbiter = psutil.Process(server.process.pid)
        family = {process.pid for process in arbiter.children()}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(status_of(server, body)))
        with steps_up_to(server.model_dir, 5):
            asking.start()
            until(lambda: health(server)["running"] == 1)
            for meaningless in (signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU):
                server.process.send_signal(meaningless)
            workers = [process for process in arbiter.children() if "control.main" not in " ".join(process.cmdline())]
            for process in (*workers, arbiter, arbiter):
                process.send_signal(signal.SIGHUP)
            await_line(server, '"draining"')
            assert {process.pid for process in arbiter.children()} == family
        asking.join(240)
        assert answers == [200]
        assert server.process.wait(240) == 0
