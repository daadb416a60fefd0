"""This server among the gateways of its database: it reports what it serves, and leads if no other gateway does.

The leader derives the states of endpoints from the reports of all gateways that live (``verdict``). With a database of
its own, a server is the only gateway and leads from its first tick on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct, structs

from ..endpoints.gateways import EndpointReport, Fence, Gateway, Lease, NotLeader, Reports
from ..endpoints.store import EndpointState, EndpointStore
from ..interface.errors import NotFound, ServingError
from ..metering.store.staleness import StalenessDetector
from ..system.file_locks import FileLock, is_held, try_acquire

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENT_SECONDS = 6.0
"""A lease or a gateway that has not changed for so long is over; with a beat and a tick, fail-over takes under 8 s."""


class Verdict(Struct, frozen=True, kw_only=True):
    """A change of an endpoint's state.

    ``served`` is the pending version that every gateway serves; ``failed`` the one that a gateway cannot serve, and
    why; ``ready`` whether the active version is served by all of them.
    """

    served: int | None = None
    failed: tuple[int, str] | None = None
    ready: bool | None = None


def verdict(state: EndpointState, gateways: Iterable[Gateway]) -> Verdict | None:
    """Return how the state of an endpoint has to change by what the gateways report, or None.

    Gateways that are starting take no requests: nobody waits for them, unless there are no others. A version that one
    of them cannot serve fails all the same.
    """
    found = tuple(gateways)
    reports = [(one, one.reports.get(state.id, EndpointReport())) for one in found]
    counted = [(one, report) for one, report in reports if one.serving] or reports
    if (pending := state.pending_version) is not None:
        failed = [(one, report) for one, report in reports if report.failed_version == pending]
        if failed:
            named = (f"gateway {one.name}: {report.message}" for one, report in failed)
            return Verdict(failed=(pending, failed[0][1].message if len(found) == 1 else "; ".join(named)))
        if counted and all(report.version == pending for _, report in counted):
            return Verdict(served=pending)
    if state.active_version is None or pending is not None:
        return None
    ready = bool(counted) and all(report.version == state.active_version and report.ready for _, report in counted)
    return Verdict(ready=ready) if ready != state.ready else None


class Fleet:
    """The part of a server in the fleet of its database's gateways.

    ``name`` is what operators call it, ``gateway`` its id, which a restarted controller process keeps. ``place`` is a
    directory of this host with a ``lock`` for each gateway, by which those that were killed are known at once. Owned by
    the reconciler's thread.
    """

    def __init__(
        self,
        endpoints: EndpointStore,
        *,
        name: str,
        gateway: str | None = None,
        place: Path | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints, self._gateways, self._monotonic = endpoints, endpoints.gateways, monotonic
        self.gateway = gateway or secrets.token_hex(8)
        self._place, self.lock = place, None if place is None else _locked(place, self.gateway)
        self._own = Gateway(
            gateway=self.gateway, name=name, started_ms=int(clock() * 1000), serving=False, beat=secrets.randbits(32)
        )
        self._leases = StalenessDetector(SILENT_SECONDS, monotonic=monotonic)
        self._beats = StalenessDetector(SILENT_SECONDS, monotonic=monotonic)
        self._beaten_at = -BEAT_SECONDS
        self.fence: Fence | None = None

    def tick(
        self, states: Iterable[EndpointState], reports: Reports, *, serving: bool, engines: tuple[str, ...] = ()
    ) -> None:
        """Report what this gateway serves and, as the leader, bring the endpoints' states up to date.

        ``engines`` are those on joined hosts that it uses. Raises ``Unavailable``.
        """
        now = (reports, serving, engines)
        changed = (self._own.reports, self._own.serving, self._own.engines) != now
        due = self._monotonic() - self._beaten_at >= BEAT_SECONDS
        if changed or due:
            self._beat(dict(reports), serving, engines)
        found = tuple(states)
        if self.fence is not None and (changed or due or any(one.pending_version is not None for one in found)):
            self._lead(found)

    def _beat(self, reports: dict[str, EndpointReport], serving: bool, engines: tuple[str, ...]) -> None:
        own = structs.replace(self._own, serving=serving, beat=self._own.beat + 1, reports=reports, engines=engines)
        if self._monotonic() - self._beaten_at > SILENT_SECONDS:  # this gateway could not look: that is no silence
            self._leases.observe({})
            self._beats.observe({})
        held, self.fence = self.fence, None  # until the store has confirmed it
        take = self._vacant() if held is None else None
        self.fence = self._gateways.write(own, fence=held, take=take)
        self._own, self._beaten_at = own, self._monotonic()
        if held is not None and self.fence is None:
            logger.warning("this gateway does not lead any more")

    def _vacant(self) -> Lease | None:
        """Return the lease if nobody holds it any more."""
        lease = self._gateways.lease()
        self._silent(self._gateways.all())  # so that a new leader knows at once which of them have gone
        silent = self._leases.observe({"lease": (lease.holder, lease.fence, lease.beat)})
        is_free = not lease.holder or lease.holder == self.gateway  # of this server's killed controller process
        return lease if is_free or silent or self._was_killed(lease.holder) else None

    def _silent(self, found: Iterable[Gateway]) -> list[str]:
        return self._beats.observe({one.gateway: one.beat for one in found if one.gateway != self.gateway})

    def _lead(self, states: tuple[EndpointState, ...]) -> None:
        try:
            gateways = self._living()
            for state in states:
                self._apply(state, verdict(state, gateways))
        except NotLeader:
            self.fence = None
            logger.warning("another gateway leads now; nothing was changed")

    def _living(self) -> tuple[Gateway, ...]:
        """Return the gateways that live; the rows of the others are removed."""
        found = self._gateways.all()
        silent = self._silent(found)
        gone = [one for one in found if one.gateway in silent or self._was_killed(one.gateway)]
        if gone:
            self._gateways.remove(gone, self.fence)
            for one in gone:
                logger.warning("gateway %s is silent; it does not count any more", one.name)
                self._remove_lock(one.gateway)
        return tuple(one for one in found if one not in gone)

    def _apply(self, state: EndpointState, found: Verdict | None) -> None:
        if found is None:
            return
        with contextlib.suppress(NotFound):  # it has just been deleted
            if found.failed is not None:
                self._endpoints.mark_failed(state.name, *found.failed, fence=self.fence)
            elif found.served is not None:
                self._endpoints.mark_ready(state.name, found.served, fence=self.fence)
            elif found.ready is not None:
                self._endpoints.set_ready(state.name, found.ready, fence=self.fence)

    def _was_killed(self, gateway: str) -> bool:
        """Return whether ``gateway`` is one of this host whose process is gone; False if that is not known."""
        if self._place is None or gateway == self.gateway:
            return False
        path = self._place / gateway
        return path.exists() and not is_held(str(path))

    def _remove_lock(self, gateway: str) -> None:
        """Remove the lock file of a gateway that was killed on this host."""
        with contextlib.suppress(OSError):
            lock = None if self._place is None else try_acquire(str(self._place / gateway), create=False)
            if lock is not None:
                lock.release(unlink=True)

    def leave(self) -> None:
        """End: the others need not wait for this gateway, and one of them leads at once."""
        with contextlib.suppress(ServingError):  # otherwise they notice the silence
            self._gateways.leave(self.gateway)
        if self.lock is not None:
            self.lock.release(unlink=True)


def _locked(place: Path, gateway: str) -> FileLock | None:
    """Return the lock of ``gateway``, which the controller process holds as long as it lives; None if it cannot."""
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return try_acquire(str(place / gateway))
    except OSError as error:
        logger.warning(
            "no lock in %s (%s): if this process is killed, others notice after %g s", place, error, SILENT_SECONDS
        )
        return None
