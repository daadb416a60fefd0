"""One configuration of one endpoint on its way into service.

::

    finding ──► warming ──► preparing ──► ready          finding: check that the model's files are (still) there
        └──────────┴────────────┴───────► failed         warming: each entity's first replica generates a token
                                                         preparing: ``Autoscaler.prepare`` measures each entity
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Literal

from ..endpoints.config import EndpointConfig, EntityConfig
from ..endpoints.engine_hosts import placement_key
from ..endpoints.store import EndpointState
from ..interface.errors import NotFound, PackagingError, ServingError
from ..supervision.supervisor import EngineSpec, Supervisor
from ..transport.process_spec import ENGINE_CORE
from .autoscaler import Autoscaler
from .deployed import DeployedEndpoint, DeployedEntity
from .engine_memory import EngineMemory
from .hosts.hosted_engines import HostedEngines

Stage = Literal["finding", "warming", "preparing", "ready", "failed"]
AGAIN_SECONDS = 10.0
Find = Callable[[EntityConfig], EntityConfig]


class Rollout:
    """A configuration on its way into service, driven by ``poll``, which never blocks.

    ``known`` are the facts from an earlier controller process, which are not measured again."""

    def __init__(
        self,
        endpoint: EndpointState,
        version: int,
        config: EndpointConfig,
        *,
        supervisor: Supervisor,
        autoscaler: Autoscaler,
        find: Find,
        finders: Executor,
        preparers: Executor,
        memory: EngineMemory | None = None,
        hosted: HostedEngines | None = None,
        known: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.endpoint, self.version, self.config = endpoint, version, config
        self.stage: Stage = "finding"
        self.message = ""
        self.failed_logs: dict[str, str] = {}  # of engines that did not load, by the served entity's name
        self.entities: tuple[DeployedEntity, ...] = ()
        self.facts = dict(known or {})
        self.generation: int | None = None  # of the plan that contains it
        self._supervisor, self._autoscaler, self._preparers = supervisor, autoscaler, preparers
        self._memory = memory or EngineMemory()
        self._hosted = hosted
        self._warmed: set[str] = set()
        self._failed_at = 0.0
        self._work: Future[Any] = finders.submit(self._found, find)

    def needs(self) -> set[str]:
        """Return the keys of the engines that the rollout needs."""
        return {entity.key for entity in self.entities}

    def needs_now(self) -> set[str]:
        """Return the keys of the engines that have to run for the rollout to continue.

        An engine that has generated a token need not run any more, unless its entity still has to be measured. Those
        on joined hosts are started there.
        """
        if self.stage == "preparing":
            return {entity.key for entity in self.entities if entity.config.provisioned}
        return {entity.key for entity in self.entities if not entity.config.is_hosted} - self._warmed

    @property
    def is_stuck(self) -> bool:
        """Whether it failed before it had engines, some time ago: then only a new rollout can succeed."""
        return self.stage == "failed" and not self.entities and time.monotonic() - self._failed_at > AGAIN_SECONDS

    def poll(self) -> Stage:
        """Go as far as is possible now. A failed start is reported, but retried until the rollout is dropped."""
        try:
            if self.stage == "finding" and self._work.done():
                self._warm(self._work.result())
            if self.stage in ("warming", "failed") and self.entities:
                self._look()
            if self.stage == "preparing" and self._work.done():
                self.facts = self._work.result()
                self.stage = "ready"
        except (ServingError, PackagingError, OSError) as error:
            self.entities = ()
            self._fail(str(error))
        return self.stage

    def deployed(self) -> DeployedEndpoint:
        """Return the deployed endpoint, once the stage is "ready"."""
        return DeployedEndpoint(
            name=self.endpoint.name,
            id=self.endpoint.id,
            created=self.endpoint.created_ms // 1000,
            version=self.version,
            config=self.config,
            entities=self.entities,
            facts=self.facts,
        )

    def _found(self, find: Find) -> list[tuple[DeployedEntity, EngineSpec]]:
        found = []
        for asked in self.config.served_entities:
            config = find(asked)
            source = config.model
            model = EngineSpec(
                bundle=source.bundle,
                settings=source.engine,
                core=source.core or ENGINE_CORE,
                addresses=source.addresses,
                key_file=source.key_file,
                hosted=config.is_hosted,
            )
            key = placement_key(config) if config.is_hosted else model.key()
            entity = DeployedEntity(endpoint=self.endpoint.name, version=self.version, config=config, key=key)
            found.append((entity, model))
        return found

    def _warm(self, found: list[tuple[DeployedEntity, EngineSpec]]) -> None:
        kept = self._supervisor.entities()
        for entity, _ in found:
            self._memory.admit(entity.key, entity.config, entity.endpoint)
        for entity, model in found:
            running = self._supervisor.status(entity.key).wanted if entity.key in kept else 0
            minimum = 1 if self._memory.budget is None else 0  # with a budget, the reconciler makes room first
            self._supervisor.add(entity.key, model, replicas=max(minimum, running, len(model.addresses)))
        self.entities = tuple(entity for entity, _ in found)
        self.stage = "warming"

    def _look(self) -> None:
        for entity in self.entities:
            status = self._supervisor.status(entity.key)
            if status.failed and not status.ready:
                self.failed_logs[entity.config.name] = status.failed[0].failed_log
                self._fail(f"{entity.config.name}: {status.failed[0].message}")
                return
            why = "" if status.ready or self._hosted is None else self._hosted.problem(entity.key, entity.config)
            if why:
                self._fail(f"{entity.config.name}: {why}")
                return
            if status.ready:
                if entity.key not in self._warmed and not entity.config.is_hosted:
                    if not self._memory.is_known(entity.key):
                        return
                    self._memory.check(entity.key)
                self._warmed.add(entity.key)
                self._memory.warmed(entity.key)
            elif entity.key not in self._warmed or entity.config.provisioned:
                return
        self.stage, self.message = "preparing", ""
        self._work = self._preparers.submit(self._prepared)

    def _prepared(self) -> dict[str, dict[str, Any]]:
        facts = {}
        for entity in self.entities:
            known = self.facts.get(entity.config.name)
            facts[entity.config.name] = self._prepare(entity) if known is None else known
        return facts

    def _prepare(self, entity: DeployedEntity) -> dict[str, Any]:
        try:
            ready = self._supervisor.status(entity.key).ready
            if not ready:
                raise NotFound(f"{entity.config.name}: its engine ended")
            return self._autoscaler.prepare(entity, self._supervisor.engine(entity.key, ready[0].index))
        except NotFound as error:
            raise ServingError(f"{entity.config.name}: {error}") from None

    def _fail(self, message: str) -> None:
        self.stage, self.message = "failed", message
        self._failed_at = time.monotonic()
