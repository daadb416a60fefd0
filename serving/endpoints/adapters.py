"""Adapters that are loaded into an endpoint while it is served: rows in the store, which outlive the server.

Workers write the rows; the controller process makes its engines load the adapters (``supervision.adapter_sync``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import sqlalchemy as sa
from msgspec import Struct

from ..interface.errors import NotFound, RequestError
from ..metering.accounts.audit import Actor, record
from ..metering.store.store import Store
from ..metering.store.tables import endpoint_adapters
from .rows import find_row


class DynamicAdapter(Struct, frozen=True, kw_only=True):
    """A loaded adapter. ``uri`` is what was asked for, ``path`` the directory in peft's layout. Each load has its own
    ``revision``. Engines never evict a ``pinned`` adapter. ``template`` is the chat template that it has of its own; ""
    if its requests use the model's."""

    name: str
    uri: str
    path: str
    revision: str
    pinned: bool = False
    template: str = ""


class EndpointAdapters:
    """The dynamic adapters of all endpoints. Methods that take an ``endpoint`` raise ``NotFound`` if it is unknown.

    ``clock`` returns Unix seconds; ``changed()`` is called after each change."""

    def __init__(self, store: Store, clock: Callable[[], float], changed: Callable[[], None] = lambda: None) -> None:
        self._store, self._clock, self._changed = store, clock, changed

    def all(self) -> dict[str, tuple[DynamicAdapter, ...]]:
        """Return the adapters by endpoint; cheap enough to call many times a second."""
        query = sa.select(endpoint_adapters).order_by(endpoint_adapters.c.name, endpoint_adapters.c.adapter)
        found: dict[str, tuple[DynamicAdapter, ...]] = {}
        for row in self._store.read(lambda connection: connection.execute(query).all()):
            found[row.name] = (*found.get(row.name, ()), _adapter(row))
        return found

    def put(
        self,
        endpoint: str,
        name: str,
        uri: str,
        path: str,
        *,
        replace: bool,
        pinned: bool = False,
        template: str = "",
        by: Actor | None = None,
    ) -> tuple[DynamicAdapter, DynamicAdapter | None]:
        """Add an adapter; return it and the one that it replaces.

        Raises ``RequestError``, with vLLM's message, if there is one of this name and ``replace`` is False.
        """
        new = DynamicAdapter(
            name=name, uri=uri, path=path, revision=secrets.token_hex(16), pinned=pinned, template=template
        )

        def work(connection: sa.Connection) -> DynamicAdapter | None:
            find_row(connection, endpoint)
            old = _find(connection, endpoint, name)
            if old is not None and not replace:
                raise RequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    param="lora_name",
                )
            self._write(connection, endpoint, new)
            before = None if old is None else _audited(old)
            after = _audited(new)
            record(connection, by, "endpoint.load_adapter", f"{endpoint}:{name}", before=before, after=after)
            return old

        replaced = self._store.write(work)
        self._changed()
        return new, replaced

    def take_back(self, endpoint: str, new: DynamicAdapter, old: DynamicAdapter | None) -> None:
        """Undo the addition of ``new``, which the engines refuse, unless another one has replaced it by now."""

        def work(connection: sa.Connection) -> None:
            now = _find(connection, endpoint, new.name)
            if now is None or now.revision != new.revision:
                return
            connection.execute(sa.delete(endpoint_adapters).where(_is(endpoint, new.name)))
            if old is not None:
                self._write(connection, endpoint, old)

        self._store.write(work)
        self._changed()

    def remove(self, endpoint: str, name: str, *, by: Actor | None = None) -> None:
        """Remove an adapter. Raises ``NotFound`` with vLLM's message."""

        def work(connection: sa.Connection) -> None:
            find_row(connection, endpoint)
            old = _find(connection, endpoint, name)
            if old is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            connection.execute(sa.delete(endpoint_adapters).where(_is(endpoint, name)))
            record(connection, by, "endpoint.unload_adapter", f"{endpoint}:{name}", before={"uri": old.uri})

        self._store.write(work)
        self._changed()

    def _write(self, connection: sa.Connection, endpoint: str, adapter: DynamicAdapter) -> None:
        connection.execute(sa.delete(endpoint_adapters).where(_is(endpoint, adapter.name)))
        values = {
            "uri": adapter.uri,
            "path": adapter.path,
            "revision": adapter.revision,
            "pinned": adapter.pinned,
            "template": adapter.template,
        }
        now = int(self._clock() * 1000)
        row = {"name": endpoint, "adapter": adapter.name, "created_ms": now, **values}
        connection.execute(sa.insert(endpoint_adapters).values(**row))


def _is(endpoint: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(endpoint_adapters.c.name == endpoint, endpoint_adapters.c.adapter == name)


def _find(connection: sa.Connection, endpoint: str, name: str) -> DynamicAdapter | None:
    row = connection.execute(sa.select(endpoint_adapters).where(_is(endpoint, name))).one_or_none()
    return None if row is None else _adapter(row)


def _adapter(row: sa.Row) -> DynamicAdapter:
    return DynamicAdapter(
        name=row.adapter,
        uri=row.uri,
        path=row.path,
        revision=row.revision,
        pinned=bool(row.pinned),
        template=row.template,
    )


def _audited(adapter: DynamicAdapter) -> dict[str, object]:
    return {"uri": adapter.uri} | ({"pinned": True} if adapter.pinned else {})
