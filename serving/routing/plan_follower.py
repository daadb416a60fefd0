"""The plan follower: a worker serves what the controller's plan says. New engines come first, then the traffic, then
the old engines go."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gevent
from gevent.event import Event

from .. import logs
from ..control.plan import Plan, PlanDirectory, PlannedEndpoint, PlannedEntity, WorkerState
from ..dialect_settings import DialectSettings
from ..dialects.defaults import defaults_of
from ..endpoints.config import ModelSource
from ..engine.interface import AdapterInfo, Engine, EngineRecord
from ..model_uri import version_of
from ..observability.engine_counters import CounterDirectory
from ..tasks.endpoint import EndpointView, Profile
from ..tasks.text import TextModel
from .adapter_poller import AdapterPoller
from .admission import PROFILES, mode_of, profile_in
from .load_shedding import LoadShedder
from .replica_set import ReplicaSet
from .served_endpoints import ServedEndpoint, ServedEndpoints, ServedEntity
from .traffic import TrafficSplit

TURN = 0.1  # seconds between looks at the plan
FIRST_NAMES = 1.0  # seconds in which engines list their adapters before requests come
FIRST_SECONDS = 5.0  # for an engine of another host, which the controller process has just been connected to
RETRY = 10  # turns after which a replica that did not answer is tried again


class PlanFollower:
    """``open`` (``gevent_client.attach``) attaches to an engine. ``profile``, one of ``profiles``, is for endpoints
    that name none, ``dialects`` for settings that they do not have. ``engine_timeout``: seconds that requests wait for
    an engine of another host that is away. ``counter_directory``: where engines keep their counters.

    One greenlet runs ``run`` (or the worker's start ``adopt``), and it alone changes what is here.
    """

    def __init__(
        self,
        plan_directory: PlanDirectory,
        endpoints: ServedEndpoints,
        load_shedder: LoadShedder,
        *,
        open: Any,
        ledger: Any,
        profile: str = "open",
        profiles: Mapping[str, Profile] = PROFILES,
        dialects: DialectSettings | None = None,
        engine_timeout: float | None = None,
        counter_directory: CounterDirectory | None = None,
    ) -> None:
        self._plan_directory, self._endpoints, self._load_shedder = plan_directory, endpoints, load_shedder
        self._open, self._ledger, self._profile, self._profiles = open, ledger, profile, profiles
        self._dialects = dialects or DialectSettings()
        self._engine_timeout, self._counter_directory = engine_timeout, counter_directory
        self._engines: dict[str, ReplicaSet] = {}
        self._retiring: dict[str, ReplicaSet] = {}
        self._adapters: dict[str, AdapterPoller] = {}  # of those in both
        self._texts: dict[tuple[Any, ...], TextModel] = {}
        self._splits: dict[tuple[str, int], TrafficSplit] = {}
        self._worker_file = plan_directory.add_worker()
        self._reported = WorkerState()
        self._stamp: tuple[int, int] | None = None
        self._complete = True
        self._turns = 0
        self.generation = -1

    def planned(self, endpoint: str) -> tuple[PlannedEndpoint | None, bool]:
        """``endpoint`` as the newest plan has it, and whether every worker serves that plan."""
        plan = self._plan_directory.read()
        found = next((one for one in plan.endpoints if one.name == endpoint), None)
        return found, self._plan_directory.is_adopted(plan.generation)

    def failed_log(self, endpoint_id: str, entity: str) -> str:
        """What an engine of ``entity`` wrote whose load failed; empty where none has."""
        return self._plan_directory.failed_log(endpoint_id, entity)

    def run(self) -> None:
        """For ever: adopt each new plan, and let go of what is not used any more."""
        due = Event()
        timer = gevent.get_hub().loop.timer(TURN, TURN)
        timer.start(self._look, due)
        try:
            while True:
                due.wait()
                due.clear()
                try:
                    if self._has_plan():
                        self.adopt()
                    self._release_idle()
                except Exception:
                    logs.event("the plan could not be followed; it is tried again", level=40, exc_info=True)
                    gevent.sleep(1.0)
        finally:
            timer.stop()
            timer.close()

    def _look(self, due: Event) -> None:
        """Have ``run`` take a turn where one is due. Called by the event loop: to switch to a greenlet that finds
        nothing to do costs several times what a look does."""
        self._turns += 1
        with contextlib.suppress(OSError):  # which ``run`` will say
            if not self._has_plan() and not self._retiring and all(one.is_settled for one in self._engines.values()):
                return
        due.set()

    def _has_plan(self) -> bool:
        """Whether there is a plan to adopt: a new one, or one of which replicas could not be reached."""
        return self._plan_directory.stamp() != self._stamp or (not self._complete and self._turns % RETRY == 0)

    def adopt(self) -> None:
        """Serve what the newest plan says."""
        stamp = self._plan_directory.stamp()
        plan = self._plan_directory.read()
        planned = {entity.key: entity for endpoint in plan.endpoints for entity in endpoint.entities}
        # before we attach, so that the controller process ends none of them meanwhile
        self._report(self.generation, {a for entity in planned.values() for a in entity.addresses})
        reached = [self._reach(key, entity) for key, entity in planned.items()]
        self._complete = all(reached)
        gevent.wait([names.answered for names in self._adapters.values()], timeout=FIRST_NAMES)
        self._endpoints.replace(tuple(self._endpoint(endpoint) for endpoint in plan.endpoints))
        for key in self._engines.keys() - planned.keys():
            self._retiring[key] = self._engines.pop(key)
        self._forget(plan)
        before, self._stamp, self.generation = self.generation, stamp, plan.generation
        self._report(plan.generation)
        if plan.generation != before:  # not each time that a replica was looked for again
            logs.event("serving", generation=plan.generation, endpoints=[endpoint.name for endpoint in plan.endpoints])

    def close(self) -> None:
        """Give up all engines and the worker's place among those that the controller process waits for."""
        for names in self._adapters.values():
            names.close()
        for engine in (*self._engines.values(), *self._retiring.values()):
            engine.close()
        self._worker_file.remove()

    def _reach(self, key: str, entity: PlannedEntity) -> bool:
        source = entity.config.model
        engine = self._engines.get(key) or self._retiring.pop(key, None)
        if engine is None:
            counters = "" if self._counter_directory is None else self._counter_directory.root(key)
            engine = ReplicaSet(
                entity.info,
                tuple(AdapterInfo(name=name, rank=0, path=path) for name, path in source.bundle.adapters.items()),
                open=functools.partial(self._attach, source, counters),
                request_replica=functools.partial(self._plan_directory.request_replica, key),
                away_timeout=self._engine_timeout if source.addresses else None,
                record=functools.partial(self._engine_record, key),
            )
        engine.update_info(entity.info)
        self._engines[key] = engine
        complete = engine.set_addresses(entity.addresses)
        if key not in self._adapters:  # not before there is an engine to ask
            self._adapters[key] = AdapterPoller(engine, source.bundle.adapters)
        return complete

    def _engine_record(self, key: str) -> EngineRecord:
        return self._plan_directory.engines().engines.get(key, EngineRecord())

    def _attach(self, source: ModelSource, counts: str, address: str) -> Engine:
        engine: Engine = self._open(
            address,
            key_file=source.key_file,
            stall_timeout=source.engine.stall_timeout,
            first_timeout=FIRST_SECONDS if source.addresses else None,
            content_hash=source.bundle.content_hash,
            counts=counts,
        )
        return engine

    def _endpoint(self, planned: PlannedEndpoint) -> ServedEndpoint:
        profile = dataclasses.replace(
            self._profiles[planned.profile or self._profile], dialects=planned.dialects.over(self._dialects)
        )
        entities = {entity.config.name: self._entity(planned, entity, profile) for entity in planned.entities}
        split = None
        if len(entities) > 1:
            place = (planned.id, planned.version)
            split = self._splits.get(place) or TrafficSplit.starting_anywhere(planned.name, planned.routes)
            self._splits[place] = split
        return ServedEndpoint(name=planned.name, entities=entities, split=split, sticky=planned.sticky)

    def _entity(self, planned: PlannedEndpoint, entity: PlannedEntity, profile: Profile) -> ServedEntity:
        source, engine = entity.config.model, self._engines[entity.key]
        if self._counter_directory is not None:
            self._counter_directory.assign((planned.name, entity.config.name), entity.key)
        mode = mode_of(entity.config, entity.facts, self._ledger, len(entity.addresses))
        view = EndpointView(
            name=planned.name,
            info=engine.info,
            text=self._text(entity),
            adapters=AdapterNames(self._adapters[entity.key], entity),
            default_adapter=source.bundle.default_adapter,
            defaults=defaults_of(source.defaults),
            profile=profile_in(mode, profile),
            names=(entity.config.name,),
            version=version_of(source.uri),
        )
        return ServedEntity(
            endpoint=planned.name,
            entity=entity.config.name,
            view=view,
            engine=engine,
            mode=mode,
            created=planned.created,
            prefix_sharing=planned.prefix_sharing,
        )

    def _text(self, entity: PlannedEntity) -> TextModel:
        source = entity.config.model
        place = _text_place(entity)
        if place not in self._texts:
            # on a thread: reading a tokenizer takes long enough for streams to be held up
            make = functools.partial(TextModel, source.bundle, source.engine.trust_remote_code)
            self._texts[place] = gevent.get_hub().threadpool.apply(make)
        return self._texts[place]

    def _forget(self, plan: Plan) -> None:
        texts = {_text_place(entity) for endpoint in plan.endpoints for entity in endpoint.entities}
        splits = {(endpoint.id, endpoint.version) for endpoint in plan.endpoints}
        self._texts = {place: text for place, text in self._texts.items() if place in texts}
        self._splits = {place: split for place, split in self._splits.items() if place in splits}

    def _release_idle(self) -> None:
        """Close what has no request left; the controller process ends it then."""
        for engine in (*self._engines.values(), *self._retiring.values()):
            engine.rescue()
        changed = [engine.release_idle() for engine in (*self._engines.values(), *self._retiring.values())]
        over = [key for key, engine in self._retiring.items() if not self._load_shedder.running(engine)]
        for key in over:
            if key in self._adapters:  # it is not where an engine could never be reached
                self._adapters.pop(key).close()
            self._retiring.pop(key).close()
        if over or any(changed):
            self._report(self.generation)

    def _report(self, generation: int, more: Iterable[str] = ()) -> None:
        engines = (*self._engines.values(), *self._retiring.values())
        addresses = set(more).union(*(engine.addresses for engine in engines))
        state = WorkerState(generation=generation, addresses=tuple(sorted(addresses)))
        if state != self._reported:
            self._reported = state
            self._worker_file.write(state)


class AdapterNames:
    """The adapters of a served entity: what its engine was heard to have, and what the plan says of those that were
    loaded and unloaded since, which is what all workers go by."""

    def __init__(self, heard: Callable[[], tuple[str, ...]], entity: PlannedEntity) -> None:
        self._heard = heard
        self._loaded = frozenset(adapter.name for adapter in entity.adapters if not adapter.refusal)
        self._withdrawn = frozenset(entity.withdrawn)

    def __call__(self) -> tuple[str, ...]:
        heard = self._heard()
        if not self._loaded and not self._withdrawn:
            return heard
        return tuple(sorted((self._loaded | set(heard)) - self._withdrawn))


def _text_place(entity: PlannedEntity) -> tuple[Any, ...]:
    source = entity.config.model
    bundle = source.bundle
    return (bundle.content_hash, bundle.tokenizer_dir, bundle.default_adapter, source.engine.trust_remote_code)
