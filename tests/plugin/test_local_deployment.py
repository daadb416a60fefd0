"""Deployments of target ``llm``: servers that the plugin starts, finds again, replaces and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin import local_servers

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CONFIG = {"workers": 1, "max_model_len": 128, "idle_timeout": 0.5, "drain_timeout": 5}


def text_of(chunks) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_life_of_a_deployment(place: Path, saved_model: Path) -> None:
    """Create, list, get, predict, stream, update without a dropped request, delete; each change is seen by the next."""
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

        errors: list[Exception] = []
        over = threading.Event()
        asking = threading.Thread(target=ask_until, args=(client, over, errors))
        asking.start()
        try:
            updated = client.update_deployment("assistant", config={"max_num_seqs": 4})
        finally:
            over.set()
            asking.join()
        assert errors == []
        assert updated["pid"] != made["pid"]
        assert not psutil.pid_exists(made["pid"])
        assert updated["config"] == CONFIG | {"max_num_seqs": 4}
        assert client.predict("assistant", CHAT)["choices"] == whole["choices"]
    finally:
        client.delete_deployment("assistant")
    assert client.list_deployments() == []
    with pytest.raises(MlflowException, match="no deployment"):
        client.predict("assistant", CHAT)


def ask_until(client, over: threading.Event, errors: list[Exception]) -> None:
    while not over.is_set():
        try:
            client.predict("assistant", CHAT)
        except MlflowException as error:
            errors.append(error)
        time.sleep(0.02)


def test_a_model_that_does_not_load(place: Path) -> None:
    """A server that does not come up is an MlflowException with its reason, and leaves no deployment."""
    client = get_deploy_client("llm")
    with pytest.raises(MlflowException, match="did not start"):
        client.create_deployment("broken", str(place / "nothing"))
    assert client.list_deployments() == []


def test_run_local_and_help(place: Path, saved_model: Path) -> None:
    """``mlflow deployments run-local`` serves until interrupted; ``help`` prints what the target takes."""
    command = [sys.executable, "-m", "mlflow", "deployments"]
    told = subprocess.run([*command, "help", "-t", "llm"], capture_output=True, text=True, timeout=60, check=True)
    assert "llm://host:port" in told.stdout
    port = local_servers._free_port()
    options = [f"port={port}", "workers=1", "max_model_len=128", "idle_timeout=0.5"]
    words = ["run-local", "-t", "llm", "--name", "local", "-m", str(saved_model)]
    words += [word for option in options for word in ("-C", option)]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not answers(port):
            assert process.poll() is None, (place / "log").read_text()
            assert time.monotonic() < until, (place / "log").read_text()
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        process.wait(30)
    assert "Traceback" not in (place / "log").read_text().replace("KeyboardInterrupt", "")


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
