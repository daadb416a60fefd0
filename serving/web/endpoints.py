"""What the server serves: endpoints by name, and how a caller's ``model`` finds one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..engine.interface import Engine
from ..errors import NotFound
from ..modes import Mode
from ..request import Task
from ..tasks.endpoint import EndpointView


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint as a worker sees it.

    ``view`` is what validation knows of it, its tokenizer included. ``mode`` admits its requests; None admits all and
    keeps no ledger. ``created`` is Unix seconds. ``entity`` is the served model's name, in answers and metrics.
    """

    name: str
    entity: str
    view: EndpointView
    engine: Engine
    mode: Mode | None = None
    created: int = 0

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.engine.info.tasks

    def adapter_names(self) -> tuple[str, ...]:
        return tuple(sorted(a.name for a in self.engine.adapters()))


class Endpoints:
    """A registry of endpoints. Names are unique; the order is the order of adding."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self._by_name = {endpoint.name: endpoint for endpoint in endpoints}

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, called: str | None) -> tuple[Endpoint, str | None]:
        """The endpoint and adapter that ``called`` names: an endpoint, its entity, or ``endpoint:adapter``.

        None is the only endpoint there is. Raises ``NotFound``.
        """
        if called is None:
            return self._only(), None
        if endpoint := self._named(called):
            return endpoint, None
        name, colon, adapter = called.rpartition(":")
        endpoint = self._named(name) if colon else None
        if endpoint is None:
            raise NotFound(f"no endpoint is called {called[:80]!r}; there is {self._listed()}", param="model")
        if adapter not in endpoint.adapter_names():
            has = ", ".join(endpoint.adapter_names()) or "none"
            raise NotFound(f"endpoint {name} has no adapter {adapter[:80]!r}; it has {has}", param="model")
        return endpoint, adapter

    def _named(self, name: str) -> Endpoint | None:
        return self._by_name.get(name) or next((e for e in self if e.entity == name), None)

    def _only(self) -> Endpoint:
        if len(self) != 1:
            raise NotFound(f"name an endpoint in model; there is {self._listed()}", param="model")
        return next(iter(self))

    def _listed(self) -> str:
        return ", ".join(self._by_name) or "none"
