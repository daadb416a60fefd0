"""Servers on this machine that the deployments plugin starts and finds again.

One file a deployment, ``<state>/deployments/<name>.json``; one lock for all. The file names the process by its id and
its start time, so that a number used again by another process is not taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from mlflow_llm.serving.errors import InvalidField
from mlflow_llm.serving.settings import check_name as endpoint_name
from mlflow_llm.serving.settings import check_server_engine
from mlflow_llm.serving.transport.locks import acquire
from mlflow_llm.serving.web.settings import DATABASE_VARIABLE, ServerSettings, default_state_dir

from . import endpoint_calls as endpoints

SERVER_KEYS = ("host", "port", "workers", "profile", "database", "timeout", "drain_timeout", "max_queued", "log_level")
START_SECONDS = 600.0
_children: dict[int, subprocess.Popen[bytes]] = {}  # those that this process started and has to reap


def directory() -> Path:
    path = default_state_dir() / "deployments"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _remake() -> None:
    directory()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One change to a deployment at a time, across processes."""
    path = directory() / f".{name}.lock"
    lock = acquire(str(path), make_parent=_remake)
    try:
        yield
    finally:
        lock.release()


def check_name(name: Any) -> str:
    try:
        return endpoint_name(name)
    except InvalidField as error:
        raise MlflowException.invalid_parameter_value(error.message) from None


def check_config(config: dict[str, Any]) -> None:
    """What ``command`` makes of it is allowed. Raises ``MlflowException``."""
    settings = {key: endpoints.parsed(value) for key, value in config.items()}
    own = [key for key in SERVER_KEYS if key in ServerSettings.__struct_fields__]
    try:
        ServerSettings.read({key: settings[key] for key in own if key in settings})
        check_server_engine({key: settings[key] for key in endpoints.ENGINE_KEYS if key in settings})
    except InvalidField as error:
        raise MlflowException.invalid_parameter_value(error.message) from None


def read(name: str) -> dict[str, Any]:
    """A deployment's record. Raises ``MlflowException`` for an unknown one."""
    try:
        record: dict[str, Any] = json.loads((directory() / f"{check_name(name)}.json").read_text())
    except FileNotFoundError:
        raise MlflowException(f"no deployment is called {name!r}", error_code=RESOURCE_DOES_NOT_EXIST) from None
    return record | {"status": "RUNNING" if is_running(record) else "STOPPED"}


def names() -> list[str]:
    return sorted(path.stem for path in directory().glob("*.json"))


def is_running(record: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(record["pid"])
        return abs(process.create_time() - record["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command(name: str, model_uri: str, config: dict[str, Any]) -> list[str]:
    """The server's command line; what is no server option is an engine setting."""
    words = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "-m", model_uri, "--name", name]
    for key, value in config.items():
        if key == "database":  # may have a password, and whoever lists processes reads command lines
            continue
        if key in SERVER_KEYS:
            words += [f"--{key.replace('_', '-')}", str(value)]
        elif key == "require_keys":
            words += ["--require-keys"] if str(value).lower() == "true" else []
        else:
            words += ["-C", f"{key}={value}"]
    return words


def _environment(config: dict[str, Any]) -> dict[str, str]:
    own = {DATABASE_VARIABLE: str(config["database"])} if config.get("database") else {}
    return {**os.environ, **own}


def start(name: str, model_uri: str, config: dict[str, Any], *, port: int | None = None) -> dict[str, Any]:
    """Start a server and wait until it is ready. Its record, not yet written. Raises ``MlflowException``."""
    check_config(config)
    port = int(config.get("port") or 0) or port or _free_port()
    host = str(config.get("host") or "127.0.0.1")
    log = directory() / f"{name}.log"
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            command(name, model_uri, {**config, "port": port}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=_environment(config),
            start_new_session=True,
        )
    _children[process.pid] = process
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    try:
        started = psutil.Process(process.pid).create_time()
        _await(process, url, log)
    except BaseException:
        stop_process(process.pid)
        raise
    return {
        "name": name,
        "model_uri": model_uri,
        "config": config,
        "url": url,
        "pid": process.pid,
        "started": started,
        "flavor": "llm",
    }


def update(record: dict[str, Any], model_uri: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """Have the running server serve another version or other engine settings; one that does not run is started.

    The new record, not yet written. Raises ``MlflowException``; the server then goes on as before.
    """
    merged = {**record["config"], **config}
    uri = model_uri or record["model_uri"]
    if not is_running(record):
        return start(record["name"], uri, merged, port=urlsplit(record["url"]).port)
    if changed := endpoints.differing(record["config"], config, (*SERVER_KEYS, "require_keys")):
        raise MlflowException.invalid_parameter_value(
            f"config: {', '.join(changed)} cannot change while the server runs; delete the deployment and create it"
        )
    own = (*SERVER_KEYS, "require_keys", "trust_remote_code")  # of the command line, which runs on
    settings = {key: value for key, value in merged.items() if key not in own}
    endpoints.update(record["url"], record["name"], uri, settings)
    return record | {"model_uri": uri, "config": merged}


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no message")
            raise MlflowException(f"the server did not start: {reason[:300]} (log: {log})")
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise MlflowException(f"the server was not ready within {START_SECONDS:.0f} seconds (log: {log})")


def write(record: dict[str, Any]) -> None:
    path = directory() / f"{record['name']}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({k: v for k, v in record.items() if k != "status"}, indent=1))
    draft.replace(path)


def stop(record: dict[str, Any], *, wait: float | None = None) -> None:
    """Drain and end a deployment's server, if it runs."""
    if is_running(record):
        drain = float(record["config"].get("drain_timeout") or 30)
        stop_process(record["pid"], drain + 15 if wait is None else wait)


def stop_process(pid: int, wait: float = 15.0) -> None:
    """SIGTERM drains; what is still there after ``wait`` seconds is ended at once, its children too."""
    try:
        _signal_and_wait(pid, wait)
    finally:
        if (child := _children.pop(pid, None)) is not None:
            child.poll()


def _signal_and_wait(pid: int, wait: float) -> None:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
    except psutil.Error:
        return
    if not _ended_within([process], wait):
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        _ended_within(family, 5)


def _ended_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Wait for all. Another command's child is collected by PID 1, which in many a container never does: for psutil a
    zombie still runs, for us it has ended."""
    end = time.monotonic() + seconds
    while not all(_has_ended(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def must_be_new(name: str) -> None:
    if check_name(name) in names():
        raise MlflowException(f"a deployment {name!r} exists already", error_code=RESOURCE_ALREADY_EXISTS)


def remove(name: str) -> None:
    for suffix in (".json", ".log"):
        (directory() / f"{name}{suffix}").unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
