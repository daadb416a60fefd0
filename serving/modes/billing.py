"""Bill reserved time: each minute of each provisioned entity, as long as it is served."""

from __future__ import annotations

import logging
from collections.abc import Callable

import sqlalchemy as sa
from msgspec import Struct

from ..interface.errors import Unavailable
from ..metering.accounts.provisioned_minutes import ProvisionedMinutes
from ..metering.store.store import Store
from ..metering.store.tables import api_keys, endpoints

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # seconds before another attempt when the store did not answer
MAX_BACKLOG_MINUTES = 100_000  # the most minutes that are kept until the store answers


class Minute(Struct, frozen=True):
    """One minute of one served entity; ``minute`` is its number since the epoch."""

    endpoint: str
    entity: str
    minute: int


class ReservedTime:
    """The record of reserved throughput in the ledger. Called from one thread.

    ``hold`` says what is reserved at this moment; it is recorded once a minute and whenever it grows. If the store does
    not answer, the minutes are recorded later, each with its own time.
    """

    def __init__(self, store: Store, *, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._at = 0.0
        self._minutes = ProvisionedMinutes(store, clock=lambda: self._at)
        self._recorded: dict[tuple[str, str], tuple[int, int]] = {}
        # units, when they were first held, and what a command line asked for
        self._owed: dict[Minute, tuple[int, float, str]] = {}
        self._tenants: dict[str, str] = {}
        self._retry_at = 0.0

    def hold(self, endpoint: str, entity: str, units: int, asked: str = "") -> None:
        """Note that ``units`` tokens/s are reserved now; ``asked`` is another name of the entity in prices."""
        if units < 1:
            return
        now = self._now()
        minute = int(now) // 60
        if (last := self._recorded.get((endpoint, entity))) is None or last[0] != minute or last[1] < units:
            self._recorded[endpoint, entity] = (minute, units)
            if len(self._owed) < MAX_BACKLOG_MINUTES:
                self._owed[Minute(endpoint, entity, minute)] = (units, now, asked)
        self._settle()

    def forget(self, endpoint: str, entity: str) -> None:
        """Drop the state of an entity that is no longer served."""
        self._recorded.pop((endpoint, entity), None)
        self._tenants.pop(endpoint, None)

    def _settle(self) -> None:
        if not self._owed or self._now() < self._retry_at:
            return
        for minute, (units, at, asked) in list(self._owed.items()):
            self._at = at
            try:
                tenant = self._tenant(minute.endpoint)
                self._minutes.record(
                    tenant=tenant, endpoint=minute.endpoint, entity=minute.entity, units=units, asked=asked
                )
            except Unavailable as error:
                logger.warning("reserved time waits for the store: %s", error)
                self._retry_at = self._now() + RETRY_SECONDS
                return
            del self._owed[minute]

    def _tenant(self, endpoint: str) -> str:
        """Return the tenant that pays: the tenant of the caller who created the endpoint."""
        if endpoint not in self._tenants:
            found = sa.select(endpoints.c.creator, endpoints.c.tenant).where(endpoints.c.name == endpoint)
            row = self._store.read(lambda connection: connection.execute(found).one_or_none())
            creator, tenant = ("", None) if row is None else row
            if tenant is not None:
                self._tenants[endpoint] = tenant
                return str(tenant)
            owner = sa.select(api_keys.c.tenant).where(api_keys.c.key_id == creator)
            tenant = self._store.read(lambda connection: connection.execute(owner).scalar_one_or_none())
            self._tenants[endpoint] = tenant or creator
        return self._tenants[endpoint]
