"""``mlflow-llm pull``, ``rm`` and ``stop``: fetch a model, remove one, end what runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import click
import psutil

from ...model_files.model_uri import in_store, parse
from ...system.escape import visible_line
from ...system.sizes import readable
from ..model_names import located, named_version
from .cached import Cached, cached, remove
from .running import RunningEngine, RunningServer, engines, servers

CHECK_SECONDS = 0.1


@click.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch a model into the cache of this machine.

    MODEL is a registered model (NAME, NAME/VERSION, NAME@ALIAS or models:/…), another URI that MLflow can download, or
    a hub id. A model that is already in a directory of this machine stays there.
    """
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors.llm.load.model_cache import logged
    from mlflow_llm.flavors.llm.model.fetch import local_root
    from mlflow_llm.flavors.llm.model.model_registry import pinned

    uri = located(model)
    try:
        root = logged(uri)
        if root is None:
            fixed = pinned(uri) if in_store(uri) else uri
            if version := named_version(uri, fixed):
                click.echo(version, err=True)
            root = local_root(fixed)
    except (MlflowException, ValueError) as error:
        raise click.ClickException(str(getattr(error, "message", error))) from None
    size = sum(file.stat().st_size for file in Path(root).rglob("*") if file.is_file())
    click.echo(f"{root} ({readable(size)})")


@click.command()
@click.argument("name")
@click.option("--registered", is_flag=True, help="NAME is a version of a registered model, which is deleted in MLflow.")
def rm(name: str, registered: bool) -> None:
    """Remove a download, a copy or packed weights.

    NAME is the name or the model in the table of `mlflow-llm models`. What a running engine uses is not removed.

    With --registered, NAME is NAME/VERSION or models:/NAME/VERSION, and that version is deleted from MLflow's registry.
    """
    if registered:
        _delete_version(name)
        return
    found = [one for one in cached() if _is_meant(one, name)]
    if not found:
        hint = "; --registered deletes a version of a registered model" if parse(name) else ""
        raise click.ClickException(f"the cache has no {visible_line(name)}; `mlflow-llm models` lists it{hint}")
    folders = [one.folder for one in engines()]
    used = []
    for one in found:
        if remove(one, folders):
            click.echo(f"removed {one.kind} {one.name}, {readable(one.size)}")
        else:
            used.append(one)
    if used:
        raise click.ClickException(
            f"in use: {', '.join(one.name for one in used)}; `mlflow-llm ps` shows by which engine"
        )


def _is_meant(one: Cached, name: str) -> bool:
    return name in (one.name, one.model, one.path) and bool(name)


def _delete_version(name: str) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    uri = located(name) if not in_store(name) else name
    named = parse(uri)
    if named is None or named.version is None or not named.version.isdecimal():
        raise click.UsageError(f"--registered {name}: name one version, as NAME/VERSION")
    try:
        MlflowClient().delete_model_version(named.name, named.version)
    except MlflowException as error:
        raise click.ClickException(error.message) from None
    click.echo(f"deleted version {named.version} of the registered model {named.name}")


@click.command()
@click.argument("which", metavar="NAME|PID")
@click.option("--now", is_flag=True, help="Do not let running requests finish.")
def stop(which: str, now: bool) -> None:
    """Stop a server or an engine.

    NAME is an endpoint of a server, or its port; PID is a process that `mlflow-llm ps` lists. A server lets running
    requests finish first (--drain-timeout), and the command waits for its end. An engine of a server ends with that.
    """
    running = servers()
    chosen = [one for one in running if _is_server(one, which)]
    if len(chosen) > 1:
        pids = ", ".join(str(one.pid) for one in chosen)
        raise click.ClickException(f"several servers have {visible_line(which)}: stop one by its PID, {pids}")
    if chosen:
        _end(chosen[0].pid, signal.SIGINT if now else signal.SIGTERM)
        click.echo(f"stopped the server {chosen[0].pid}")
        return
    for one in engines(running):
        if which == str(one.pid):
            _stop_engine(one, running, now=now)
            return
    raise click.ClickException(f"no server or engine {visible_line(which)} runs; `mlflow-llm ps` lists them")


def _is_server(server: RunningServer, which: str) -> bool:
    ports = {address.rpartition(":")[2] for address in server.addresses if not address.startswith("unix:")}
    return which == str(server.pid) or which in server.endpoints or which in ports


def _stop_engine(engine: RunningEngine, running: list[RunningServer], *, now: bool) -> None:
    for server in running:
        if engine.place in server.engines:
            raise click.ClickException(f"the server {server.pid} keeps this engine running; stop the server")
    if engine.clients and not now:
        plural = "clients use" if engine.clients > 1 else "client uses"
        raise click.ClickException(
            f"{engine.clients} {plural} this engine, which ends with the last; --now ends it now"
        )
    _end(engine.pid, signal.SIGQUIT if now else signal.SIGTERM)
    click.echo(f"stopped the engine {engine.pid}")


def _end(pid: int, how: signal.Signals) -> None:
    """Send a signal and wait until the process has ended. Raises ``ClickException``."""
    try:
        process: Any = psutil.Process(pid)
        os.kill(pid, how)
    except (psutil.Error, ProcessLookupError):
        return
    except PermissionError:
        raise click.ClickException(f"process {pid} belongs to another user") from None
    with contextlib.suppress(psutil.Error):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(CHECK_SECONDS)
