"""A server's output and behaviour while it starts, and its listening addresses."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from instant_model import write_instant_model
from serving_process import Running, running

from mlflow_llm.serving.interface.bundle import Bundle

PROOF = 0  # the token that the proof of an engine has for a prompt
LOOKS = 3.0  # seconds


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server on the default host whose engine takes half a second to load."""
    with running(write_instant_model(tmp_path_factory.mktemp("started"), load_delay=0.5)) as server:
        yield server


def is_ready(server: Running) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=240) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as refused:
        refused.close()
    except OSError:
        pass
    return False


def test_the_start_is_reported(started: Running) -> None:
    """The start reports loading, first token and listening, in this order and each once."""
    said = started.log()
    steps = ("loading assistant", "first token of assistant", f"listening on {started.url}")
    assert [said.count(step) for step in steps] == [1, 1, 1], said
    places = [said.index(step) for step in steps]
    assert places == sorted(places)


def test_the_log_has_one_form(tmp_path: Path) -> None:
    """From the first line to "stopped", all that a server says is JSON, on standard error as in ``log_file``."""
    bundle, file = write_instant_model(tmp_path), tmp_path / "log.json"
    with running(bundle, log_file=str(file), host="0.0.0.0") as server:
        server.terminate()
        assert server.process.wait(240) == 0
        said = [json.loads(line) for line in server.log().splitlines()]
    assert [line["event"] for line in said][-1] == "stopped"
    events = {line["event"] for line in said}
    assert events >= {"loading", "first token", "engines ready", "listening", "serving", "draining"}
    assert [line["url"] for line in said if line["event"] == "listening"] == [f"http://0.0.0.0:{server.port}"]
    assert [line["level"] for line in said if "other machines" in line["event"]] == ["warning"]
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(map(str, kept)) == sorted(map(str, said))


def test_an_engine_without_a_token_is_never_ready(tmp_path: Path) -> None:
    """While an engine gives no first token nothing is announced, nothing listens and ``/ready`` is never a 200."""
    bundle = write_instant_model(tmp_path, stall_token_id=PROOF)
    with running(bundle, until="loading assistant") as server:
        end = time.monotonic() + 240
        while not any('"ready"' in path.read_text() for path in server.runtime.glob("*/status.json")):
            assert time.monotonic() < end, server.log()
            time.sleep(0.05)
        end = time.monotonic() + LOOKS
        while time.monotonic() < end:
            assert not is_ready(server)
            time.sleep(0.05)
        said = server.log()
    assert "first token" not in said
    assert "listening" not in said


def listening(server: Running) -> set[tuple[str, int]]:
    """Return the TCP addresses on which the server's processes listen."""
    one = psutil.Process(server.process.pid)
    connections = [c for p in (one, *one.children(recursive=True)) for c in p.net_connections("tcp")]
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def answers(server: Running, host: str) -> bool:
    try:
        socket.create_connection((host, server.port), timeout=10).close()
    except OSError:
        return False
    return True


def test_workers_have_no_torch(started: Running) -> None:
    """Workers and their arbiter have transformers' tokenizers without torch, which takes 280 MB and two seconds."""
    one = psutil.Process(started.process.pid)
    workers = [process for process in one.children() if "serve" in process.cmdline()]
    assert workers
    for process in (one, *workers):
        assert not [m.path for m in process.memory_maps() if "torch" in Path(m.path).name], process.cmdline()
    maps = [m.path for process in workers for m in process.memory_maps()]
    assert any("tokenizers" in path for path in maps)


def test_it_listens_on_loopback_alone(started: Running) -> None:
    """All processes of a server listen at 127.0.0.1 and its port alone, unless told otherwise."""
    assert listening(started) == {("127.0.0.1", started.port)}
    assert answers(started, "127.0.0.1")
    assert not answers(started, "127.0.0.2")  # another address of this machine


def test_it_listens_where_it_is_told(instant_bundle: Bundle) -> None:
    """With ``host`` 0.0.0.0 a server is reachable at every address of the machine."""
    with running(instant_bundle, host="0.0.0.0") as server:
        assert listening(server) == {("0.0.0.0", server.port)}
        assert answers(server, "127.0.0.2")
