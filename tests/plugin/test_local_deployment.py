"""Deployments of target ``llm``: servers that the plugin starts, finds again, replaces and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin import processes

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CONFIG = {"workers": 1, "max_model_len": 128, "idle_timeout": 0.5, "drain_timeout": 5}


def text_of(chunks) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_life_of_a_deployment(place: Path, saved_model: Path, second_model: Path) -> None:
    """A deployment is created, listed, queried, streamed, updated at its URL without a dropped request, and deleted."""
    client = get_deploy_client("llm")
    made = client.create_deployment("assistant", str(saved_model), config=CONFIG)
    try:
        assert (made["name"], made["status"], made["flavor"]) == ("assistant", "RUNNING", "llm")
        with pytest.raises(MlflowException, match="exists already"):
            client.create_deployment("assistant", str(saved_model))
        assert [d["name"] for d in client.list_deployments()] == ["assistant"]
        assert get_deploy_client("llm").get_deployment("assistant") == made

        whole = client.predict("assistant", CHAT)
        assert whole["usage"]["completion_tokens"] == 6
        assert text_of(client.predict_stream("assistant", CHAT)) == whole["choices"][0]["message"]["content"]
        assert len(client.predict("assistant", [CHAT, CHAT])["predictions"]) == 2
        with pytest.raises(MlflowException, match="temperature"):
            client.predict("assistant", CHAT | {"temperature": 9})

        with callers(client, "assistant", whole) as failures:
            updated = client.update_deployment("assistant", str(second_model), config={"max_num_seqs": "4"})
        assert failures == []
        assert {key: updated[key] for key in ("url", "pid", "status")} == {
            key: made[key] for key in ("url", "pid", "status")
        }
        assert updated["config"] == CONFIG | {"max_num_seqs": 4}
        assert updated["model_uri"] == str(second_model)
        with pytest.raises(MlflowException, match="workers cannot change"):
            client.update_deployment("assistant", config={"workers": 3})
        with pytest.raises(MlflowException, match="nowhere"):
            client.update_deployment("assistant", "/nowhere")
        assert client.predict("assistant", CHAT)["usage"]["completion_tokens"] == 6
        manage(made["url"].replace("http://", "llm://"), saved_model)
    finally:
        client.delete_deployment("assistant")
    assert client.list_deployments() == []
    with pytest.raises(MlflowException, match="no deployment"):
        client.predict("assistant", CHAT)


def manage(target: str, model: Path) -> None:
    """Create, list, update, query and delete an endpoint of the running server beside the first."""
    client = get_deploy_client(target)
    made = client.create_deployment("second", str(model), config={"max_model_len": 64})
    assert (made["name"], made["state"]["ready"]) == ("second", "READY")
    assert [found["name"] for found in client.list_deployments()] == ["assistant", "second"]
    with pytest.raises(MlflowException, match="already"):
        client.create_deployment("second", str(model))
    with pytest.raises(MlflowException, match="colour"):
        client.create_deployment("third", str(model), config={"colour": 1})
    updated = client.update_deployment("second", config={"max_num_seqs": 2})
    (entity,) = updated["config"]["served_entities"]
    assert entity["engine_settings"] == {"max_model_len": 64, "max_num_seqs": 2}
    assert client.get_deployment("second")["config"] == updated["config"]
    assert client.predict("second", CHAT)["usage"]["completion_tokens"] == 6
    client.delete_deployment("second")
    client.delete_deployment("second")
    assert [found["name"] for found in client.list_deployments()] == ["assistant"]


@contextlib.contextmanager
def callers(client, name: str, whole: dict, number: int = 4) -> Iterator[list[str]]:
    """Run callers in a closed loop of streamed replies while the body runs, and yield their errors."""
    failures: list[str] = []
    done: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                chunks = list(client.predict_stream(name, CHAT))
                if not text_of(chunks) or chunks[-1]["choices"][0]["finish_reason"] != "length":
                    failures.append(str(chunks[-1]))
                done.append(len(chunks))
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield failures
        before, until = len(done), time.monotonic() + 240
        while len(done) < before + number and time.monotonic() < until:  # some on the new version too
            time.sleep(0.02)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_model_that_does_not_load(place: Path) -> None:
    """A server that does not come up is an MlflowException with its reason, and leaves no deployment."""
    (place / "empty").mkdir()
    (place / "empty" / "MLmodel").write_text("flavors:\n  llm: {}\n")
    client = get_deploy_client("llm")
    with pytest.raises(MlflowException, match=r"did not start: .*manifest.json is missing"):
        client.create_deployment("broken", str(place / "empty"))
    assert client.list_deployments() == []


def test_run_local_and_help(place: Path, saved_model: Path) -> None:
    """``mlflow deployments run-local`` serves until interrupted; ``help`` prints the target's options."""
    command = [sys.executable, "-m", "mlflow", "deployments"]
    reported = subprocess.run([*command, "help", "-t", "llm"], capture_output=True, text=True, timeout=240, check=True)
    assert "llm://host:port" in reported.stdout
    port = processes.free_port()
    options = [f"port={port}", "workers=1", "max_model_len=128", "idle_timeout=0.5"]
    words = ["run-local", "-t", "llm", "--name", "local", "-m", str(saved_model)]
    words += [word for option in options for word in ("-C", option)]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 240
        while not answers(port):
            assert process.poll() is None, (place / "log").read_text()
            assert time.monotonic() < until, (place / "log").read_text()
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        process.wait(240)
    assert "Traceback" not in (place / "log").read_text().replace("KeyboardInterrupt", "")


NEVER_COLLECTS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
time.sleep(300)
"""


def test_a_server_that_nobody_collects_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server left as a zombie, because its parent has ended and PID 1 does not collect it, counts as ended."""
    killed: list[int] = []
    monkeypatch.setattr(psutil.Process, "kill", lambda process: killed.append(process.pid))
    parent = subprocess.Popen([sys.executable, "-c", NEVER_COLLECTS], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        processes.stop_process(pid, wait=5.0)
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert killed == []
    finally:
        parent.kill()
        parent.communicate()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=240) as answer:
            return answer.status == 200
    except OSError:
        return False
