"""The plan follower makes a worker serve what the controller's plan says: it attaches to the new engines, moves the
traffic, then releases the old engines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gevent
import msgspec
from gevent.event import Event

from ..control.plan import Plan, PlanDirectory, PlannedEndpoint, PlannedEntity, WorkerState
from ..dialects.fields.defaults import defaults_of
from ..endpoints.config import EntityConfig
from ..interface.dialect_settings import DialectSettings
from ..interface.engine import AdapterInfo, Engine, EngineInfo, EngineRecord, public_name
from ..interface.guardrails import NO_GUARDRAILS
from ..model_files.model_uri import version_of
from ..observability.engine_counters import CounterDirectory
from ..system import logs
from ..tasks.prompt.endpoint import EndpointView, Profile
from ..tasks.prompt.text import TextModel
from .adapter_poller import AdapterPoller
from .admission import PROFILES, mode_of, profile_in
from .load_shedding import LoadShedder
from .replica_set import ReplicaSet
from .served_endpoints import ServedEndpoint, ServedEndpoints, ServedEntity
from .traffic import TrafficSplit

CHECK_SECONDS = 0.1  # seconds between checks of the plan
FIRST_NAMES_SECONDS = 1.0  # seconds to wait for engines to list their adapters before their endpoints are served
FIRST_SECONDS = 5.0  # to attach to an engine of another host, which the controller process has just connected to
RETRY_TURNS = 10  # turns after which the worker tries again to reach a replica that did not answer


class PlanFollower:
    """The follower of the plan of ``plan_directory`` for one worker.

    ``open`` (``gevent_client.attach``) attaches to an engine. ``profile`` names the one of ``profiles`` for endpoints
    that name none; ``dialects`` has the dialect settings that endpoints leave unset. ``engine_timeout`` is how many
    seconds requests wait for an engine on another host that is away. ``counter_directory`` is where engines keep their
    counters. Only one greenlet changes this object: the worker's start calls ``adopt``, later one greenlet runs
    ``run``.
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
        self._adapters: dict[str, AdapterPoller] = {}  # for the engines in both dictionaries
        self._texts: dict[tuple[Any, ...], TextModel] = {}
        self._splits: dict[tuple[str, int], TrafficSplit] = {}
        self._worker_file = plan_directory.add_worker()
        self._reported = WorkerState()
        self._stamp: tuple[int, int] | None = None
        self.complete = True
        self._turns = 0
        self.generation = -1
        self.missing: tuple[str, ...] = ()

    def planned(self, endpoint: str) -> tuple[PlannedEndpoint | None, bool]:
        """Return ``endpoint`` as described in the newest plan, and whether every worker serves that plan."""
        plan = self._plan_directory.read()
        found = next((one for one in plan.endpoints if one.name == endpoint), None)
        return found, self._plan_directory.is_adopted(plan.generation)

    @property
    def gateway(self) -> str:
        """The id of this server among the gateways of its database."""
        return self._plan_directory.gateway()

    def failed_log(self, endpoint_id: str, entity: str) -> str:
        """Return the log of an engine of ``entity`` that failed to load, or "" if none did."""
        return self._plan_directory.failed_log(endpoint_id, entity)

    def run(self) -> None:
        """Adopt each new plan and release engines that are not used any more, forever."""
        due = Event()
        timer = gevent.get_hub().loop.timer(CHECK_SECONDS, CHECK_SECONDS)
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
        """Wake ``run`` if it has something to do.

        The event loop calls this: switching to a greenlet that finds nothing to do costs several times as much.
        """
        self._turns += 1
        with contextlib.suppress(OSError):  # ``run`` meets the same error and logs it
            if not self._has_plan() and not self._retiring and all(one.is_settled for one in self._engines.values()):
                return
        due.set()

    def _has_plan(self) -> bool:
        """Return whether there is a plan to adopt: a new one, or one with replicas that could not be reached."""
        return self._plan_directory.stamp() != self._stamp or (not self.complete and self._turns % RETRY_TURNS == 0)

    def adopt(self) -> None:
        """Serve what the newest plan says."""
        stamp = self._plan_directory.stamp()
        plan = self._plan_directory.read()
        planned = {entity.key: entity for endpoint in plan.endpoints for entity in endpoint.entities}
        # reported before we attach, so that the controller process does not stop any of these engines meanwhile
        self._report(self.generation, {a for entity in planned.values() for a in entity.addresses})
        reached = [self._reach(key, entity) for key, entity in planned.items()]
        self.complete = all(reached)
        gevent.wait([names.answered for names in self._adapters.values()], timeout=FIRST_NAMES_SECONDS)
        self._endpoints.replace(tuple(self._endpoint(endpoint) for endpoint in plan.endpoints))
        for key in self._engines.keys() - planned.keys():
            self._retiring[key] = self._engines.pop(key)
        self._forget(plan)
        before, self._stamp, self.generation = self.generation, stamp, plan.generation
        self.missing = plan.missing
        self._report(plan.generation)
        if plan.generation != before:  # not after each retry to reach a replica
            models = {
                endpoint.name: [f"{one.config.name}: {one.config.model.identity}" for one in endpoint.entities]
                for endpoint in plan.endpoints
            }
            logs.event("serving", generation=plan.generation, endpoints=list(models), models=models)

    def close(self) -> None:
        """Close all engine clients, and remove the worker from those that the controller process waits for."""
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
                open=functools.partial(self._attach, entity.config, counters),
                request_replica=functools.partial(self._plan_directory.request_replica, key),
                away_timeout=self._engine_timeout if entity.config.is_elsewhere else None,
                record=functools.partial(self._engine_record, key),
            )
        engine.update_info(entity.info)
        self._engines[key] = engine
        complete = engine.set_addresses(entity.addresses)
        if key not in self._adapters:  # created here because the poller needs an engine to ask
            self._adapters[key] = AdapterPoller(engine, source.bundle.adapters)
        return complete

    def _engine_record(self, key: str) -> EngineRecord:
        return self._plan_directory.engines().engines.get(key, EngineRecord())

    def _attach(self, config: EntityConfig, counts: str, address: str) -> Engine:
        source = config.model
        engine: Engine = self._open(
            address,
            key_file=source.key_file,
            stall_timeout=source.engine.stall_timeout,
            first_timeout=FIRST_SECONDS if config.is_elsewhere else None,
            content_hash=source.bundle.content_hash,
            counts=counts,
        )
        return engine

    def _endpoint(self, planned: PlannedEndpoint) -> ServedEndpoint:
        profile = dataclasses.replace(
            self._profiles[planned.profile or self._profile], dialects=planned.dialects.over(self._dialects)
        )
        found = [self._entity(planned, entity, profile) for entity in planned.entities]
        shadows = tuple(entity for entity in found if entity.shadow is not None)
        answering = [dataclasses.replace(one, shadows=shadows) for one in found if one.shadow is None]
        entities = {entity.entity: entity for entity in answering}
        split = None
        if len(entities) > 1:
            place = (planned.id, planned.version)
            split = self._splits.get(place) or TrafficSplit.starting_anywhere(planned.name, planned.routes)
            self._splits[place] = split
        return ServedEndpoint(name=planned.name, entities=entities, split=split, sticky=planned.sticky)

    def _entity(self, planned: PlannedEndpoint, entity: PlannedEntity, profile: Profile) -> ServedEntity:
        source, engine = entity.config.model, self._engines[entity.key]
        text = self._text(entity)
        if self._counter_directory is not None:
            self._counter_directory.assign((planned.name, entity.config.name), entity.key)
        mode = mode_of(entity.config, entity.facts, self._ledger, len(entity.addresses))
        view = EndpointView(
            name=planned.name,
            info=with_chat(engine.info, text),
            text=text,
            adapters=AdapterNames(self._adapters[entity.key], entity),
            default_adapter=source.bundle.default_adapter,
            defaults=defaults_of(source.defaults),
            profile=profile_in(mode, profile),
            names=tuple(filter(None, (entity.config.name, entity.config.asked))),
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
            payload_log=planned.payload_log,
            guardrails=planned.guardrails or NO_GUARDRAILS,
            identity=entity.config.identity,
            shadow=entity.config.shadow,
            contents={one.name: one.content_hash for one in entity.adapters if one.content_hash and not one.refusal},
            is_label=entity.config.is_label,
        )

    def _text(self, entity: PlannedEntity) -> TextModel:
        source = entity.config.model
        place = _text_place(entity)
        if place not in self._texts:
            # on a thread, because reading a tokenizer takes long enough to hold up streams
            make = functools.partial(TextModel, source.bundle, source.engine.trust_remote_code)
            self._texts[place] = gevent.get_hub().threadpool.apply(make)
        templates = _own_templates(entity)
        if not templates:
            return self._texts[place]
        with_adapters = (*place, tuple(templates.items()))
        if with_adapters not in self._texts:
            add = functools.partial(self._texts[place].with_adapters, templates)
            self._texts[with_adapters] = gevent.get_hub().threadpool.apply(add)
        return self._texts[with_adapters]

    def _forget(self, plan: Plan) -> None:
        entities = [entity for endpoint in plan.endpoints for entity in endpoint.entities]
        texts = {_text_place(entity) for entity in entities}
        texts |= {(*_text_place(entity), tuple(_own_templates(entity).items())) for entity in entities}
        splits = {(endpoint.id, endpoint.version) for endpoint in plan.endpoints}
        self._texts = {place: text for place, text in self._texts.items() if place in texts}
        self._splits = {place: split for place, split in self._splits.items() if place in splits}

    def _release_idle(self) -> None:
        """Close the clients of engines that have no request left; the controller process can then stop the engines."""
        for engine in (*self._engines.values(), *self._retiring.values()):
            engine.rescue()
        changed = [engine.release_idle() for engine in (*self._engines.values(), *self._retiring.values())]
        over = [key for key, engine in self._retiring.items() if not self._load_shedder.running(engine)]
        for key in over:
            if key in self._adapters:  # an engine that could never be reached has no poller
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
    """The names of a served entity's adapters.

    They are the names from the engine's last answer, changed by the plan, which lists the adapters that were loaded and
    unloaded at run time and is the same for all workers.
    """

    def __init__(self, heard: Callable[[], tuple[str, ...]], entity: PlannedEntity) -> None:
        self._heard = heard
        self._loaded = frozenset(adapter.name for adapter in entity.adapters if not adapter.refusal)
        self._withdrawn = frozenset(entity.withdrawn)

    def __call__(self) -> tuple[str, ...]:
        heard = {name for name in self._heard() if name == public_name(name)}  # the others are in the plan, or old
        return tuple(sorted(self._loaded | (heard - self._withdrawn)))


def _text_place(entity: PlannedEntity) -> tuple[Any, ...]:
    source = entity.config.model
    bundle = source.bundle
    return (bundle.content_hash, bundle.tokenizer_dir, bundle.default_adapter, source.engine.trust_remote_code)


def _own_templates(entity: PlannedEntity) -> dict[str, str]:
    """Return the chat templates that adapters loaded at run time have of their own, by the adapter's name."""
    return {one.name: one.template for one in entity.adapters if one.template and not one.refusal}


def with_chat(info: EngineInfo, text: TextModel) -> EngineInfo:
    """Return ``info`` with chats, which a model without a template takes if one of its adapters has one."""
    if not text.templates or "chat" in info.tasks or "completions" not in info.tasks:
        return info
    return msgspec.structs.replace(info, tasks=("chat", *info.tasks))
