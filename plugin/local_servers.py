"""Servers on this machine that the deployments plugin starts, finds again, updates and stops.

A deployment's status::

    STARTING      its process is running but not ready yet
    RUNNING       it serves; URI and settings are those that the server itself reports
    DELETED       its endpoint was deleted through the server, which keeps running; `update` restores it
    UNREACHABLE   its process is running but does not answer
    STOPPED       its process has ended; `update` starts it again
    UNREADABLE    its record is damaged; `delete` removes it
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_STATE, RESOURCE_ALREADY_EXISTS
from msgspec.structs import asdict, replace

from mlflow_llm.flavors.llm.model.names import FLAVOR_NAME
from mlflow_llm.serving.interface.errors import without_password

from . import endpoint_calls as endpoints
from . import http_calls, model_uris, processes, records
from . import local_config as configs
from .records import Record

START_SECONDS = 600.0
LOOK_SECONDS = 5.0
PORT_SECONDS = 10.0  # the workers of a killed server hold its port until they notice
HINTS = {
    "DELETED": "its endpoint was deleted through the server, which runs on; `update` brings it back",
    "STARTING": "`get` says when it runs",
    "STOPPED": "`update` starts it again",
    "UNREADABLE": "its record is damaged; `delete` removes it",
}


def get(name: str) -> dict[str, Any]:
    """Return a deployment as MLflow shows it. Raises ``MlflowException`` for an unknown one."""
    status, record, served = refresh(records.read(name))
    database = {key: without_password(record.config[key]) for key in record.config if key == "database"}
    return {
        "name": record.name,
        "status": status,
        "flavor": FLAVOR_NAME,
        "url": record.url,
        "model_uri": ", ".join(map(endpoints.uri_of, served)) or record.model_uri,
        "config": record.config | database,
        "pid": record.pid,
        "tracking_uri": without_password(record.tracking_uri),
        "registry_uri": without_password(record.registry_uri),
    }


def list_all() -> list[dict[str, Any]]:
    found = []
    for name in records.names():
        try:
            found.append(get(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # that one was deleted just now
                found.append({"name": name, "flavor": FLAVOR_NAME, "status": "UNREADABLE", "message": error.message})
    return found


def refresh(record: Record) -> tuple[str, Record, list[dict[str, Any]]]:
    """Bring a record up to date; return the deployment's status, its record, and the served entities.

    A change that was made through the server is recorded, so that it is known after the server has ended.
    """
    status, served = _look(record)
    if not served:
        return status, record, served
    found = replace(_as_served(record, served), starting=False)
    if found != record:
        records.exchange(record, found)
    return status, found, served


def _look(record: Record) -> tuple[str, list[dict[str, Any]]]:
    if not processes.is_alive(record):
        return "STOPPED", []
    silent = "STARTING" if record.starting else "UNREACHABLE"
    if record.starting and not processes.listens(record.pid, port_of(record)):  # another server may answer there
        return silent, []
    try:
        endpoint = endpoints.get(record.url, record.name, seconds=LOOK_SECONDS)
    except MlflowException as error:
        known = {"RESOURCE_DOES_NOT_EXIST": "DELETED", "UNAUTHENTICATED": "RUNNING", "PERMISSION_DENIED": "RUNNING"}
        return known.get(error.error_code, silent), []
    served = endpoints.entities(endpoint)
    # without the scope "manage" a key does not see the models
    return "RUNNING" if served or endpoint["state"].get("ready") == "READY" else "STARTING", served


def _as_served(record: Record, served: list[dict[str, Any]]) -> Record:
    """Return ``record`` with the URI and settings that the server reports; unchanged if it serves several models."""
    if len(served) != 1:
        return record
    uri, settings = endpoints.uri_of(served[0]), endpoints.settings_of(served[0])
    return replace(record, model_uri=uri, config=_config(record, settings))


def _config(record: Record, settings: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in record.config.items() if key in configs.SERVER_KEYS}
    return own | (configs.base_of(record.config) if record.base is None else record.base) | settings


def port_of(record: Record) -> int:
    return urlsplit(record.url).port or 0


def must_be_new(name: str) -> None:
    if records.check_name(name) not in records.names():
        return
    try:
        status, _, _ = refresh(records.read(name))
    except MlflowException:
        status = "UNREADABLE"
    raise MlflowException(
        f"a deployment {name!r} exists already: {_described(status)}", error_code=RESOURCE_ALREADY_EXISTS
    )


def _described(status: str) -> str:
    return f"{status} ({HINTS[status]})" if status in HINTS else status


def url_of(name: str) -> str:
    """Return the URL of a deployment's server. Raises ``MlflowException`` if none is running."""
    record = records.read(name)
    if record.starting or not processes.is_alive(record):
        status, _, _ = refresh(record)
        if status != "RUNNING":
            raise MlflowException(f"deployment {name!r} is {_described(status)}", error_code=INVALID_STATE)
    return record.url


def create(name: str, model_uri: str, config: Any) -> None:
    """Start a deployment. Raises ``MlflowException`` if its server does not come up; no deployment is left behind."""
    must_be_new(name)
    uri, given = model_uris.absolute(model_uri), configs.with_database(configs.cleaned(config))
    configs.check(given)
    model_uris.check_flavor(uri)
    with records.locked(name):
        must_be_new(name)
        start(name, uri, given)


def start(name: str, model_uri: str, config: dict[str, Any], *, old: Record | None = None) -> None:
    """Start a server, record it at once and wait until it is ready.

    Raises ``MlflowException``; the record is then ``old`` again, or removed if there was none.
    """
    port = config.get("port") or (port_of(old) if old is not None else processes.free_port())
    host = config.get("host", configs.HOST)
    processes.must_be_free(host, port, 0.0 if old is None else PORT_SECONDS)
    log = records.log_of(name)
    before = log.stat().st_size if log.exists() else 0
    stores = model_uris.stores()
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            configs.command(name, model_uri, {**config, "port": port}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=configs.environment(config, stores),
            start_new_session=True,
        )
    try:
        birth = processes.keep(process)
        url = configs.url_of(config, port)
        what: dict[str, Any] = {"name": name, "model_uri": model_uri, "config": config, "url": url, **stores}
        record = Record(**asdict(birth), **what, base=configs.base_of(config), starting=True)
        records.write(record)
        _await(process, record, lambda: _reason(log, before))
        if extra := {key: config[key] for key in endpoints.ENTITY_KEYS if key in config}:
            endpoints.update(url, name, model_uri, extra)
        records.write(replace(record, starting=False))
    except BaseException:
        processes.stop_process(process.pid)
        records.remove(name, log=False) if old is None else records.write(old)
        raise


def _await(process: subprocess.Popen[bytes], record: Record, reason: Callable[[], str]) -> None:
    log = records.log_of(record.name)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MlflowException(f"the server did not start: {reason()} (log: {log})")
        if http_calls.is_ready(record.url, LOOK_SECONDS) and processes.listens(process.pid, port_of(record)):
            return
        time.sleep(0.1)
    raise MlflowException(f"the server was not ready within {START_SECONDS:.0f} seconds (log: {log})")


def _reason(log: Path, before: int) -> str:
    """Return the last error in this start's part of the log, which begins after ``before`` bytes of earlier starts."""
    with open(log, "rb") as stream:
        stream.seek(before)
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    said = [_sentence(line) for line in lines]
    return next((line for line in reversed(said) if "rror" in line), said[-1] if said else "no message")[:300]


def _sentence(line: str) -> str:
    """Return what a line of the server's log says to people, or the line itself."""
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return str(found.get("message") or found.get("event")) if isinstance(found, dict) else line


def update(name: str, model_uri: str | None, config: Any) -> None:
    """Let the running server serve another version or other engine settings; start it if it has ended.

    Raises ``MlflowException``; the server then continues as before. If this is interrupted, the record holds what was
    requested.
    """
    given = configs.cleaned(config)
    named = None if model_uri is None else model_uris.absolute(model_uri)
    with records.locked(records.check_name(name)):
        record = records.read(name)
        configs.check({**configs.cleaned(record.config), **given})
        if processes.is_alive(record):
            _change(record, named, given)
        else:
            uri = named or record.model_uri
            _check_model(record, uri)
            start(name, uri, {**configs.cleaned(record.config), **given}, old=record)


def _check_model(record: Record, uri: str) -> None:
    kept = {"tracking_uri": record.tracking_uri, "registry_uri": record.registry_uri}
    model_uris.check_stores(uri, kept)
    model_uris.check_flavor(uri)


def _change(record: Record, model_uri: str | None, given: dict[str, Any]) -> None:
    configs.must_stay(record.config, given, port_of(record))
    try:
        served = endpoints.entities(endpoints.get(record.url, record.name))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        ask, now, kept = endpoints.create, record, record.config
    else:
        ask, now = endpoints.update, _as_served(record, served)
        kept = endpoints.settings_of(served[0]) if len(served) == 1 else {}
        if model_uri is None and len(served) > 1:
            raise MlflowException.invalid_parameter_value(f"model_uri: {record.name!r} serves {len(served)} models")
    uri = model_uri or now.model_uri
    _check_model(record, uri)
    settings = {key: value for key, value in {**kept, **given}.items() if key not in configs.FIXED_KEYS}
    wanted = replace(now, model_uri=uri, config=_config(record, settings), starting=False)
    records.write(wanted)
    try:
        ask(record.url, record.name, uri, settings)
    except Exception:
        records.write(now)
        raise


def delete(name: str) -> None:
    """Drain and delete a deployment. It is not an error if there is none."""
    with records.locked(records.check_name(name)):
        if name in records.names():
            with contextlib.suppress(MlflowException):  # a damaged record names no process
                stop(records.read(name))
            records.remove(name)


def stop(record: Record) -> None:
    """Drain and stop a deployment's server, if it is running."""
    if processes.is_alive(record):
        drain = float(record.config.get("drain_timeout") or 30)
        processes.stop_process(record.pid, drain + 15)
