"""Which adapters the engines of served entities are to have beside their models' own, and which they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..endpoints.adapters import DynamicAdapter
from ..errors import NotFound
from ..supervision.adapter_sync import WantedAdapter, WantedAdapters
from ..supervision.supervisor import EngineStatus, Supervisor
from .deployed import DeployedEndpoint, DeployedEntity
from .plan import Plan, PlannedAdapter

Loaded = Mapping[str, tuple[DynamicAdapter, ...]]
"""By endpoint, as the store has them."""
UNPINNED = "an endpoint that shares its engine has this adapter, and not pinned"
TAKEN = "an endpoint that shares its engine has another adapter of this name"


class EngineAdapters:
    """Owned by the reconciler's thread. ``plan``: of a controller process that ended, whose engines may run on."""

    def __init__(self, plan: Plan) -> None:
        self._known: dict[str, set[str]] = {}  # names that an engine may have, by its key
        self._wanted: Loaded = {}
        self._owner: dict[tuple[str, str], DynamicAdapter] = {}  # by engine and name
        for endpoint in plan.endpoints:
            for entity in endpoint.entities:
                names = {*(adapter.name for adapter in entity.adapters), *entity.withdrawn}
                self._known.setdefault(entity.key, set()).update(names)

    def want(self, wanted: Loaded, deployed: Iterable[DeployedEndpoint], supervisor: Supervisor) -> None:
        """Tell the engines of ``deployed`` what they are to have."""
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
                continue  # it has just been removed

    def planned(
        self, entity: DeployedEntity, status: EngineStatus, before: tuple[PlannedAdapter, ...]
    ) -> tuple[tuple[PlannedAdapter, ...], tuple[str, ...]]:
        """What workers may send requests for, and what no more. While no replica is ready it is as ``before``, and
        where none is wanted, everything: one that is started has them first."""
        wanted = self._wanted.get(entity.endpoint, ())
        found = []
        for adapter in wanted:
            owner = self._owner.get((entity.key, adapter.name), adapter)
            refusal = TAKEN if owner.path != adapter.path else _refusal(status, owner)
            if adapter.pinned and not owner.pinned:
                refusal = refusal or UNPINNED
            entry = PlannedAdapter(name=adapter.name, revision=adapter.revision, refusal=refusal)
            if refusal or _is_there(status, owner) or (not status.ready and entry in before):
                found.append(entry)
            elif old := next((one for one in before if one.name == adapter.name and not one.refusal), None):
                found.append(old)  # it is being replaced: until then the name means what it did
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
