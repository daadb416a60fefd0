"""The endpoints that the server serves, by name, and how the ``model`` of a request is resolved to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ..interface.engine import Engine, engine_name
from ..interface.errors import InvalidField, NotFound
from ..interface.guardrails import NO_GUARDRAILS, Guardrails
from ..interface.payload_log import PayloadLog
from ..interface.request import Task, ValidRequest
from ..interface.settings import NAME, PrefixSharing
from ..interface.shadow import Shadow
from ..metering.accounts.authorization import ANONYMOUS, Caller
from ..model_files.model_version import UNKNOWN, ModelVersion
from ..modes import Mode
from ..tasks.prompt.endpoint import EndpointView
from .model_aliases import ModelAliases
from .traffic import TrafficSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEntity:
    """One served entity of an ``endpoint``, with the engine that runs its requests for this worker.

    ``view`` has what validation needs to know, including the tokenizer. ``mode`` admits requests; None admits all and
    keeps no ledger. ``created`` is in Unix seconds. ``entity`` is the served model's name in responses and metrics,
    ``identity`` says which model that is, in which version.
    A ``prefix_sharing`` of None means the server's setting; without ``payload_log`` no text is kept. ``shadows`` are
    the entities that get copies of its requests, each as its ``shadow`` says; requests cannot name them. ``contents``
    has the hashes of adapters that were loaded at run time, by their names. ``is_label`` says that the name was made
    of what a command line asked for.
    """

    endpoint: str
    entity: str
    view: EndpointView
    engine: Engine
    mode: Mode | None = None
    created: int = 0
    prefix_sharing: PrefixSharing | None = None
    payload_log: PayloadLog | None = None
    guardrails: Guardrails = NO_GUARDRAILS
    identity: ModelVersion = UNKNOWN
    shadow: Shadow | None = None
    shadows: tuple[ServedEntity, ...] = ()
    contents: Mapping[str, str] = field(default_factory=dict)
    is_label: bool = False

    def adapter_hash(self, adapter: str | None) -> str:
        """Return the hash of an adapter's content; "" for none, and for one that came with the model."""
        return self.contents.get(adapter, "") if adapter is not None else ""

    def for_engine(self, valid: ValidRequest) -> ValidRequest:
        """Return ``valid`` with its adapter as the engine calls it: exactly the content that is known here."""
        content_hash = self.adapter_hash(valid.adapter)
        if valid.adapter is None or not content_hash:
            return valid
        return msgspec.structs.replace(valid, adapter=engine_name(valid.adapter, content_hash))

    @property
    def version(self) -> str:
        """The model's version in the registry."""
        return self.view.version

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.engine.info.tasks

    def adapter_names(self) -> tuple[str, ...]:
        """Return the adapter names known here (``AdapterPoller``), without asking the engine, which may be away."""
        return self.view.known_adapters()

    def entity_shown_to(self, caller: Caller) -> str:
        """Return the served model's name as ``caller`` may see it.

        If the name is a URI or path, or was made of one, only callers with the scope ``manage`` see it; others see the
        endpoint's name.
        """
        is_open = not self.is_label and NAME.fullmatch(self.entity)
        return self.entity if caller.manages or is_open else self.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """An endpoint's served entities by name, and the traffic split that chooses among them (None: only one entity).

    If ``sticky``, all requests of an API key go to the same entity.
    """

    name: str
    entities: dict[str, ServedEntity]
    split: TrafficSplit | None = None
    sticky: bool = False

    def choose(self, sticky_key: str | None, caller: str | None) -> ServedEntity:
        """Choose the entity for the next request, by ``sticky_key`` or, if the endpoint is sticky, by ``caller``."""
        if self.split is None:
            return self.first
        if sticky_key is None and self.sticky and caller != ANONYMOUS.key_id:
            sticky_key = caller
        return self.entities[self.split.choose(sticky_key)]

    def called(self, name: str) -> ServedEntity | None:
        """Return the entity of this name, or the one that a command line asked for by it; None if there is none."""
        if (found := self.entities.get(name)) is not None:
            return found
        return next((one for one in self.entities.values() if name and one.identity.asked == name), None)

    @property
    def first(self) -> ServedEntity:
        return next(iter(self.entities.values()))

    def of_version(self, version: str) -> ServedEntity:
        """Return the served entity whose model has this version in the registry. Raises ``NotFound``."""
        for entity in self.entities.values():
            if entity.version == version:
                return entity
        raise NotFound(
            f"endpoint {self.name} has no model of version {version[:80]!r}; it has {', '.join(self.versions)}",
            param="version",
        )

    @property
    def versions(self) -> tuple[str, ...]:
        """The distinct versions of the endpoint's models."""
        return tuple(dict.fromkeys(entity.version for entity in self.entities.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The target that a request names: an endpoint, and optionally one of its entities and an adapter. ``called`` is
    the part of the name before the adapter."""

    endpoint: ServedEndpoint
    entity: ServedEntity | None = None
    adapter: str | None = None
    called: str = ""


class ServedEndpoints:
    """All endpoints that this worker serves, in the order in which they were added. Names are unique, and ``replace``
    replaces all endpoints at once. ``aliases`` has further names for them; a real name always comes first."""

    def __init__(self, *entities: ServedEntity) -> None:
        self._by_name: dict[str, ServedEndpoint] = {}
        self._caller: Caller | None = None
        self.aliases = ModelAliases()
        self.replace(
            tuple(ServedEndpoint(name=entity.endpoint, entities={entity.entity: entity}) for entity in entities)
        )

    def replace(self, served: tuple[ServedEndpoint, ...]) -> None:
        """Serve these endpoints instead, for requests that arrive from now on."""
        self._by_name = {one.name: one for one in served}

    def seen_by(self, caller: Caller) -> ServedEndpoints:
        """Return the current endpoints that ``caller`` may see. Error messages of the result never mention others."""
        if caller.endpoints is None:
            return self
        seen = ServedEndpoints()
        seen._by_name = {name: served for name, served in self._by_name.items() if caller.may_see(name)}
        seen._caller, seen.aliases = caller, self.aliases
        return seen

    def adapters_of(self, entity: ServedEntity) -> tuple[str, ...]:
        """Return the names of the adapters of ``entity`` that the caller of ``seen_by`` may use."""
        names = entity.adapter_names()
        caller = self._caller
        if caller is None or caller.manages:
            return names
        return tuple(name for name in names if caller.may_use(entity.endpoint, name))

    def check_use(self, caller: Caller, entity: ServedEntity, adapter: str | None) -> None:
        """Raise ``NotFound`` if ``caller`` may not use ``entity`` with ``adapter``, as if it did not exist."""
        if caller.may_use(entity.endpoint, adapter):
            return
        has = ", ".join(name for name in entity.adapter_names() if caller.may_use(entity.endpoint, name)) or "none"
        if adapter is None:
            raise NotFound(f"endpoint {entity.endpoint} can be used with an adapter only: {has}", param="model")
        raise NotFound(f"endpoint {entity.endpoint} has no adapter {adapter[:80]!r}; it has {has}", param="model")

    def __iter__(self) -> Iterator[ServedEntity]:
        """Iterate over the first served entity of each endpoint."""
        return iter(tuple(served.first for served in self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def entities(self) -> Iterator[ServedEntity]:
        """Iterate over every served entity of every endpoint."""
        return iter(tuple(entity for served in self._by_name.values() for entity in served.entities.values()))

    def versions_of(self, endpoint: str) -> tuple[str, ...]:
        """Return the versions of an endpoint's models."""
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
        """Return the served entity and adapter for a request to ``called``.

        ``called`` names an endpoint, an entity, an adapter, ``endpoint:adapter`` or an alias of one; None means the
        default endpoint, or the only one. If
        the path names the endpoint, ``model`` of the body may select one of its entities or adapters. ``version`` is
        the model's version in the registry. The endpoint's traffic split chooses the entity, by ``sticky_key`` if it is
        given, or by ``caller`` (a key's id) if the endpoint is sticky. Raises ``NotFound`` and ``InvalidField``.
        """
        address = self._resolve(called)
        if model is not None and model not in (called, address.endpoint.name):
            address = self._narrow(address, called, model)
        address = _of_version(address, version)
        return self._checked(address, address.entity or address.endpoint.choose(sticky_key, caller))

    def find(self, called: str, version: str | None = None) -> tuple[ServedEntity, str | None]:
        """Return the served entity and adapter that ``called`` names, without using the traffic split.

        If ``called`` names an endpoint, this is its first entity, or the one of ``version``. Raises ``NotFound`` and
        ``InvalidField``.
        """
        address = _of_version(self._resolve(called), version)
        return self._checked(address, address.entity or address.endpoint.first)

    def meant_by(self, called: str | None) -> ServedEntity | None:
        """Return a served entity of the endpoint that ``called`` names, or None if it names no endpoint."""
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
            default = self._named(self.aliases.default) if self.aliases.default is not None else None
            return default or _Address(endpoint=self._only())
        if address := self._known(called):
            return address
        target = self.aliases.meant_by(called)
        if target is not None and (address := self._known(target)):
            return address
        raise NotFound(f"no endpoint is called {called[:80]!r}; there is {self._listed()}", param="model")

    def _known(self, called: str) -> _Address | None:
        """Return what ``called`` names without aliases, or None."""
        if address := self._named(called):
            is_label = address.entity is not None and address.entity.is_label  # names that somebody gave come first
            return (self._with_adapter(called) if is_label else None) or address
        name, colon, adapter = called.rpartition(":")
        if colon and (address := self._named(name)):
            return replace(address, adapter=adapter, called=name)
        return self._with_adapter(called)

    def _with_adapter(self, name: str) -> _Address | None:
        """Find the one endpoint that has an adapter of this name. Raises ``InvalidField`` if there are several."""
        found = [
            one for one in self._by_name.values() if any(name in self.adapters_of(e) for e in one.entities.values())
        ]
        if len(found) > 1:
            owners = " and ".join(f"{served.name}:{name}" for served in found)
            raise InvalidField("model", name, f"one of {owners}: several endpoints have an adapter of this name")
        return _Address(endpoint=found[0], adapter=name, called=found[0].name) if found else None

    def _narrow(self, address: _Address, called: str | None, model: str) -> _Address:
        """Narrow ``address``, which the path names as ``called``, to what the body's ``model`` names."""
        entity = address.endpoint.called(model)
        if entity is not None and not (entity.is_label and model in self.adapters_of(entity)):
            return replace(address, entity=entity)
        wanted = self._resolve(model)
        if wanted.endpoint is not address.endpoint or address.adapter not in (None, wanted.adapter):
            for one in (address, wanted):  # a name that does not exist is a 404, even if the names also disagree
                self._checked(one, one.entity or one.endpoint.first)
            raise InvalidField("model", model, f"{called}, as in the path")
        return wanted

    def _named(self, name: str) -> _Address | None:
        if served := self._by_name.get(name):
            return _Address(endpoint=served)
        found = [(served, entity) for served in self._by_name.values() if (entity := served.called(name)) is not None]
        if len(found) > 1:
            owners = " and ".join(served.name for served, _ in found)
            raise InvalidField("model", name, f"the name of an endpoint: {owners} have a served entity of this name")
        return _Address(endpoint=found[0][0], entity=found[0][1]) if found else None

    def _only(self) -> ServedEndpoint:
        if len(self) != 1:
            raise NotFound(f"name an endpoint in model; there is {self._listed()}", param="model")
        return next(iter(self._by_name.values()))

    def _listed(self) -> str:
        return ", ".join(self._by_name) or "none"


def _of_version(address: _Address, version: str | None) -> _Address:
    """Narrow ``address`` to the entity whose model has ``version``. Raises ``NotFound``."""
    if version is None or (address.entity is not None and address.entity.version == version):
        return address
    found = address.endpoint.of_version(version)
    if address.entity is not None:
        raise NotFound(f"{address.entity.entity} is of version {address.entity.version}", param="version")
    return replace(address, entity=found)
