"""Adapters that are loaded into an endpoint while it is served: rows in the store, which outlive the server.

Workers write the rows; the controller process makes its engines load the adapters (``supervision.adapter_sync``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import sqlalchemy as sa
from msgspec import Struct

from ..interface.engine import engine_name
from ..interface.errors import NotFound, RequestError
from ..metering.accounts.audit import Actor, record
from ..metering.store.store import Store
from ..metering.store.tables import endpoint_adapters
from .adapter_contents import AdapterContents, touch
from .rows import find_row


class ContentGone(LookupError):
    """The store has no content of this hash."""


class DynamicAdapter(Struct, frozen=True, kw_only=True):
    """A loaded adapter. ``uri`` is what was asked for, ``path`` the directory in peft's layout. Each load has its own
    ``revision``. Engines never evict a ``pinned`` adapter. ``template`` is the chat template that it has of its own; ""
    if its requests use the model's. ``content_hash`` is the hash of its files, which hosts fetch from the store
    (``AdapterContents``); "" for one that an earlier release has loaded, which is read from ``path`` on every host."""

    name: str
    uri: str
    path: str
    revision: str
    pinned: bool = False
    template: str = ""
    content_hash: str = ""

    @property
    def engine_name(self) -> str:
        """The name that engines have for it."""
        return engine_name(self.name, self.content_hash)


class EndpointAdapters:
    """The dynamic adapters of all endpoints. Methods that take an ``endpoint`` raise ``NotFound`` if it is unknown.

    ``clock`` returns Unix seconds; ``changed()`` is called after each change."""

    def __init__(self, store: Store, clock: Callable[[], float], changed: Callable[[], None] = lambda: None) -> None:
        self._store, self._clock, self._changed = store, clock, changed
        self.contents = AdapterContents(store, clock)

    def all(self) -> dict[str, tuple[DynamicAdapter, ...]]:
        """Return the adapters by endpoint; cheap enough to call many times a second."""
        query = sa.select(endpoint_adapters).order_by(endpoint_adapters.c.name, endpoint_adapters.c.adapter)
        found: dict[str, tuple[DynamicAdapter, ...]] = {}
        for row in self._store.read(lambda connection: connection.execute(query).all()):
            found[row.name] = (*found.get(row.name, ()), _adapter(row))
        return found

    def get(self, endpoint: str, name: str) -> DynamicAdapter | None:
        """Return the adapter of this name, None if the endpoint has none."""
        return self._store.read(lambda connection: _find(connection, endpoint, name))

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
        content_hash: str = "",
        by: Actor | None = None,
    ) -> tuple[DynamicAdapter, DynamicAdapter | None]:
        """Add an adapter; return it and the one that it replaces.

        Raises ``RequestError``, with vLLM's message, if there is one of this name and ``replace`` is False, and
        ``ContentGone`` if the store does not have its content (any more).
        """
        new = DynamicAdapter(
            name=name,
            uri=uri,
            path=path,
            revision=secrets.token_hex(16),
            pinned=pinned,
            template=template,
            content_hash=content_hash,
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
            if content_hash and not touch(connection, content_hash, self._now_ms()):
                raise ContentGone(content_hash)
            if old is not None:
                touch(connection, old.content_hash, self._now_ms())  # for ``take_back``
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
            touch(connection, old.content_hash, self._now_ms())
            record(connection, by, "endpoint.unload_adapter", f"{endpoint}:{name}", before=_audited(old))

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
            "content_hash": adapter.content_hash,
        }
        row = {"name": endpoint, "adapter": adapter.name, "created_ms": self._now_ms(), **values}
        connection.execute(sa.insert(endpoint_adapters).values(**row))

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


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
        content_hash=row.content_hash,
    )


def _audited(adapter: DynamicAdapter) -> dict[str, object]:
    hashed = {"content_hash": adapter.content_hash} if adapter.content_hash else {}
    return {"uri": adapter.uri} | hashed | ({"pinned": True} if adapter.pinned else {})
