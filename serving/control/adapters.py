"""Wanted and loaded adapters of the engines of served entities, in addition to their models' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..endpoints.adapters import DynamicAdapter
from ..endpoints.gateways import AdapterProgress, AdapterReport
from ..interface.engine import public_name
from ..interface.errors import NotFound
from ..supervision.adapter_sync import WantedAdapter, WantedAdapters
from ..supervision.supervisor import EngineStatus, Supervisor
from ..transport.adapter_places import place_elsewhere
from .adapter_files import AdapterFiles
from .deployed import DeployedEndpoint, DeployedEntity
from .plan import Plan, PlannedAdapter

Loaded = Mapping[str, tuple[DynamicAdapter, ...]]
"""The adapters of each endpoint, by its name, as the store has them."""
Reports = dict[str, AdapterReport]
UNPINNED = "an endpoint that shares its engine has this adapter, and not pinned"
TAKEN = "an endpoint that shares its engine has another adapter of this name"
KEEP_SECONDS = 5.0
FORGET_SECONDS = 600.0
"""How long engines that do not answer are still told which contents they need not have."""
OLD_SECONDS = 60.0
"""How long a gateway may answer with the content of before, once it knows that there is another one."""


class EngineAdapters:
    """The dynamic adapters of all engines. Owned by the reconciler's thread.

    To an engine, an adapter with another content is another adapter (``interface.engine.engine_name``). So while an
    adapter is replaced, engines have the old content and the new one, and each request names the one that its worker
    knows. Engines keep a content for ``KEEP_SECONDS`` after no worker uses it any more, for requests on their way.

    ``plan`` is the plan of an earlier controller process, whose engines may still run. ``files`` are those on this
    host; engines elsewhere have their own.
    """

    def __init__(self, plan: Plan, files: AdapterFiles, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._files, self._monotonic = files, monotonic
        self._known: dict[str, set[str]] = {}  # by engine key: the names that the engine may have
        self._wanted: Loaded = {}
        self._owner: dict[tuple[str, str], DynamicAdapter] = {}  # by engine key and the engine's name of the adapter
        self._told: dict[str, dict[str, WantedAdapter]] = {}  # by engine key
        self._used: dict[tuple[str, str], float] = {}  # when a worker may last have used an adapter
        self._seen: dict[str, float] = {}  # by revision: since when it has been wanted
        for endpoint in plan.endpoints:
            for entity in endpoint.entities:
                names = {*(adapter.engine_name for adapter in entity.adapters), *entity.withdrawn}
                self._known.setdefault(entity.key, set()).update(names)

    def want(
        self,
        wanted: Loaded,
        deployed: Iterable[DeployedEndpoint],
        supervisor: Supervisor,
        *,
        plan: Plan,
        is_adopted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Tell the engines of ``deployed`` which adapters they should have, as far as their files are here.

        ``plan`` is the newest one, and ``is_adopted`` says whether all workers serve it.
        """
        self._wanted, self._owner = wanted, {}
        now = self._monotonic()
        revisions = {adapter.revision for adapters in wanted.values() for adapter in adapters}
        self._seen = {one: self._seen.get(one, now) for one in revisions}
        entities = [entity for endpoint in sorted(deployed, key=lambda one: one.name) for entity in endpoint.entities]
        self._want_files(entities)
        keys: dict[str, dict[str, WantedAdapter]] = {}
        for entity in entities:
            of_engine = keys.setdefault(entity.key, {})
            for adapter in wanted.get(entity.endpoint, ()):
                name = adapter.engine_name
                if not _is_same(self._owner.setdefault((entity.key, name), adapter), adapter):
                    continue
                if path := self._path(entity, adapter):
                    one = WantedAdapter(path=path, revision=adapter.revision, pinned=adapter.pinned)
                    of_engine.setdefault(name, one)
        for key, adapters in keys.items():
            known = self._known.setdefault(key, set())
            known.update(adapters)
            used = self._still_used(key, adapters, plan, is_adopted, now)
            before = self._told.get(key, {})
            old = {name: msgspec.structs.replace(before[name], is_old=True) for name in used if name in before}
            self._told[key] = adapters | old
            withdrawn = frozenset(known - adapters.keys() - used)
            try:
                supervisor.set_adapters(key, WantedAdapters(adapters=self._told[key], withdrawn=withdrawn))
            except NotFound:
                continue  # the engine has just been removed
        self._told = {key: told for key, told in self._told.items() if key in keys}

    def _want_files(self, entities: Iterable[DeployedEntity]) -> None:
        here = {entity.endpoint for entity in entities if not entity.config.is_elsewhere}
        found = {adapter.content_hash for name in here for adapter in self._wanted.get(name, ())}
        kept = {told.path for adapters in self._told.values() for told in adapters.values()}
        self._files.want(found - {""}, also=kept)

    def _path(self, entity: DeployedEntity, adapter: DynamicAdapter) -> str:
        """Return where the engine finds an adapter; "" while that is not known."""
        if not adapter.content_hash:
            return adapter.path
        if entity.config.is_elsewhere:
            return place_elsewhere(adapter.content_hash, adapter.path)
        return self._files.path(adapter.content_hash)

    def _still_used(
        self,
        key: str,
        adapters: Mapping[str, WantedAdapter],
        plan: Plan,
        is_adopted: Callable[[], bool],
        now: float,
    ) -> set[str]:
        """Return the names of contents that are not wanted any more, and that workers may still use."""
        known = self._known[key]
        left = {name for name in known if name not in adapters and name != public_name(name)}
        for name in adapters:
            self._used.pop((key, name), None)
        if not left:
            return set()
        planned = [entity for endpoint in plan.endpoints for entity in endpoint.entities if entity.key == key]
        names = {adapter.engine_name for entity in planned for adapter in entity.adapters}
        adopted = is_adopted()
        for name in left:
            if name in names or not adopted:
                self._used[key, name] = now
            elif now - self._used.setdefault((key, name), now) > FORGET_SECONDS:
                known.discard(name)
                del self._used[key, name]
        return {name for name in left if now - self._used.get((key, name), 0.0) < KEEP_SECONDS}

    def paths(self) -> list[str]:
        """Return the directories of the adapters on this host."""
        wanted = [adapter.path for adapters in self._wanted.values() for adapter in adapters]
        return [*wanted, *self._files.paths()]

    def are_missing(self, plan: Plan) -> bool:
        """Return whether an endpoint of ``plan`` lacks one of its adapters, whose files are here or are being
        fetched."""
        return any(
            adapter.revision not in {one.revision for one in entity.adapters}
            and not self._files.problem(adapter.content_hash)
            for endpoint in plan.endpoints
            for entity in endpoint.entities
            for adapter in self._wanted.get(endpoint.name, ())
        )

    def close(self) -> None:
        self._files.close()

    def planned(
        self, entity: DeployedEntity, status: EngineStatus, before: tuple[PlannedAdapter, ...]
    ) -> tuple[tuple[PlannedAdapter, ...], tuple[str, ...]]:
        """Return the adapters that workers may send requests for, and the names of those that they no longer may.

        While no replica is ready, adapters stay as ``before``. If no replica is wanted, all adapters are available: a
        replica that starts loads them before it takes requests. While an adapter is replaced, its name means the old
        one, for ``OLD_SECONDS`` at most.
        """
        wanted = self._wanted.get(entity.endpoint, ())
        found = []
        for adapter in wanted:
            name = adapter.engine_name
            owner = self._owner.get((entity.key, name), adapter)
            refusal = _refusal(status, owner) if _is_same(owner, adapter) else TAKEN
            if adapter.pinned and not owner.pinned:
                refusal = refusal or UNPINNED
            entry = PlannedAdapter(
                name=adapter.name,
                revision=adapter.revision,
                refusal=refusal,
                template=adapter.template,
                content_hash=adapter.content_hash,
            )
            has_files = bool(self._path(entity, adapter))
            if refusal or (has_files and _is_there(status, owner)) or (not status.ready and entry in before):
                found.append(entry)
            elif old := self._old(adapter, before):
                found.append(old)
        names = {adapter.engine_name for adapter in wanted}
        return tuple(found), tuple(sorted(name for name in self._known.get(entity.key, ()) if name not in names))

    def _old(self, adapter: DynamicAdapter, before: tuple[PlannedAdapter, ...]) -> PlannedAdapter | None:
        """Return what the name of ``adapter``, which is not there yet, means until then; None for nothing."""
        old = next((one for one in before if one.name == adapter.name and not one.refusal), None)
        if old is None or old.content_hash == adapter.content_hash:
            return old
        since = self._seen.get(adapter.revision, self._monotonic())
        return old if self._monotonic() - since < OLD_SECONDS else None

    def reports(self, plan: Plan, endpoint_id: str, loaded: Iterable[DynamicAdapter], *, is_adopted: bool) -> Reports:
        """Return for each of an endpoint's ``loaded`` adapters whether this server has it, by its name.

        ``is_adopted`` says whether all workers serve ``plan``.
        """
        entities = [entity for one in plan.endpoints if one.id == endpoint_id for entity in one.entities]
        reports = {}
        for adapter in loaded:
            key = (adapter.name, adapter.revision)
            there = [one for entity in entities for one in entity.adapters if (one.name, one.revision) == key]
            refusal = next((one.refusal for one in there if one.refusal), "")
            has = is_adopted and bool(entities) and len(there) == len(entities)
            state: AdapterProgress = "REFUSED" if refusal else "LOADED" if has else "LOADING"
            message = refusal or ("" if has else self._files.problem(adapter.content_hash))
            reports[adapter.name] = AdapterReport(
                revision=adapter.revision, state=state, message=message, content_hash=adapter.content_hash
            )
        return reports


def _is_same(owner: DynamicAdapter, adapter: DynamicAdapter) -> bool:
    """Return whether two adapters that an engine calls by the same name have the same files."""
    return owner.content_hash == adapter.content_hash and (bool(owner.content_hash) or owner.path == adapter.path)


def _refusal(status: EngineStatus, adapter: DynamicAdapter) -> str:
    for replica in status.replicas:
        revision, message = replica.refused_adapters.get(adapter.engine_name, ("", ""))
        if revision == adapter.revision:
            return message
    return ""


def _is_there(status: EngineStatus, adapter: DynamicAdapter) -> bool:
    if not status.wanted:
        return True
    have = [replica.adapters.get(adapter.engine_name) == adapter.revision for replica in status.ready]
    return bool(have) and all(have)
