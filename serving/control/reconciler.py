"""What the store says is to be served, made true: engines started and ended, the plan published, outcomes reported.

One thread calls ``tick``. An update goes: its engines warm (``rollout``), the plan with it is published, every worker
has adopted the plan, the store is told that the endpoint is ready, the engines that nobody needs any more drain. A
config that fails leaves plan and engines as they were.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ..endpoints.config import EndpointConfig, EntityConfig
from ..endpoints.store import EndpointState, EndpointStore
from ..errors import NotFound, PackagingError, ServingError
from ..metering.audit import Actor
from ..supervision.supervisor import EngineStatus, Supervisor
from .autoscaler import Autoscaler
from .plan import Plan, PlanDirectory, PlannedEndpoint, PlannedEntity
from .rollout import DeployedEndpoint, Rollout

logger = logging.getLogger(__name__)

TICK = 0.1
ADOPTION_SECONDS = 60.0  # after which a worker that does not answer holds up an update no longer
SCALE_SECONDS = 0.5
UNREADY_SECONDS = 1.0  # an engine that is back sooner was never away
Say = Callable[..., None]
COMMAND_LINE = Actor(name="command line", via="command")


class Reconciler:
    """``say(stage, endpoint=…, **fields)`` is told the steps of the start, which ``over`` ends."""

    def __init__(
        self,
        endpoints: EndpointStore,
        supervisor: Supervisor,
        plan_directory: PlanDirectory,
        autoscaler: Autoscaler,
        *,
        find: Callable[[EntityConfig], EntityConfig],
        say: Say = lambda stage, **fields: None,
        over: threading.Event | None = None,
    ) -> None:
        self._endpoints, self._supervisor, self._plan_directory, self._autoscaler = (
            endpoints,
            supervisor,
            plan_directory,
            autoscaler,
        )
        self._find, self._say = find, say
        self._over = over or threading.Event()
        self._plan = plan_directory.read()  # of a keeper that was killed: it holds until we know better
        self._deployed: dict[str, DeployedEndpoint] = {}
        self._rollouts: dict[tuple[str, int], Rollout] = {}
        self._published: dict[tuple[str, int], float] = {}
        self._unready: dict[str, float] = {}
        self._scaled_at = 0.0
        # measuring is one at a time, so that no measurement disturbs another
        self._finders, self._preparers = ThreadPoolExecutor(2), ThreadPoolExecutor(1)

    def start(self, declared: dict[str, EndpointConfig]) -> None:
        """Serve ``declared`` and what the store has besides. Returns when all is served that can be.

        Raises ``PackagingError`` where one of ``declared`` cannot be; the others are tried further.
        """
        for row in self._endpoints.rows():
            if row.ready and not any(known.id == row.id for known in self._plan.endpoints):
                with contextlib.suppress(NotFound):
                    self._endpoints.set_ready(row.name, False)
        if not self._plan.generation:  # else it was declared already, and may have been changed since
            for name, config in declared.items():
                self._endpoints.declare(name, config, by=COMMAND_LINE)
        for row in self._endpoints.rows():
            self._say("loading", endpoint=row.name)
        began = time.monotonic()
        told: set[str] = set()
        while not self._over.is_set() and not self._settled(declared):
            self.tick()
            for name in {one.name for one in self._deployed.values()} - told:
                told.add(name)
                seconds = round(time.monotonic() - began, 2)
                self._say("token", endpoint=name, seconds=seconds, kernels=self._kernels(name))
            time.sleep(TICK / 2)

    def _kernels(self, name: str) -> str:
        """What the engines of an endpoint run on, in words."""
        served = [served for one in self._deployed.values() if one.name == name for served in one.served]
        infos = [self._supervisor.status(one.key).info for one in served]
        return ", ".join(dict.fromkeys(info.kernels_summary for info in infos if info is not None))

    def _settled(self, declared: Iterable[str]) -> bool:
        rows = self._endpoints.rows()
        for row in rows:
            states = {r.version: r for r in self._rollouts.values() if r.row.id == row.id}
            for rollout in states.values():
                if rollout.stage == "failed" and row.name in declared:
                    raise PackagingError(f"{row.name}: {rollout.message}")
            if row.pending_version is not None:
                return False
            failed = any(rollout.stage == "failed" for rollout in states.values())
            if row.active_version is not None and row.id not in self._deployed and not failed:
                return False
        return True

    def close(self) -> None:
        for executor in (self._finders, self._preparers):
            executor.shutdown(wait=False, cancel_futures=True)

    def tick(self) -> None:
        """Look once at everything. What fails, a store that does not answer most of all, is tried again next time."""
        try:
            rows = {row.id: row for row in self._endpoints.rows()}
            self._reconcile(rows)
            self._advance(rows)
            self._scale()
            self._publish(rows)
            self._confirm()
            self._tell_readiness(rows)
        except (ServingError, OSError) as error:
            logger.warning("the endpoints: %s", error)
        self._clean()

    # what is wanted

    def _reconcile(self, rows: dict[str, EndpointState]) -> None:
        wanted: set[tuple[str, int]] = set()
        for row in rows.values():
            now = self._deployed.get(row.id)
            serving = now.version if now is not None else None
            if row.pending_version is not None:
                wanted.add((row.id, row.pending_version))
            served = serving is not None and serving in (row.active_version, row.pending_version)
            if row.active_version is not None and not served:
                wanted.add((row.id, row.active_version))
        for gone in self._rollouts.keys() - wanted:
            del self._rollouts[gone]
            self._published.pop(gone, None)
        for place in wanted - self._rollouts.keys():
            self._begin(rows[place[0]], place[1])
        for gone_id in self._deployed.keys() - rows.keys():
            self._forget(self._deployed.pop(gone_id))

    def _begin(self, row: EndpointState, version: int) -> None:
        try:
            config = self._endpoints.config(row.name, version)
        except NotFound:
            return  # deleted just now
        before = next((p for p in self._plan.endpoints if (p.id, p.version) == (row.id, version)), None)
        self._rollouts[row.id, version] = Rollout(
            row,
            version,
            config,
            supervisor=self._supervisor,
            autoscaler=self._autoscaler,
            find=self._find,
            finders=self._finders,
            preparers=self._preparers,
            known={e.served.name: e.facts for e in before.entities} if before is not None else None,
        )

    # what is under way

    def _advance(self, rows: dict[str, EndpointState]) -> None:
        for rollout in list(self._rollouts.values()):
            before = rollout.stage
            if rollout.generation is not None:
                continue
            if rollout.is_stuck:
                del self._rollouts[rollout.row.id, rollout.version]  # and begun again
                continue
            stage = rollout.poll()
            row = rows[rollout.row.id]
            if stage == "ready":
                for served in rollout.served:
                    self._plan_directory.save_failed_log(row.id, served.entity.name, "")
                old = self._deployed.get(row.id)
                self._deployed[row.id] = rollout.deployed()
                rollout.generation = -1  # published with the next plan
                if old is not None:
                    self._forget(old)
            elif stage == "failed":
                if before != "failed":
                    logger.warning("endpoint %s, config %d: %s", row.name, rollout.version, rollout.message)
                    for entity, text in rollout.failed_logs.items():
                        self._plan_directory.save_failed_log(row.id, entity, text or rollout.message)
                if row.pending_version == rollout.version:  # until the store has taken it
                    with contextlib.suppress(NotFound):
                        self._endpoints.mark_failed(row.name, rollout.version, rollout.message)

    def _confirm(self) -> None:
        """Tell the store what all workers serve."""
        for place, rollout in list(self._rollouts.items()):
            if rollout.generation is None:
                continue
            rollout.generation = max(rollout.generation, self._plan.generation if rollout.generation < 0 else -1)
            since = self._published.setdefault(place, time.monotonic())
            if self._plan_directory.is_adopted(rollout.generation) or time.monotonic() - since > ADOPTION_SECONDS:
                with contextlib.suppress(NotFound):
                    self._endpoints.mark_ready(rollout.row.name, rollout.version)
                del self._rollouts[place]
                del self._published[place]

    def _scale(self) -> None:
        if time.monotonic() - self._scaled_at < SCALE_SECONDS:
            return
        self._scaled_at = time.monotonic()
        wanted: dict[str, int] = {}
        for deployed in self._deployed.values():
            for served in deployed.served:
                status = self._supervisor.status(served.key)
                facts = deployed.facts.get(served.entity.name, {})
                found = self._plan_directory.replica_requested_at(served.key)
                number = self._autoscaler.replicas(served, facts, status, found, time.monotonic())
                wanted[served.key] = max(number, wanted.get(served.key, 0))
        warming = {key for rollout in self._rollouts.values() for key in rollout.needs()}
        for key, number in wanted.items():
            number = max(number, 1) if key in warming else number
            if self._supervisor.status(key).wanted != number:
                self._supervisor.set_replicas(key, number)

    # what is told

    def _publish(self, rows: dict[str, EndpointState]) -> None:
        planned = []
        for row in rows.values():
            if (deployed := self._deployed.get(row.id)) is not None:
                planned.append(self._planned(deployed))
            elif before := next((p for p in self._plan.endpoints if p.id == row.id), None):
                planned.append(before)
        if tuple(planned) != self._plan.endpoints or not self._plan.generation:
            plan = Plan(generation=self._plan.generation + 1, endpoints=tuple(planned))
            self._plan_directory.publish(plan)
            self._plan = plan

    def _planned(self, deployed: DeployedEndpoint) -> PlannedEndpoint:
        entities = []
        for served in deployed.served:
            status = self._supervisor.status(served.key)
            assert status.info is not None, "deployed behind the first token"
            entities.append(
                PlannedEntity(
                    served=served.entity,
                    key=served.key,
                    info=status.info,
                    addresses=_addresses(status, elsewhere=bool(served.entity.model.addresses)),
                    facts=deployed.facts.get(served.entity.name, {}),
                )
            )
        config = deployed.config
        return PlannedEndpoint(
            name=deployed.name,
            id=deployed.id,
            version=deployed.version,
            created=deployed.created,
            entities=tuple(entities),
            routes=config.routes,
            sticky=config.sticky,
            profile=config.profile,
            prefix_sharing=config.prefix_sharing,
        )

    def _tell_readiness(self, rows: dict[str, EndpointState]) -> None:
        for row in rows.values():
            deployed = self._deployed.get(row.id)
            if deployed is None or row.active_version != deployed.version:
                continue
            ready = all(self._answers(served.key) for served in deployed.served)
            if ready:
                self._unready.pop(row.id, None)
            since = self._unready.setdefault(row.id, time.monotonic()) if not ready else 0.0
            if ready != row.ready and (ready or time.monotonic() - since > UNREADY_SECONDS):
                with contextlib.suppress(NotFound):
                    self._endpoints.set_ready(row.name, ready)

    def _answers(self, key: str) -> bool:
        status = self._supervisor.status(key)
        return bool(status.ready) or status.wanted == 0

    # what is over

    def _forget(self, deployed: DeployedEndpoint) -> None:
        for served in deployed.served:
            self._autoscaler.forget(served)

    def _clean(self) -> None:
        """Drain the engines that neither the plan nor a rollout needs."""
        needed = {entity.key for endpoint in self._plan.endpoints for entity in endpoint.entities}
        needed |= {key for rollout in self._rollouts.values() for key in rollout.needs()}
        needed |= {served.key for deployed in self._deployed.values() for served in deployed.served}
        for key in self._supervisor.entities():
            if key not in needed:
                self._supervisor.remove(key)


def _addresses(status: EngineStatus, *, elsewhere: bool) -> tuple[str, ...]:
    """Replicas that have been ready; one that is being started again keeps its requests. One that cannot be is left out
    while there is another, as is one ``elsewhere``, of which nobody knows whether it is being started."""
    proven = [r for r in status.replicas if r.proven and r.index < status.wanted]
    well = [r for r in proven if r.state == "ready" or not (elsewhere or r.state == "failed")]
    return tuple(r.address for r in well or proven)
