"""The servers and engine processes of this user that run on this machine, from the files that they keep."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from ...control.plan import PlanDirectory
from ...control.server_directory import running_servers
from ...transport.discovery.state_directory import KEY_LENGTH, StateDirectory, default_runtime_dir
from ...transport.process_spec import ProcessSpec


class RunningServer(Struct, frozen=True, kw_only=True):
    """A server: its endpoints with their models, where it listens ("" while it loads), and the endpoint of each of its
    engines, by the engine's directory."""

    pid: int
    addresses: tuple[str, ...]
    endpoints: dict[str, str]
    engines: dict[str, str]
    memory: int


class RunningEngine(Struct, frozen=True, kw_only=True):
    """An engine process: ``model`` is what it serves, ``place`` its state directory, ``folder`` its model's folder."""

    pid: int
    state: str
    model: str
    place: str
    folder: str
    clients: int
    memory: int


def servers() -> list[RunningServer]:
    """Return the running servers, those that started first first."""
    found = []
    for directory, record in running_servers():
        plan = PlanDirectory(directory).read()
        entities = [(one.name, entity) for one in plan.endpoints for entity in one.entities]
        found.append(
            RunningServer(
                pid=record.pid,
                addresses=record.addresses,
                endpoints={name: entity.config.model.uri for name, entity in entities},
                engines={address: name for name, entity in entities for address in entity.addresses},
                memory=_memory(record.pid, children=True),
            )
        )
    return found


def engines(known: list[RunningServer] | None = None) -> list[RunningEngine]:
    """Return the engine processes of this user; ``known`` servers say by which endpoint an engine is used."""
    served = {place: name for one in known or () for place, name in one.engines.items()}
    found = []
    for place in sorted({*_places(default_runtime_dir()), *served}):
        state = StateDirectory(*os.path.split(place))
        status = state.read_status()
        if status is None or status.state == "failed" or not status.pid or not state.engine_alive:
            continue
        spec = _spec(state)
        folder = "" if spec is None else spec.bundle.model_dir
        found.append(
            RunningEngine(
                pid=status.pid,
                state=status.state,
                model=served.get(place) or os.path.dirname(folder),
                place=place,
                folder=folder,
                clients=len(state.live_clients()),
                memory=_memory(status.pid),
            )
        )
    return found


def _places(runtime: str) -> list[str]:
    """Return the engines' state directories below a runtime directory."""
    try:
        return [os.path.join(runtime, name) for name in os.listdir(runtime) if len(name) == KEY_LENGTH]
    except OSError:
        return []


def _spec(state: StateDirectory) -> ProcessSpec | None:
    try:
        return msgspec.json.decode(Path(state.file("spec.json")).read_bytes(), type=ProcessSpec)
    except (OSError, msgspec.MsgspecError):
        return None


def _memory(pid: int, *, children: bool = False) -> int:
    """Return the resident bytes of a process, and of its ``children``; 0 if it has just ended."""
    try:
        process = psutil.Process(pid)
        each = [process, *(process.children(recursive=True) if children else ())]
    except psutil.Error:
        return 0
    total = 0
    for one in each:
        with contextlib.suppress(psutil.Error):
            total += one.memory_info().rss
    return total
