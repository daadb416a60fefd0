"""The versions of an endpoint's configuration: which there were, and which one a rollback restores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ..interface.errors import Conflict, InvalidField
from .config import config_to_wire
from .rows import decode_config


def config_version(endpoint: sa.Row, row: sa.Row) -> dict[str, Any]:
    """Return a version of the endpoint's config in the API's form."""
    shown: dict[str, Any] = {
        "config_version": row.version,
        "state": _state(endpoint, row),
        "creator": row.creator,
        "creation_timestamp": row.created_ms,
        "config": config_to_wire(decode_config(row.config)),
    }
    if row.message:
        shown["message"] = row.message
    if row.restores is not None:
        shown["restores"] = row.restores
    return shown


def _state(endpoint: sa.Row, row: sa.Row) -> str:
    """Return "active", "pending", "failed", "superseded" if it was active, or "replaced" if it was given up before.

    A version with a canary that has ended is "promoted", "rolled_back" or "stopped".
    """
    if row.version == endpoint.active_version:
        return "active"
    if row.version == endpoint.pending_version:
        return "pending"
    return {"active": "superseded", "pending": "replaced"}.get(row.outcome, str(row.outcome))


def version_to_restore(endpoint: sa.Row, rows: Sequence[sa.Row], asked: int | None) -> int:
    """Return the version that a rollback restores, of ``rows`` with the newest first.

    Without ``asked``, it is the last version before the active one that was active. Raises ``InvalidField`` for a
    version that there is not or that has failed, ``Conflict`` for the active one and if there is none.
    """
    active = endpoint.active_version
    served = [row.version for row in rows if row.outcome == "active" and row.version != active]
    if asked is None:
        earlier = [version for version in served if active is None or version < active]
        if not earlier:
            raise Conflict(f"endpoint {endpoint.name!r} has no version before the present one to go back to")
        return int(earlier[0])
    if asked == active:
        raise Conflict(f"config_version: endpoint {endpoint.name!r} serves version {asked} already")
    if asked not in served:
        allowed = ", ".join(map(str, sorted(served))) or "none has been served before the present one"
        raise InvalidField("config_version", asked, f"a version that was served: {allowed}")
    return asked
