"""API keys: who calls, for which tenant, and what they may do.

A secret is ``sk-`` and 256 random bits; the store holds its SHA-256. That is right for a secret of full entropy: there
is nothing to guess, so a slow hash would only slow the server down.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import sqlalchemy as sa
from msgspec import Struct

from ..errors import InvalidField, NotFound, PermissionDenied, Unauthenticated
from .store import Store
from .tables import api_keys, tenants

SCOPES = ("invoke", "manage", "usage")
CACHE_SECONDS = 2.0
CACHE_SIZE = 10_000


class Caller(Struct, frozen=True, kw_only=True):
    """The authenticated caller of a request."""

    key_id: str
    tenant: str
    scopes: tuple[str, ...] = SCOPES


ANONYMOUS = Caller(key_id="anonymous", tenant="default")
"""The caller where a server runs without keys; metered like any other."""


class ApiKey(Struct, frozen=True, kw_only=True):
    """A key as it is listed: never its secret. ``prefix`` is the start of the secret, to tell keys apart."""

    key_id: str
    prefix: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_ms: int
    revoked_ms: int | None = None


class Keys:
    """Create, list, revoke and verify keys. A revoked key is refused within ``CACHE_SECONDS`` by every process."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[float, str, Caller | None]] = OrderedDict()

    def create(self, tenant: str, *, name: str = "", scopes: Iterable[str] = ("invoke",)) -> tuple[str, ApiKey]:
        """(secret, key). The secret is not stored and cannot be shown again. The tenant is made if it is new."""
        scopes = tuple(scopes)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= 128:
            raise InvalidField("tenant", tenant, "a name of 1 to 128 characters")
        if not isinstance(name, str) or len(name) > 256:
            raise InvalidField("name", name, "a text of at most 256 characters")
        if not scopes or set(scopes) - set(SCOPES):
            raise InvalidField("scopes", list(scopes), "one or more of " + ", ".join(SCOPES))
        secret = "sk-" + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id="key_" + secrets.token_hex(8),
            prefix=secret[:10],
            tenant=tenant,
            name=name,
            scopes=scopes,
            created_ms=int(self._clock() * 1000),
        )
        self._store.write(lambda connection: self._add(connection, secret, key))
        return secret, key

    def _add(self, connection: sa.Connection, secret: str, key: ApiKey) -> None:
        tenant = self._store.insert(tenants).values(tenant=key.tenant, created_ms=key.created_ms)
        connection.execute(tenant.on_conflict_do_nothing())
        row: dict[str, str | int] = {"key_id": key.key_id, "prefix": key.prefix, "tenant": key.tenant, "name": key.name}
        row |= {"scopes": " ".join(key.scopes), "created_ms": key.created_ms, "hash": _hashed(secret)}
        connection.execute(sa.insert(api_keys).values(row))

    def list(self, tenant: str | None = None) -> tuple[ApiKey, ...]:
        query = sa.select(api_keys).order_by(api_keys.c.created_ms, api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return tuple(_listed(row) for row in rows)

    def revoke(self, key: str) -> ApiKey:
        """``key`` is a key id or a prefix that only one key has. Revoking twice keeps the first time.

        Raises ``NotFound``, or ``InvalidField`` for a prefix of several keys.
        """
        now_ms = int(self._clock() * 1000)

        def work(connection: sa.Connection) -> ApiKey:
            query = sa.select(api_keys).where(sa.or_(api_keys.c.key_id == key, api_keys.c.prefix == key))
            rows = connection.execute(query).all()
            if not rows:
                raise NotFound("there is no key of this id or prefix")
            if len(rows) > 1:
                raise InvalidField("key", key, "a key id: several keys begin like this")
            update = sa.update(api_keys).where(api_keys.c.key_id == rows[0].key_id, api_keys.c.revoked_ms.is_(None))
            connection.execute(update.values(revoked_ms=now_ms))
            return _listed(connection.execute(query).one())

        revoked = self._store.write(work)
        with self._lock:
            self._cache.clear()
        return revoked

    def verify(self, secret: str | None, *, scope: str | None = "invoke") -> Caller:
        """The caller behind a secret. Raises ``Unauthenticated``, or ``PermissionDenied`` without ``scope``.

        ``scope`` None: whatever the key may do.
        """
        if not secret or not secret.startswith("sk-") or len(secret) > 128:
            raise Unauthenticated("an API key is needed: Authorization: Bearer sk-…")
        caller = self._caller(_hashed(secret))
        if caller is None:
            raise Unauthenticated("the API key is unknown or revoked")
        if scope is not None and scope not in caller.scopes:
            raise PermissionDenied(f"the API key lacks the scope {scope!r}")
        return caller

    def _caller(self, digest: str) -> Caller | None:
        now = time.monotonic()
        with self._lock:
            known = self._cache.get(digest)
        if known is not None and now - known[0] < CACHE_SECONDS and hmac.compare_digest(known[1], digest):
            return known[2]
        query = sa.select(api_keys).where(api_keys.c.hash == digest)
        row = self._store.read(lambda connection: connection.execute(query).one_or_none(), timeout=2.0)
        caller = None
        if row is not None and hmac.compare_digest(row.hash, digest) and row.revoked_ms is None:
            caller = Caller(key_id=row.key_id, tenant=row.tenant, scopes=tuple(row.scopes.split()))
        with self._lock:
            self._cache[digest] = (now, digest, caller)
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return caller


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _listed(row: sa.Row) -> ApiKey:
    fields = {name: getattr(row, name) for name in ("key_id", "prefix", "tenant", "name", "created_ms", "revoked_ms")}
    return ApiKey(**fields, scopes=tuple(row.scopes.split()))
