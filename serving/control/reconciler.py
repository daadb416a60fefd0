"""The reconciler makes the server serve what the store says: it starts and ends engines, publishes the plan and reports
the outcomes.

One thread calls ``tick``. The steps of an update are: its engines warm up (``rollout``); the plan with it is published;
every worker adopts the plan; this server reports it, and the leader of all gateways marks the endpoint ready
(``fleet``); the engines that are no longer needed drain. A config that fails leaves the plan and the engines as they
were.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ..endpoints.config import EndpointConfig, EntityConfig, changes
from ..endpoints.gateways import EndpointReport
from ..endpoints.rows import content_hash
from ..endpoints.store import EndpointState, EndpointStore
from ..interface.canary import EntityCounts
from ..interface.errors import NotFound, PackagingError, ServingError
from ..metering.accounts.audit import Actor
from ..metering.accounts.budget_alerts import BudgetAlerts
from ..model_files import downloads
from ..supervision.supervisor import EngineStatus, Supervisor
from ..system.load_steps import LoadStep
from .adapter_files import AdapterFiles
from .adapters import EngineAdapters, Loaded
from .autoscaler import Autoscaler
from .deployed import DeployedEndpoint, DeployedEntity
from .engine_memory import EngineMemory
from .fleet import Fleet
from .following.counts import CanaryCounts
from .following.follower import AliasFollower
from .hosts.hosted_engines import HostedEngines
from .hosts.placer import Placer
from .plan import EngineRecords, Plan, PlanDirectory, PlannedEndpoint, PlannedEntity
from .ray_runtime.runtime import RayRuntime
from .rollout import Rollout
from .webhooks import WebhookSender

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
QUIET_TICK_SECONDS = 0.5  # seconds between checks of the store while nothing is under way and no change was signalled
ADOPTION_SECONDS = 60.0  # after this time, a worker that does not adopt the plan no longer delays an update
SCALE_SECONDS = 0.5
PRUNE_SECONDS = 20.0
ADAPTER_SECONDS = 60.0  # how long a start waits for adapters that are not in the engines yet
UNREADY_SECONDS = 1.0  # an engine that is back sooner does not count as unready
Say = Callable[..., None]
COMMAND_LINE = Actor(name="command line", via="command")


class Reconciler:
    """The loop that compares what is wanted with what runs, and acts.

    ``say(stage, endpoint=…, **fields)`` is called with the steps of the start; setting ``over`` ends the start."""

    def __init__(
        self,
        endpoints: EndpointStore,
        supervisor: Supervisor,
        plan_directory: PlanDirectory,
        autoscaler: Autoscaler,
        *,
        find: Callable[[EntityConfig], EntityConfig],
        memory: EngineMemory | None = None,
        fleet: Fleet | None = None,
        follower: AliasFollower | None = None,
        canary_counts: CanaryCounts | None = None,
        webhooks: WebhookSender | None = None,
        budget_alerts: BudgetAlerts | None = None,
        ray_runtime: RayRuntime | None = None,
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
        self._memory = memory or EngineMemory()
        self._fleet = fleet or Fleet(endpoints, name="this server")
        self._webhooks, self._budget_alerts = webhooks, budget_alerts
        self._follower, self._canary_counts = follower, canary_counts or CanaryCounts(None)
        self._hosted, self._placer = HostedEngines(endpoints.hosts), Placer(endpoints)
        self._ray_runtime = ray_runtime
        self._engines = EngineRecords()
        self._over = over or threading.Event()
        self._plan = plan_directory.read()  # of a controller process that was killed: valid until we know better
        self._adapters = EngineAdapters(self._plan, AdapterFiles.of(endpoints.adapters.contents))
        self._pruned_at = time.monotonic()
        self._deployed: dict[str, DeployedEndpoint] = {}
        self.rollouts: dict[tuple[str, int], Rollout] = {}
        self._published: dict[tuple[str, int], float] = {}
        is_adopted = plan_directory.is_adopted(self._plan.generation)
        self._adopted = {one.id: one.version for one in self._plan.endpoints if is_adopted}  # by all workers
        self._contents: dict[tuple[str, int], str] = {}
        self._declared: dict[str, int] = {}
        self._serving = bool(self._plan.generation)
        self._updating = False
        self._unready: dict[str, float] = {}
        self._scaled_at = 0.0
        # one measurement at a time, so that they do not disturb each other
        self._finders, self._preparers = ThreadPoolExecutor(2), ThreadPoolExecutor(1)

    def start(self, declared: dict[str, EndpointConfig]) -> None:
        """Serve ``declared`` and the store's other endpoints. Return when everything is served that can be.

        Raises ``PackagingError`` if one of ``declared`` cannot be served; other endpoints that fail are retried later.
        """
        if not self._plan.generation:  # otherwise they were declared before, and may have been changed since
            for name, config in declared.items():
                version = self._declared[name] = self._endpoints.declare(name, config, by=COMMAND_LINE)
                if self._endpoints.keeps_operators(name, config):
                    logger.warning(
                        "endpoint %s keeps its config %d, which was set over the API and differs from the command "
                        "line's; 'mlflow-llm endpoints give-back %s' returns to the command line's",
                        *(name, version, name),
                    )
        for state in self._endpoints.states():
            self._say("loading", endpoint=state.name)
        began = time.monotonic()
        said: set[str] = set()
        steps: dict[str, LoadStep] = {}
        while not self._over.is_set() and not self._settled(declared):
            self.tick()
            for name in {one.name for one in self._deployed.values()} - said:
                said.add(name)
                seconds = round(time.monotonic() - began, 2)
                self._say("token", endpoint=name, seconds=seconds, **self._runs_on(name))
            self._say_steps(steps)
            time.sleep(TICK_SECONDS / 2)
        self._wait_for_adapters()
        self._serving = True

    def _wait_for_adapters(self) -> None:
        """Take no requests before the adapters that were loaded earlier are there, or cannot be."""
        until = time.monotonic() + ADAPTER_SECONDS
        while not self._over.is_set() and time.monotonic() < until:
            self.tick()
            if not self._adapters.are_missing(self._plan):
                return
            time.sleep(TICK_SECONDS / 2)

    def _say_steps(self, said: dict[str, LoadStep]) -> None:
        """Report how far the loads of engines on this host are, where that has changed since it was ``said``."""
        for address, step in self._supervisor.load_steps().items():
            if said.get(address) != step:
                said[address] = step
                self._say("step", step=step.name, done=step.done, total=step.total)

    def _runs_on(self, name: str) -> dict[str, str]:
        """Return which models an endpoint serves, which kernels its engines use, and how many tokens a step of them
        takes, as text."""
        entities = [entity for one in self._deployed.values() if one.name == name for entity in one.entities]
        infos = [self._supervisor.status(entity.key).info for entity in entities]
        known = [info for info in infos if info is not None]
        found = {"kernels": ", ".join(dict.fromkeys(info.kernels_summary for info in known))}
        found["model"] = ", ".join(dict.fromkeys(str(entity.config.model.identity) for entity in entities))
        steps = dict.fromkeys(str(info.max_num_batched_tokens) for info in known if info.max_num_batched_tokens)
        return found | ({"max_num_batched_tokens": ", ".join(steps)} if steps else {})

    def _settled(self, declared: Iterable[str]) -> bool:
        states = self._endpoints.states()
        for state in states:
            rollouts = [r for r in self.rollouts.values() if r.endpoint.id == state.id]
            for rollout in rollouts:
                if rollout.stage == "failed" and state.name in declared:
                    raise PackagingError(f"{state.name}: {rollout.message}")
            if state.pending_version is not None:
                return False
            declared_failed = self._declared.get(state.name) == state.last_version != state.active_version
            if state.config_update == "UPDATE_FAILED" and declared_failed:
                raise PackagingError(f"{state.name}: {state.message}")  # on another gateway
            failed = any(rollout.stage == "failed" for rollout in rollouts)
            if state.active_version is not None and state.id not in self._deployed and not failed:
                return False
        return True

    @property
    def pause(self) -> float:
        """Seconds until the next tick if nothing changes before."""
        return TICK_SECONDS if self.rollouts or self._updating else QUIET_TICK_SECONDS

    def close(self) -> None:
        """Start nothing more; work that is under way on threads ends with the process."""
        for executor in (self._finders, self._preparers):
            executor.shutdown(wait=False, cancel_futures=True)
        self._adapters.close()
        if self._follower is not None:
            self._follower.close()
        if self._ray_runtime is not None:
            self._ray_runtime.close()
        if self._webhooks is not None:
            self._webhooks.close()

    def tick(self) -> None:
        """Compare and act once. Steps that fail, for example because the store does not answer, are retried next
        time."""
        try:
            states = {state.id: state for state in self._endpoints.states()}
            self._updating = any(state.pending_version is not None for state in states.values())
            self.begin_rollouts(states)
            self._attach_hosted()
            self._advance(states)
            loaded = self._endpoints.adapters.all()
            self._adapters.want(
                loaded,
                self._deployed.values(),
                self._supervisor,
                plan=self._plan,
                is_adopted=lambda: self._plan_directory.is_adopted(self._plan.generation),
            )
            self._scale()
            self._publish(states)
            self._confirm()
            used = self._supervisor.hosted()
            self._fleet.tick(states.values(), self._reports(states, loaded), serving=self._serving, engines=used)
            if self._fleet.fence is not None:
                self._placer.tick(states.values(), self._fleet.fence)
            if self._ray_runtime is not None:
                self._ray_runtime.tick(states.values(), self._fleet.fence, self._status)
            if self._follower is not None:
                self._follower.tick(states.values(), self._fleet.fence)
            if self._budget_alerts is not None:
                self._budget_alerts.tick(self._fleet.fence is not None)
            if self._webhooks is not None:
                self._webhooks.tick(self._fleet.fence)
            self._prune_contents()
        except (ServingError, OSError) as error:
            logger.warning("the endpoints: %s", error)
        self._clean()

    def _prune_contents(self) -> None:
        """Remove a content that no adapter has any more, now and then, if this gateway leads."""
        if self._fleet.fence is not None and time.monotonic() - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = time.monotonic()
            self._endpoints.adapters.contents.prune()

    # what is wanted

    def begin_rollouts(self, states: dict[str, EndpointState]) -> None:
        wanted: set[tuple[str, int]] = set()
        for state in states.values():
            now = self._deployed.get(state.id)
            serving = now.version if now is not None else None
            under_way = (state.id, state.pending_version) in self.rollouts
            if state.pending_version is not None and (serving != state.pending_version or under_way):
                wanted.add((state.id, state.pending_version))
            served = serving is not None and serving in (state.active_version, state.pending_version)
            if state.active_version is not None and not served:
                wanted.add((state.id, state.active_version))
        for gone in self.rollouts.keys() - wanted:
            del self.rollouts[gone]
            self._published.pop(gone, None)
        for place in wanted - self.rollouts.keys():
            self._begin(states[place[0]], place[1])
        for gone_id in self._deployed.keys() - {state.id for state in states.values() if _is_wanted(state)}:
            self._forget(self._deployed.pop(gone_id))

    def _begin(self, state: EndpointState, version: int) -> None:
        try:
            config = self._endpoints.config(state.name, version)
            if state.active_version not in (None, version):
                for change in changes(self._endpoints.config(state.name, state.active_version), config):
                    logger.warning("endpoint %s, config %d: %s", state.name, version, change)
        except NotFound:
            return  # it has just been deleted
        before = next((p for p in self._plan.endpoints if (p.id, p.version) == (state.id, version)), None)
        self.rollouts[state.id, version] = Rollout(
            state,
            version,
            config,
            supervisor=self._supervisor,
            autoscaler=self._autoscaler,
            find=self._find,
            finders=self._finders,
            preparers=self._preparers,
            memory=self._memory,
            hosted=self._hosted,
            known={e.config.name: e.facts for e in before.entities} if before is not None else None,
        )

    # what is under way

    def _attach_hosted(self) -> None:
        """Attach to the engines on joined hosts where they are now. Those that have gone are kept until there are
        others, since their hosts may only be out of reach."""
        engines = [key for key in self._supervisor.entities() if key in self._supervisor.hosted()]
        self._hosted.look(engines)
        for key in engines:
            if addresses := self._hosted.addresses(key):
                self._supervisor.set_addresses(key, addresses)

    def _advance(self, states: dict[str, EndpointState]) -> None:
        for rollout in list(self.rollouts.values()):
            before = rollout.stage
            if rollout.generation is not None:
                continue
            if rollout.is_stuck:
                del self.rollouts[rollout.endpoint.id, rollout.version]  # the next tick begins it again
                continue
            stage = rollout.poll()
            state = states[rollout.endpoint.id]
            if stage == "ready":
                for entity in rollout.entities:
                    self._plan_directory.save_failed_log(state.id, entity.config.name, "")
                old = self._deployed.get(state.id)
                self._deployed[state.id] = rollout.deployed()
                rollout.generation = -1  # until it is published with the next plan
                if old is not None:
                    self._forget(old)
            elif stage == "failed" and before != "failed":
                logger.warning("endpoint %s, config %d: %s", state.name, rollout.version, rollout.message)
                for name, text in rollout.failed_logs.items():
                    self._plan_directory.save_failed_log(state.id, name, text or rollout.message)

    def _confirm(self) -> None:
        """Note the updates that all workers serve."""
        for place, rollout in list(self.rollouts.items()):
            if rollout.generation is None:
                continue
            rollout.generation = max(rollout.generation, self._plan.generation if rollout.generation < 0 else -1)
            since = self._published.setdefault(place, time.monotonic())
            if self._plan_directory.is_adopted(rollout.generation) or time.monotonic() - since > ADOPTION_SECONDS:
                self._adopted[rollout.endpoint.id] = rollout.version
                del self.rollouts[place]
                del self._published[place]

    def _status(self, key: str) -> EngineStatus | None:
        return self._supervisor.status(key) if key in self._supervisor.entities() else None

    def _scale(self) -> None:
        if time.monotonic() - self._scaled_at < SCALE_SECONDS:
            return
        self._scaled_at = time.monotonic()
        wanted: dict[str, int] = {}
        entities = [entity for deployed in self._deployed.values() for entity in deployed.entities]
        entities += [entity for rollout in self.rollouts.values() for entity in rollout.entities]
        self._memory.pin(entity.key for entity in entities if entity.config.min_provisioned_throughput)
        wanted |= {e.key: self._supervisor.status(e.key).wanted for e in entities if e.config.is_hosted}
        for deployed in self._deployed.values():
            for entity in deployed.entities:
                if entity.config.is_hosted:
                    continue
                status = self._supervisor.status(entity.key)
                facts = deployed.facts.get(entity.config.name, {})
                found = self._plan_directory.replica_requested_at(entity.key)
                number = self._autoscaler.step(entity, facts, status, found, time.monotonic())
                wanted[entity.key] = max(number, wanted.get(entity.key, 0))
        warming = {key for rollout in self.rollouts.values() for key in rollout.needs_now()}
        if self._memory.budget is None:
            warming &= wanted.keys()  # rollouts have started the others
        wanted |= {key: max(1, wanted.get(key, 0), self._supervisor.status(key).wanted) for key in warming}
        self._set_replicas(wanted)

    def _set_replicas(self, wanted: dict[str, int]) -> None:
        """Set the number of replicas of each engine to ``wanted``, as far as the machine's memory allows."""
        now = time.monotonic()
        status = {key: self._supervisor.status(key) for key in wanted}
        for key in wanted:
            self._memory.look(key, status[key], self._plan_directory.replica_requested_at(key), now)
        for key, number in self._memory.fit(wanted, status, now).items():
            if status[key].wanted != number:
                self._supervisor.set_replicas(key, number)
        records = EngineRecords(budget=self._memory.budget, engines=self._memory.records())
        if records != self._engines:
            self._plan_directory.save_engines(records)
            self._engines = records

    # what is published and reported

    def _publish(self, states: dict[str, EndpointState]) -> None:
        planned: list[PlannedEndpoint] = []
        missing = []
        for state in states.values():
            if (deployed := self._deployed.get(state.id)) is not None:
                planned.append(self._planned(deployed))
            elif _is_wanted(state) and (before := next((p for p in self._plan.endpoints if p.id == state.id), None)):
                planned.append(before)
            elif state.active_version is not None:
                missing.append(state.name)
        now = tuple(planned), tuple(missing)
        if now != (self._plan.endpoints, self._plan.missing) or not self._plan.generation:
            plan = Plan(generation=self._plan.generation + 1, endpoints=now[0], missing=now[1])
            self._plan_directory.publish(plan)
            self._plan = plan

    def _planned(self, deployed: DeployedEndpoint) -> PlannedEndpoint:
        entities = []
        before = {
            (endpoint.id, entity.config.name): entity.adapters
            for endpoint in self._plan.endpoints
            for entity in endpoint.entities
        }
        for entity in deployed.entities:
            status = self._supervisor.status(entity.key)
            assert status.info is not None, "deployed after the first token"
            adapters, withdrawn = self._adapters.planned(
                entity, status, before.get((deployed.id, entity.config.name), ())
            )
            entities.append(
                PlannedEntity(
                    config=entity.config,
                    key=entity.key,
                    info=status.info,
                    addresses=reachable_addresses(status, elsewhere=entity.config.is_elsewhere),
                    facts=deployed.facts.get(entity.config.name, {}),
                    adapters=adapters,
                    withdrawn=withdrawn,
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
            payload_log=config.payload_log,
            guardrails=config.guardrails,
            dialects=config.dialects,
        )

    def _reports(self, states: dict[str, EndpointState], loaded: Loaded) -> dict[str, EndpointReport]:
        """Return what this server serves of each endpoint, by its id, for the leader of all gateways."""
        is_adopted = bool(loaded) and self._plan_directory.is_adopted(self._plan.generation)
        planned = {one.id: one.version for one in self._plan.endpoints}
        self._adopted = {one: version for one, version in self._adopted.items() if one in planned}
        reports = {}
        for state in states.values():
            version = self._adopted.get(state.id)
            own = (r for r in self.rollouts.values() if r.endpoint.id == state.id and r.stage == "failed")
            failed = max(own, key=lambda rollout: rollout.version, default=None)  # the pending one, if it failed
            reports[state.id] = EndpointReport(
                version=version,
                content="" if version is None else self._content(state, version),
                ready=version is not None and self._is_ready(state),
                failed_version=None if failed is None else failed.version,
                message="" if failed is None else failed.message,
                adapters=self._adapters.reports(
                    self._plan, state.id, loaded.get(state.name, ()), is_adopted=is_adopted
                ),
                canary=self._counted(state),
            )
        return reports

    def _counted(self, state: EndpointState) -> EntityCounts | None:
        """Return what the canary of an endpoint has answered here; None without one."""
        deployed = self._deployed.get(state.id)
        canary = deployed.config.canary if deployed is not None else None
        return None if canary is None else self._canary_counts(state.name, canary.name)

    def _content(self, state: EndpointState, version: int) -> str:
        place = (state.id, version)
        if place not in self._contents:
            with contextlib.suppress(NotFound):  # it has just been deleted
                self._contents[place] = content_hash(self._endpoints.config(state.name, version))
        return self._contents.get(place, "")

    def _is_ready(self, state: EndpointState) -> bool:
        """Return whether the engines of an endpoint answer, but for its shadows; a short silence is not counted."""
        deployed = self._deployed.get(state.id)
        needed = [] if deployed is None else [one for one in deployed.entities if one.config.shadow is None]
        if all(map(self._answers, needed)):
            self._unready.pop(state.id, None)
            return True  # without a deployment, a plan of an earlier controller process is served
        return time.monotonic() - self._unready.setdefault(state.id, time.monotonic()) <= UNREADY_SECONDS

    def _answers(self, entity: DeployedEntity) -> bool:
        status = self._supervisor.status(entity.key)
        return bool(status.ready) or (status.wanted == 0 and not entity.config.is_hosted)

    # what is over

    def _forget(self, deployed: DeployedEndpoint) -> None:
        for entity in deployed.entities:
            self._autoscaler.forget(entity)

    def _clean(self) -> None:
        """Drain the engines that neither the plan nor a rollout needs."""
        needed = {entity.key for endpoint in self._plan.endpoints for entity in endpoint.entities}
        needed |= {key for rollout in self.rollouts.values() for key in rollout.needs()}
        needed |= {entity.key for deployed in self._deployed.values() for entity in deployed.entities}
        for key in self._supervisor.entities():
            if key not in needed:
                self._supervisor.remove(key)
        self._memory.keep_only(needed)
        canaries = {(one.name, one.config.canary.name) for one in self._deployed.values() if one.config.canary}
        self._canary_counts.keep_only(canaries)
        self._drop_files()

    def _drop_files(self) -> None:
        """Let go of downloaded files that are not served any more; while a rollout finds its own, of none."""
        if self.rollouts:
            return
        entities = [entity.config for deployed in self._deployed.values() for entity in deployed.entities]
        entities += [entity.config for endpoint in self._plan.endpoints for entity in endpoint.entities]
        paths = [path for entity in entities for path in downloads.paths_of(entity.model.bundle)]
        downloads.keep_only([*paths, *self._adapters.paths()])


def _is_wanted(state: EndpointState) -> bool:
    """Return whether an endpoint has a config to serve: none if its first one has failed on some gateway."""
    return state.active_version is not None or state.pending_version is not None


def reachable_addresses(status: EngineStatus, *, elsewhere: bool) -> tuple[str, ...]:
    """Return the addresses of the replicas that have been ready.

    A replica that is being restarted keeps its requests. While there is another, a failed replica is left out; so is
    one ``elsewhere`` (on other hosts) that is not ready, since it is unknown whether it is being restarted.
    """
    were_ready = [r for r in status.replicas if r.was_ready and not r.is_draining]
    well = [r for r in were_ready if r.state == "ready" or not (elsewhere or r.state == "failed")]
    return tuple(r.address for r in well or were_ready)
