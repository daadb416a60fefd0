"""What the server serves: endpoints by name, and how a caller's ``model`` finds one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..engine.interface import Engine
from ..errors import InvalidField, NotFound
from ..metering.authorization import ANONYMOUS, Caller
from ..modes import Mode
from ..request import Task
from ..settings import NAME, PrefixSharing
from ..tasks.endpoint import EndpointView
from .traffic import TrafficSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEntity:
    """One served entity of an ``endpoint``, with the engine that answers for it here.

    ``view`` is what validation knows of it, its tokenizer included. ``mode`` admits its requests; None admits all and
    keeps no ledger. ``created`` is Unix seconds. ``entity`` is the served model's name, in answers and metrics.
    ``prefix_sharing`` None is the server's own.
    """

    endpoint: str
    entity: str
    view: EndpointView
    engine: Engine
    mode: Mode | None = None
    created: int = 0
    prefix_sharing: PrefixSharing | None = None

    @property
    def version(self) -> str:
        """The model's, in the registry."""
        return self.view.version

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.engine.info.tasks

    def adapter_names(self) -> tuple[str, ...]:
        """Those known here (``AdapterPoller``): the engine itself, which may be away, is not asked."""
        return self.view.known_adapters()

    def entity_shown_to(self, caller: Caller) -> str:
        """The served model's name; a URI or path is shown to callers that manage alone, others see the endpoint's
        name."""
        return self.entity if caller.manages or NAME.fullmatch(self.entity) else self.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """An endpoint's served entities by name, and the traffic split that chooses among them (None: there is one).

    ``sticky``: a caller's requests stay with the entity that its API key falls to.
    """

    name: str
    entities: dict[str, ServedEntity]
    split: TrafficSplit | None = None
    sticky: bool = False

    def choose(self, sticky_key: str | None, caller: str | None) -> ServedEntity:
        """The served entity for the next request, by ``sticky_key`` or, where the endpoint is sticky, by ``caller``."""
        if self.split is None:
            return self.first
        if sticky_key is None and self.sticky and caller != ANONYMOUS.key_id:
            sticky_key = caller
        return self.entities[self.split.choose(sticky_key)]

    @property
    def first(self) -> ServedEntity:
        return next(iter(self.entities.values()))

    def of_version(self, version: str) -> ServedEntity:
        """The served entity whose model has this version in the registry. Raises ``NotFound``."""
        for entity in self.entities.values():
            if entity.version == version:
                return entity
        raise NotFound(
            f"endpoint {self.name} has no model of version {version[:80]!r}; it has {', '.join(self.versions)}",
            param="version",
        )

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of its models, each once."""
        return tuple(dict.fromkeys(entity.version for entity in self.entities.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """What a name in a request means: an endpoint, perhaps one of its entities, perhaps an adapter. ``called`` is the
    part of the name before the adapter."""

    endpoint: ServedEndpoint
    entity: ServedEntity | None = None
    adapter: str | None = None
    called: str = ""


class ServedEndpoints:
    """All endpoints that this worker serves. Names are unique; the order is the order of adding. Replaced as a
    whole."""

    def __init__(self, *entities: ServedEntity) -> None:
        self._by_name: dict[str, ServedEndpoint] = {}
        self._caller: Caller | None = None
        self.replace(
            tuple(ServedEndpoint(name=entity.endpoint, entities={entity.entity: entity}) for entity in entities)
        )

    def replace(self, served: tuple[ServedEndpoint, ...]) -> None:
        """Serve these instead: requests that come from now on find them."""
        self._by_name = {one.name: one for one in served}

    def seen_by(self, caller: Caller) -> ServedEndpoints:
        """Those that ``caller`` may know of, as they are now; in their errors there is no word of the others."""
        if caller.endpoints is None:
            return self
        seen = ServedEndpoints()
        seen._by_name = {name: served for name, served in self._by_name.items() if caller.may_see(name)}
        seen._caller = caller
        return seen

    def adapters_of(self, entity: ServedEntity) -> tuple[str, ...]:
        """The adapters of ``entity`` that are seen here."""
        names = entity.adapter_names()
        caller = self._caller
        if caller is None or caller.manages:
            return names
        return tuple(name for name in names if caller.may_use(entity.endpoint, name))

    def check_use(self, caller: Caller, entity: ServedEntity, adapter: str | None) -> None:
        """Raises ``NotFound`` where ``caller`` may not use ``entity`` with ``adapter``: as where there is none."""
        if caller.may_use(entity.endpoint, adapter):
            return
        has = ", ".join(name for name in entity.adapter_names() if caller.may_use(entity.endpoint, name)) or "none"
        if adapter is None:
            raise NotFound(f"endpoint {entity.endpoint} is there with an adapter only: {has}", param="model")
        raise NotFound(f"endpoint {entity.endpoint} has no adapter {adapter[:80]!r}; it has {has}", param="model")

    def __iter__(self) -> Iterator[ServedEntity]:
        """One of each endpoint: its first served entity."""
        return iter(tuple(served.first for served in self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def entities(self) -> Iterator[ServedEntity]:
        """Every served entity of every endpoint."""
        return iter(tuple(entity for served in self._by_name.values() for entity in served.entities.values()))

    def versions_of(self, endpoint: str) -> tuple[str, ...]:
        """The versions of an endpoint's models."""
        return self._by_name[endpoint].versions

    def route(
        self,
        called: str | None,
        model: str | None = None,
        *,
        version: str | None = None,
        sticky_key: str | None = None,
        caller: str | None = None,
    ) -> tuple[ServedEntity, str | None]:
        """The served entity and adapter that answer a request to ``called``: an endpoint, an entity, or
        ``endpoint:adapter``.

        None is the only endpoint there is. ``model``, of the body where the path names the endpoint, may say more of
        the same one: an entity, an adapter; ``version`` is its model's in the registry. An endpoint's traffic split
        chooses the entity, by ``sticky_key`` where it is given, by ``caller`` (a key's id) where the endpoint is
        sticky. Raises ``NotFound``, ``InvalidField``.
        """
        address = self._resolve(called)
        if model is not None and model not in (called, address.endpoint.name):
            address = self._narrow(address, called, model)
        address = _of_version(address, version)
        return self._checked(address, address.entity or address.endpoint.choose(sticky_key, caller))

    def find(self, called: str, version: str | None = None) -> tuple[ServedEntity, str | None]:
        """The served entity and adapter that ``called`` names, of an endpoint the first entity, or that of ``version``:
        no traffic is split.

        Raises ``NotFound``, ``InvalidField``.
        """
        address = _of_version(self._resolve(called), version)
        return self._checked(address, address.entity or address.endpoint.first)

    def meant_by(self, called: str | None) -> ServedEntity | None:
        """A served entity of the endpoint that ``called`` names; None where it names none."""
        try:
            address = self._resolve(called)
        except (NotFound, InvalidField):
            return None
        return address.entity or address.endpoint.first

    def _checked(self, address: _Address, entity: ServedEntity) -> tuple[ServedEntity, str | None]:
        if address.adapter is not None and address.adapter not in (names := self.adapters_of(entity)):
            has = ", ".join(names) or "none"
            raise NotFound(
                f"endpoint {address.called} has no adapter {address.adapter[:80]!r}; it has {has}", param="model"
            )
        return entity, address.adapter

    def _resolve(self, called: str | None) -> _Address:
        if called is None:
            return _Address(endpoint=self._only())
        if address := self._named(called):
            return address
        name, colon, adapter = called.rpartition(":")
        if colon and (address := self._named(name)):
            return replace(address, adapter=adapter, called=name)
        if address := self._with_adapter(called):
            return address
        raise NotFound(f"no endpoint is called {called[:80]!r}; there is {self._listed()}", param="model")

    def _with_adapter(self, name: str) -> _Address | None:
        """The one endpoint that has an adapter of that name."""
        found = [
            one for one in self._by_name.values() if any(name in self.adapters_of(e) for e in one.entities.values())
        ]
        if len(found) > 1:
            owners = " and ".join(f"{served.name}:{name}" for served in found)
            raise InvalidField("model", name, f"one of {owners}: several endpoints have an adapter of this name")
        return _Address(endpoint=found[0], adapter=name, called=found[0].name) if found else None

    def _narrow(self, address: _Address, called: str | None, model: str) -> _Address:
        """``address``, which is ``called`` in the path, as ``model`` of the body says more of it."""
        if entity := address.endpoint.entities.get(model):
            return replace(address, entity=entity)
        wanted = self._resolve(model)
        if wanted.endpoint is not address.endpoint or address.adapter not in (None, wanted.adapter):
            for one in (address, wanted):  # what is not there is not found, whatever the other says
                self._checked(one, one.entity or one.endpoint.first)
            raise InvalidField("model", model, f"{called}, as in the path")
        return wanted

    def _named(self, name: str) -> _Address | None:
        if served := self._by_name.get(name):
            return _Address(endpoint=served)
        found = [served for served in self._by_name.values() if name in served.entities]
        if len(found) > 1:
            owners = " and ".join(served.name for served in found)
            raise InvalidField("model", name, f"the name of an endpoint: {owners} have a served entity of this name")
        return _Address(endpoint=found[0], entity=found[0].entities[name]) if found else None

    def _only(self) -> ServedEndpoint:
        if len(self) != 1:
            raise NotFound(f"name an endpoint in model; there is {self._listed()}", param="model")
        return next(iter(self._by_name.values()))

    def _listed(self) -> str:
        return ", ".join(self._by_name) or "none"


def _of_version(address: _Address, version: str | None) -> _Address:
    """``address``, held to ``version``. Raises ``NotFound``."""
    if version is None or (address.entity is not None and address.entity.version == version):
        return address
    found = address.endpoint.of_version(version)
    if address.entity is not None:
        raise NotFound(f"{address.entity.entity} is of version {address.entity.version}", param="version")
    return replace(address, entity=found)
