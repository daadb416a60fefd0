"""``…/served-models/{served}/logs`` and ``/build-logs``: the logs of a served entity's engines (scope ``manage``).

Engines see token ids, not prompts. Even so, text that looks like a secret and terminal control characters are removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from ...dialects import DIALECTS
from ...endpoints.config import EntityConfig
from ...endpoints.store import EndpointState, EndpointStore
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound, without_password
from ...supervision.engine_spec import EngineSpec
from ...supervision.supervisor import MAX_REPLICAS
from ...system.escape import plain
from ...transport.discovery.state_directory import LOAD_LOG, LOG, tail
from ...transport.process_spec import ENGINE_CORE
from ..route import Route
from .endpoints import ONE

MAX_BYTES = 64 * 1024
MAX_LINE = 2000
_SECRETS = re.compile(
    r"\b(sk-|hf_|ghp_|xox[a-z]-|AKIA)[A-Za-z0-9_-]{8,}"  # keys, by their usual prefixes
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]+"  # JWT
    r"|(?i:(?<=bearer )|(?<=token=)|(?<=password=)|(?<=secret=)|(?<=api_key=))[^\s&'\"]+"
)


class EngineLogs(TypedDict):
    """The last lines of each replica's log."""

    logs: str


def logs(server: WorkerState, request: Request) -> Answer:
    """Return the end of each replica's engine log."""
    return _answer(server, request, lambda directory: tail(os.path.join(directory, LOG), MAX_BYTES))


def build_logs(server: WorkerState, request: Request) -> Answer:
    """Return what the engines wrote while loading; if the last load failed, the log of that load."""
    return _answer(server, request, _load_log, failed=True)


def _load_log(directory: str) -> str:
    """Return the load log. While the engine loads, and if it was killed then, only the normal log exists."""
    return tail(os.path.join(directory, LOAD_LOG), MAX_BYTES) or tail(os.path.join(directory, LOG), MAX_BYTES)


def _answer(server: WorkerState, request: Request, read: Callable[[str], str], *, failed: bool = False) -> Answer:
    request.caller.check_scope("manage")
    store, served = server.managed_endpoints(), request.path["served"]
    row = next((row for row in store.states() if row.name == request.name), None)
    if row is None:
        raise NotFound(f"there is no endpoint {request.name!r}")
    kept = server.follower.failed_log(row.id, served) if server.follower is not None else ""
    if kept and failed:
        return json_answer({"logs": cleaned(kept)})
    found = _entities(store, row)
    if served not in found and not kept:
        raise NotFound(f"{request.name} has no served model {served[:80]!r}; it has {', '.join(found) or 'none'}")
    # on a thread: an engine's directory depends on the contents of its adapter files, which must be read
    parts = server.offload(server.offload.threshold, _read, server, found.get(served, ()), read)
    return json_answer({"logs": "\n".join(parts) or cleaned(kept)})


def _entities(store: EndpointStore, row: EndpointState) -> dict[str, tuple[EntityConfig, ...]]:
    """Return the entities of the active and the pending config, by name."""
    found: dict[str, tuple[EntityConfig, ...]] = {}
    for version in (row.active_version, row.pending_version):
        if version is not None:
            for entity in store.config(row.name, version).served_entities:
                found[entity.name] = (*found.get(entity.name, ()), entity)
    return found


def _read(server: WorkerState, entities: tuple[EntityConfig, ...], read: Callable[[str], str]) -> list[str]:
    return list(dict.fromkeys(part for entity in entities for part in _parts(server, entity, read)))


def _parts(server: WorkerState, entity: EntityConfig, read: Callable[[str], str]) -> Iterator[str]:
    """Yield a text for each replica that has an engine on this machine."""
    source: Any = entity.source
    if entity.is_elsewhere:
        yield f"its engines are on other hosts, which have their logs: {', '.join(source.addresses) or 'joined hosts'}"
        return
    model = EngineSpec(bundle=source.bundle, settings=source.engine, core=source.core or ENGINE_CORE)
    for index in range(MAX_REPLICAS):
        directory = model.address(index, server.runtime_dir)
        if index and not os.path.isdir(directory):
            return  # replicas with the highest numbers end first
        if text := cleaned(read(directory)):
            yield text if index == 0 else f"replica {index}:\n{text}"


def cleaned(text: str) -> str:
    """Return ``text`` without secrets and control characters, with long lines cut off."""
    lines = (plain(without_secrets(line))[:MAX_LINE] for line in text.splitlines())
    return "\n".join(lines)


def without_secrets(line: str) -> str:
    if "://" in line and "@" in line:
        line = re.sub(r"\S+://\S+@\S+", lambda url: without_password(url[0]), line)
    return _SECRETS.sub("***", line)


SERVED = f"{ONE}/served-models/<path:served>"

ROUTES = (
    Route(
        method="GET",
        path=f"{SERVED}/logs",
        handler=with_body(logs),
        reply=EngineLogs,
        summary="Last log lines of a served model's engines",
        dialect=DIALECTS["databricks"],
    ),
    Route(
        method="GET",
        path=f"{SERVED}/build-logs",
        handler=with_body(build_logs),
        reply=EngineLogs,
        summary="Log lines of a served model's engines from loading",
        dialect=DIALECTS["databricks"],
    ),
)
