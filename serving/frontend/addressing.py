"""Find the endpoint and served entity of a request, and check those limits that need no prepared request."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote

import msgspec

from ..interface.errors import InvalidField
from ..interface.request import POOLED, Raw, Task
from ..metering.accounts.prices import price_names
from ..routing.served_endpoints import ServedEndpoints, ServedEntity
from .operation import Request
from .worker_state import WorkerState

SERVED_HEADER = "served-model-name"  # Databricks' header for the name of the entity that answered
VERSION_HEADER, HASH_HEADER = "served-model-version", "served-model-hash"
STICKY_HEADER = "X-Sticky-Key"
MAX_STICKY_CHARACTERS = 1000  # characters
VERSION = "model_version"  # the variable in paths that name a version of the endpoint's model

R = TypeVar("R", bound=Raw)


def candidates(endpoints: ServedEndpoints, request: Request) -> list[ServedEntity]:
    """Return the served entities that a request may be for, as far as known before its body is read."""
    served = list(endpoints.entities())
    return [one for one in served if one.endpoint == request.name] or served


def check_limits(server: WorkerState, request: Request, candidates: list[ServedEntity], task: Task | None) -> None:
    """Refuse a large request whose limits are used up. Called before its body is received, and before tokenising."""
    if server.ledger is None or not request.is_large or not candidates or any(one.mode is None for one in candidates):
        return
    names = {one.endpoint for one in candidates}
    paid = all(one.mode is not None and not one.mode.profile.reserves for one in candidates)
    embeds = task in POOLED or any(not POOLED.isdisjoint(one.tasks) for one in candidates)
    background = request.background is not None
    server.ledger.check(
        key_id=request.caller.key_id,
        tenant=request.caller.tenant,
        endpoint=names.pop() if len(names) == 1 else None,
        entities=[price_names(one.entity, one.identity, one.endpoint, background=background) for one in candidates]
        if paid
        else None,
        generates=task in ("chat", "completions") or not embeds,
    )


def address(endpoints: ServedEndpoints, request: Request, raw: R) -> tuple[ServedEntity, R]:
    """Return the served entity that the path and ``raw`` name, and ``raw`` with ``model`` and ``adapter`` filled in."""
    asked = raw.adapter
    entity, adapter = endpoints.route(
        request.name or raw.model,
        raw.model if request.name else None,
        version=request.path.get(VERSION),
        sticky_key=_sticky_key(request.headers.get(STICKY_HEADER)),
        caller=request.caller.key_id,
    )
    if asked is not None and adapter is not None and asked != adapter:
        raise InvalidField("adapter", asked, f"the adapter that model names: {adapter}")
    adapter = adapter or asked
    if adapter is not None:  # checked before any error message lists the adapters
        endpoints.check_use(request.caller, entity, adapter)
    return entity, msgspec.structs.replace(raw, model=entity.endpoint, adapter=adapter)


def record_served(request: Request, entity: ServedEntity) -> None:
    """Record which version of which model answers, and have the response say so, even if it becomes an error.

    Call this only after ``check_use``. The model's name in the registry is shown to callers who manage.
    """
    record, caller, model = request.record, request.caller, entity.identity
    record.entity, record.model = entity.entity, model
    shown = {
        SERVED_HEADER: entity.entity_shown_to(caller),
        VERSION_HEADER: model.label if caller.manages else model.version,
        HASH_HEADER: model.short_hash,
    }
    record.headers |= {name: _quoted(value) for name, value in shown.items() if value}


@lru_cache(maxsize=1024)  # few models answer many requests
def _quoted(value: str) -> str:
    return quote(value, safe="/:@ ")


def _sticky_key(header: str | None) -> str | None:
    if header is not None and len(header) > MAX_STICKY_CHARACTERS:
        raise InvalidField(STICKY_HEADER, f"{len(header)} characters", f"at most {MAX_STICKY_CHARACTERS}")
    return header
