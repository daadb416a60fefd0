"""Wanted and loaded adapters of the engines of served entities, in addition to their models' own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..endpoints.adapters import DynamicAdapter
from ..endpoints.gateways import AdapterProgress, AdapterReport
from ..interface.errors import NotFound
from ..supervision.adapter_sync import WantedAdapter, WantedAdapters
from ..supervision.supervisor import EngineStatus, Supervisor
from .deployed import DeployedEndpoint, DeployedEntity
from .plan import Plan, PlannedAdapter

Loaded = Mapping[str, tuple[DynamicAdapter, ...]]
"""The adapters of each endpoint, by its name, as the store has them."""
UNPINNED = "an endpoint that shares its engine has this adapter, and not pinned"
TAKEN = "an endpoint that shares its engine has another adapter of this name"


class EngineAdapters:
    """The dynamic adapters of all engines. Owned by the reconciler's thread.

    ``plan`` is the plan of an earlier controller process, whose engines may still run.
    """

    def __init__(self, plan: Plan) -> None:
        self._known: dict[str, set[str]] = {}  # by engine key: the names that the engine may have
        self._wanted: Loaded = {}
        self._owner: dict[tuple[str, str], DynamicAdapter] = {}  # by engine key and adapter name
        for endpoint in plan.endpoints:
            for entity in endpoint.entities:
                names = {*(adapter.name for adapter in entity.adapters), *entity.withdrawn}
                self._known.setdefault(entity.key, set()).update(names)

    def want(self, wanted: Loaded, deployed: Iterable[DeployedEndpoint], supervisor: Supervisor) -> None:
        """Tell the engines of ``deployed`` which adapters they should have."""
        self._wanted, self._owner = wanted, {}
        keys: dict[str, dict[str, WantedAdapter]] = {}
        for endpoint in sorted(deployed, key=lambda one: one.name):
            for entity in endpoint.entities:
                of_engine = keys.setdefault(entity.key, {})
                for adapter in wanted.get(endpoint.name, ()):
                    if self._owner.setdefault((entity.key, adapter.name), adapter).path == adapter.path:
                        wanted_one = WantedAdapter(path=adapter.path, revision=adapter.revision, pinned=adapter.pinned)
                        of_engine.setdefault(adapter.name, wanted_one)
        for key, adapters in keys.items():
            known = self._known.setdefault(key, set())
            known.update(adapters)
            try:
                withdrawn = frozenset(known - adapters.keys())
                supervisor.set_adapters(key, WantedAdapters(adapters=adapters, withdrawn=withdrawn))
            except NotFound:
                continue  # the engine has just been removed

    def paths(self) -> list[str]:
        """Return the directories of the wanted adapters."""
        return [adapter.path for adapters in self._wanted.values() for adapter in adapters]

    def planned(
        self, entity: DeployedEntity, status: EngineStatus, before: tuple[PlannedAdapter, ...]
    ) -> tuple[tuple[PlannedAdapter, ...], tuple[str, ...]]:
        """Return the adapters that workers may send requests for, and the names of those that they no longer may.

        While no replica is ready, adapters stay as ``before``. If no replica is wanted, all adapters are available: a
        replica that starts loads them before it takes requests.
        """
        wanted = self._wanted.get(entity.endpoint, ())
        found = []
        for adapter in wanted:
            owner = self._owner.get((entity.key, adapter.name), adapter)
            refusal = TAKEN if owner.path != adapter.path else _refusal(status, owner)
            if adapter.pinned and not owner.pinned:
                refusal = refusal or UNPINNED
            entry = PlannedAdapter(
                name=adapter.name, revision=adapter.revision, refusal=refusal, template=adapter.template
            )
            if refusal or _is_there(status, owner) or (not status.ready and entry in before):
                found.append(entry)
            elif old := next((one for one in before if one.name == adapter.name and not one.refusal), None):
                found.append(old)  # it is being replaced: until then the name means the old adapter
        names = {adapter.name for adapter in wanted}
        return tuple(found), tuple(sorted(self._known.get(entity.key, set()) - names))


def _refusal(status: EngineStatus, adapter: DynamicAdapter) -> str:
    for replica in status.replicas:
        revision, message = replica.refused_adapters.get(adapter.name, ("", ""))
        if revision == adapter.revision:
            return message
    return ""


def _is_there(status: EngineStatus, adapter: DynamicAdapter) -> bool:
    if not status.wanted:
        return True
    have = [replica.adapters.get(adapter.name) == adapter.revision for replica in status.ready]
    return bool(have) and all(have)


def adapter_reports(
    plan: Plan, endpoint_id: str, loaded: Iterable[DynamicAdapter], *, is_adopted: bool
) -> dict[str, AdapterReport]:
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
        reports[adapter.name] = AdapterReport(revision=adapter.revision, state=state, message=refusal)
    return reports
