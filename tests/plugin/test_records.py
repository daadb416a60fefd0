"""Records of deployments and identification of their processes: killed callers, moved clocks, damaged files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException
from stub_deployments import STUB, kill, refused

from mlflow_llm.plugin import processes, records
from mlflow_llm.serving.system.files import STATE_VARIABLE

CREATE = """
import sys
from mlflow.deployments import get_deploy_client
from mlflow_llm.plugin import local_config
real = local_config.command
local_config.command = lambda *given: [sys.executable, sys.argv[1], *real(*given)[5:]]
get_deploy_client("llm").create_deployment("a", sys.argv[2])
"""


def test_a_create_that_was_killed(client: Any, models: Path) -> None:
    """The server of a killed create is listed as starting, then as running, and can be deleted."""
    environment = {**os.environ, "STUB_WAIT": "6"}
    creator = subprocess.Popen([sys.executable, "-c", CREATE, STUB, str(models / "one")], env=environment)
    try:
        assert await_status(client, "STARTING")
        reason = "'a' is STARTING"
        refused("INVALID_STATE", reason, client.predict, "a", {"prompt": "x"})
        refused("RESOURCE_ALREADY_EXISTS", "STARTING", client.create_deployment, "a", str(models / "two"))
    finally:
        creator.kill()
        creator.wait()
    assert await_status(client, "RUNNING")
    assert client.predict("a", {"prompt": "x"})["body"] == {"prompt": "x"}
    client.delete_deployment("a")
    assert client.list_deployments() == []


def await_status(client: Any, status: str, seconds: float = 240) -> bool:
    until = time.monotonic() + seconds
    while [found["status"] for found in client.list_deployments()] != [status]:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_clock_that_moved() -> None:
    """A process is identified by boot id and ticks; records without these use the clock, unless it may have moved."""
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        birth = processes.keep(own)
        moved = birth.started + 3600
        assert processes.is_alive(msgspec.structs.replace(birth, started=moved))
        assert not processes.is_alive(msgspec.structs.replace(birth, ticks=birth.ticks + 1))
        assert not processes.is_alive(msgspec.structs.replace(birth, boot="another"))
        assert processes.is_alive(processes.Birth(pid=own.pid, started=birth.started))
        assert not processes.is_alive(processes.Birth(pid=own.pid, started=moved))
    finally:
        own.kill()
        own.wait()


def test_a_record_of_an_earlier_release(client: Any, models: Path) -> None:
    """A record without ticks and stores is read, and its deployment can be updated and deleted."""
    made = client.create_deployment("a", str(models / "one"), config={"max_num_seqs": 2})
    file = records.directory() / "a.json"
    kept = {key: json.loads(file.read_text())[key] for key in ("name", "model_uri", "config", "url", "pid", "started")}
    file.write_text(json.dumps(kept | {"config": {"max_num_seqs": "2"}, "flavor": "llm"}))
    assert client.get_deployment("a")["status"] == "RUNNING"
    assert client.update_deployment("a", str(models / "two"))["pid"] == made["pid"]
    client.delete_deployment("a")
    assert not processes.is_alive(processes.Birth(pid=made["pid"], started=kept["started"]))


def test_the_reason_is_of_this_start(client: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported reason comes from this start, not from errors of earlier starts in the same log."""
    for said in ("Error: the first", "a last word"):
        monkeypatch.setenv("STUB_FAIL", said)
        refused("INTERNAL_ERROR", f"did not start: {said}", client.create_deployment, "a", str(models / "one"))
    assert client.list_deployments() == []


def test_a_stopped_deployment(client: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``predict`` of a stopped deployment names the state and the remedy; a failed restart keeps the record."""
    made = client.create_deployment("a", str(models / "one"))
    kill(made)
    refused("INVALID_STATE", "'a' is STOPPED .`update` starts it again", client.predict, "a", {"prompt": "x"})
    with monkeypatch.context() as patch:
        patch.setenv("STUB_FAIL", "Error: no")
        refused("INTERNAL_ERROR", "did not start", client.update_deployment, "a")
    assert client.get_deployment("a") == made | {"status": "STOPPED"}
    assert client.update_deployment("a")["url"] == made["url"]


def test_update_waits_for_a_port_in_use(client: Any, models: Path) -> None:
    """``update`` waits for the port that workers of a killed server hold for a moment."""
    made = client.create_deployment("a", str(models / "one"))
    kill(made)
    holder = socket.create_server(("127.0.0.1", urlsplit(made["url"]).port or 0))
    release = threading.Timer(1.0, holder.close)
    release.start()
    assert client.update_deployment("a")["url"] == made["url"]
    assert release.finished.is_set()


def test_threads_that_still_run() -> None:
    """A process has ended when its last thread has; a zombie whose threads still run holds its port."""
    lines = "import ctypes, socket, threading, time; s = socket.create_server(('127.0.0.1', 0)); "
    lines += "threading.Thread(target=time.sleep, args=(600,)).start(); print(s.getsockname()[1], flush=True); "
    process = subprocess.Popen([sys.executable, "-c", lines + "ctypes.CDLL(None).pthread_exit(None)"], stdout=PIPE)
    assert process.stdout
    with process.stdout as reported:
        port = int(reported.readline())
    birth = processes.keep(process)
    processes.children.pop(process.pid)  # its exit status is never read
    found = psutil.Process(process.pid)
    while found.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert processes.is_alive(birth)
    with pytest.raises(MlflowException, match="Address already in use"):
        processes.must_be_free("127.0.0.1", port)
    process.kill()
    until = time.monotonic() + 240
    while processes.is_alive(birth):
        assert time.monotonic() < until
    processes.must_be_free("127.0.0.1", port)
    process.wait()


@pytest.mark.parametrize("text", [b"", b"{}", b"[1", b"\xff", b'{"name": "b", "pid": "x"}'])
def test_a_damaged_record(client: Any, models: Path, text: bytes) -> None:
    """A damaged record is named by its file, the others are listed beside it, and delete removes it."""
    file = records.directory() / "b.json"
    file.write_bytes(text)
    (records.directory() / "no name.json").write_bytes(text)
    with pytest.raises(MlflowException, match=str(file)):
        client.get_deployment("b")
    (found,) = client.list_deployments()
    assert (found["name"], found["status"]) == ("b", "UNREADABLE")
    refused("RESOURCE_ALREADY_EXISTS", "UNREADABLE", client.create_deployment, "b", str(models / "one"))
    client.delete_deployment("b")
    assert client.list_deployments() == []


def test_a_state_directory_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusable state directory is named with the variable that sets another."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(MlflowException, match=f"{tmp_path}/file/deployments cannot be used .*{STATE_VARIABLE}"):
        get_deploy_client("llm").list_deployments()
