"""API keys: their tenant, scopes and endpoints, and their secrets.

A secret is ``sk-`` followed by 256 random bits, and the store holds its SHA-256. A fast hash is right for a secret of
full entropy: it cannot be guessed, so a slow hash would only slow down the server. A rotated key has a new secret under
its old id; its older secrets stay valid while they overlap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import Conflict, InvalidField, NotFound, PermissionDenied, Unauthenticated
from ...interface.settings import NAME
from ..store.store import Store
from ..store.tables import api_keys, old_secrets, tenants
from ..store.time_formats import NEVER, parse_duration, parse_expiry
from .audit import Actor, record
from .authorization import ANONYMOUS, SCOPES, Caller
from .limits import SHADOW, Bound, Limits

CACHE_SECONDS = 2.0
CACHE_SIZE = 10_000
OVERLAP = "24h"
MAX_ENDPOINTS = 100
MAX_WEIGHT = 1000
ALLOWED_ENDPOINT = re.compile(f"{NAME.pattern}(:[^:\\x00-\\x1f]{{1,128}})?")
ENDPOINTS_ALLOWED = f"1 to {MAX_ENDPOINTS} names of endpoints, or endpoint:adapter"
RESERVED = "under this name copies of requests are counted (shadow traffic)"

__all__ = ["ANONYMOUS", "SCOPES", "ApiKey", "Caller", "Keys"]


class ApiKey(Struct, frozen=True, kw_only=True):
    """A key without its secret; ``prefix`` is the beginning of the secret, to tell keys apart.

    ``endpoints`` None is all endpoints (see ``Caller``). ``overlap_ms`` is the time until which an older secret is
    accepted too. ``weight`` is its share of an engine relative to other tenants' keys.
    """

    key_id: str
    prefix: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_ms: int
    revoked_ms: int | None = None
    expires_ms: int | None = None
    endpoints: tuple[str, ...] | None = None
    overlap_ms: int | None = None
    weight: int = 1

    def state(self, now_ms: int) -> str:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "active"


class _Known(Struct, frozen=True):
    """The key that a secret belongs to, and the time until which the secret is accepted."""

    caller: Caller
    until_ms: int | None


class Keys:
    """The API keys of a store. Thread-safe.

    A change takes effect in every process within ``CACHE_SECONDS``; ``by`` is its author in the audit log.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[float, str, _Known | None]] = OrderedDict()

    def create(
        self,
        tenant: str,
        *,
        name: str = "",
        scopes: Iterable[str] = ("invoke",),
        expires: str = NEVER,
        endpoints: Iterable[str] | None = None,
        weight: int = 1,
        limits: Iterable[tuple[str, int | Bound]] = (),
        by: Actor | None = None,
    ) -> tuple[str, ApiKey]:
        """Create a key and return ``(secret, key)``. The secret is not stored and cannot be shown again.

        An unknown tenant is created. ``expires`` is as in ``time_formats.parse_expiry``; ``limits`` are (kind, value)
        pairs for the key. All of it is one transaction.
        """
        scopes, limits = tuple(scopes), tuple(limits)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= 128 or "\0" in tenant:
            raise InvalidField("tenant", tenant, "a name of 1 to 128 characters")
        if tenant == SHADOW:
            raise InvalidField("tenant", tenant, f"another name: {RESERVED}")
        now_ms = self.now_ms()
        secret = _new_secret()
        key = ApiKey(
            key_id="key_" + secrets.token_hex(8),
            prefix=secret[:10],
            tenant=tenant,
            name=_name(name),
            scopes=_scopes(scopes),
            created_ms=now_ms,
            expires_ms=parse_expiry("expires", expires, now_ms),
            endpoints=None if endpoints is None else _endpoints(endpoints),
            weight=_weight(weight),
        )

        def work(connection: sa.Connection) -> None:
            self._add(connection, secret, key)
            record(connection, by, "key.create", key.key_id, after=key)
            for kind, value in limits:
                Limits(self._store).put(connection, "key", key.key_id, kind, value, by=by)

        self._store.write(work)
        return secret, key

    def _add(self, connection: sa.Connection, secret: str, key: ApiKey) -> None:
        tenant = self._store.insert(tenants).values(tenant=key.tenant, created_ms=key.created_ms)
        connection.execute(tenant.on_conflict_do_nothing())
        row: dict[str, str | int | None] = {"key_id": key.key_id, "prefix": key.prefix, "tenant": key.tenant}
        row |= {"name": key.name, "scopes": " ".join(key.scopes), "created_ms": key.created_ms}
        row |= {"hash": _hashed(secret), "expires_ms": key.expires_ms, "endpoints": _listing(key.endpoints)}
        row["weight"] = key.weight
        connection.execute(sa.insert(api_keys).values(row))

    def list(self, tenant: str | None = None) -> tuple[ApiKey, ...]:
        query = sa.select(api_keys).order_by(api_keys.c.created_ms, api_keys.c.key_id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)

        def work(connection: sa.Connection) -> tuple[ApiKey, ...]:
            overlaps = _overlaps(connection, self.now_ms())
            return tuple(_listed(row, overlaps) for row in connection.execute(query).all())

        return self._store.read(work)

    def get(self, key: str) -> ApiKey:
        """Return a key. ``key`` is an id or a prefix, as in ``revoke``."""
        return self._store.read(lambda connection: self._found(connection, key))

    def update(
        self,
        key: str,
        *,
        name: str | None = None,
        scopes: Iterable[str] | None = None,
        expires: str | None = None,
        endpoints: Iterable[str] | None = None,
        weight: int | None = None,
        by: Actor | None = None,
    ) -> ApiKey:
        """Change the fields given. ``endpoints`` ("*",) is all. Raises ``NotFound``, ``InvalidField``, ``Conflict``."""
        values: dict[str, str | int | None] = {}
        if name is not None:
            values["name"] = _name(name)
        if scopes is not None:
            values["scopes"] = " ".join(_scopes(tuple(scopes)))
        if expires is not None:
            values["expires_ms"] = parse_expiry("expires", expires, self.now_ms())
        if endpoints is not None:
            values["endpoints"] = _listing(None if (given := tuple(endpoints)) == ("*",) else _endpoints(given))
        if weight is not None:
            values["weight"] = _weight(weight)
        if not values:
            raise InvalidField("key", key, "something to change: name, scopes, expires, endpoints, weight")

        def work(connection: sa.Connection) -> ApiKey:
            before = self._living(connection, key)
            connection.execute(sa.update(api_keys).where(api_keys.c.key_id == before.key_id).values(values))
            after = self._found(connection, before.key_id)
            record(connection, by, "key.update", before.key_id, before=before, after=after)
            return after

        return self._changed(work)

    def rotate(
        self, key: str, *, overlap: str = OVERLAP, expires: str | None = None, by: Actor | None = None
    ) -> tuple[str, ApiKey]:
        """Give a key a new secret and return ``(secret, key)``.

        Earlier secrets are accepted for another ``overlap``, but none longer than before. An expired key needs a new
        ``expires``. Raises the errors of ``update``.
        """
        now_ms = self.now_ms()
        until_ms = now_ms + parse_duration("overlap", overlap) * 1000
        expires_ms = None if expires is None else parse_expiry("expires", expires, now_ms)
        secret = _new_secret()

        def work(connection: sa.Connection) -> ApiKey:
            before = self._living(connection, key)
            if expires is None and before.state(now_ms) == "expired":
                raise Conflict(f"key {before.key_id} has expired; give a new expires with it")
            own, old = api_keys.c.key_id == before.key_id, old_secrets.c
            current = connection.execute(sa.select(api_keys.c.hash).where(own)).scalar_one()
            connection.execute(sa.delete(old_secrets).where(old.expires_ms <= now_ms))
            later = sa.and_(old.key_id == before.key_id, old.expires_ms > until_ms)
            connection.execute(sa.update(old_secrets).where(later).values(expires_ms=until_ms))
            # never longer than it was valid before
            end = until_ms if before.expires_ms is None else min(until_ms, before.expires_ms)
            if end > now_ms:
                row = {"hash": current, "key_id": before.key_id, "expires_ms": end}
                connection.execute(sa.insert(old_secrets).values(row))
            values: dict[str, str | int | None] = {"hash": _hashed(secret), "prefix": secret[:10]}
            if expires is not None:
                values["expires_ms"] = expires_ms
            connection.execute(sa.update(api_keys).where(own).values(values))
            after = self._found(connection, before.key_id)
            record(connection, by, "key.rotate", before.key_id, before=before, after=after)
            return after

        return secret, self._changed(work)

    def revoke(self, key: str, *, by: Actor | None = None) -> ApiKey:
        """Revoke a key with all its secrets. Revoking it again keeps the time of the first revocation.

        ``key`` is an id, or a prefix that only one key has. Raises ``NotFound``, or ``InvalidField`` for a prefix of
        several keys.
        """
        now_ms = self.now_ms()

        def work(connection: sa.Connection) -> ApiKey:
            before = self._found(connection, key)
            if before.revoked_ms is not None:
                return before
            own = api_keys.c.key_id == before.key_id
            connection.execute(sa.update(api_keys).where(own).values(revoked_ms=now_ms))
            connection.execute(sa.delete(old_secrets).where(old_secrets.c.key_id == before.key_id))
            after = self._found(connection, before.key_id)
            record(connection, by, "key.revoke", before.key_id, before=before, after=after)
            return after

        return self._changed(work)

    def _changed(self, work: Callable[[sa.Connection], ApiKey]) -> ApiKey:
        found = self._store.write(work)
        with self._lock:
            self._cache.clear()
        return found

    def _found(self, connection: sa.Connection, key: str) -> ApiKey:
        query = sa.select(api_keys).where(sa.or_(api_keys.c.key_id == key, api_keys.c.prefix == key))
        rows = connection.execute(query).all()
        if not rows:
            raise NotFound("there is no key of this id or prefix")
        if len(rows) > 1:
            raise InvalidField("key", key, "a key id: several keys begin like this")
        return _listed(rows[0], _overlaps(connection, self.now_ms()))

    def _living(self, connection: sa.Connection, key: str) -> ApiKey:
        found = self._found(connection, key)
        if found.revoked_ms is not None:
            raise Conflict(f"key {found.key_id} is revoked permanently; create another")
        return found

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def weights(self) -> dict[str, int]:
        """Return {key id: weight} for valid keys whose weight is not 1."""
        own = sa.select(api_keys.c.key_id, api_keys.c.weight).where(api_keys.c.weight != 1)
        own = own.where(api_keys.c.revoked_ms.is_(None))
        return self._store.read(lambda connection: dict(connection.execute(own).tuples().all()), timeout=2.0)

    def verify(self, secret: str | None, *, scope: str | None = "invoke") -> Caller:
        """Return the caller with this secret.

        Raises ``Unauthenticated``, or ``PermissionDenied`` if the caller lacks ``scope`` (None requires no scope).
        """
        if not secret or not secret.startswith("sk-") or len(secret) > 128:
            raise Unauthenticated("an API key is needed: Authorization: Bearer sk-…")
        known = self._known(_hashed(secret))
        if known is None:
            raise Unauthenticated("the API key is unknown or revoked")
        if known.until_ms is not None and known.until_ms <= self.now_ms():
            raise Unauthenticated("the API key has expired")
        known.caller.check_scope(scope)
        return known.caller

    def _known(self, digest: str) -> _Known | None:
        now = time.monotonic()
        with self._lock:
            cached = self._cache.get(digest)
        if cached is not None and now - cached[0] < CACHE_SECONDS and hmac.compare_digest(cached[1], digest):
            return cached[2]
        found = self._store.read(lambda connection: _whose(connection, digest), timeout=2.0)
        with self._lock:
            self._cache[digest] = (now, digest, found)
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return found


def check_tenant(tenant: str) -> None:
    """Raise ``PermissionDenied`` for a caller of the tenant under which copies of requests are counted.

    Its rows in the ledger could not be told from those of copies, whoever made its key or signed its token.
    """
    if tenant == SHADOW:
        raise PermissionDenied(f"the tenant {tenant!r} is not a caller's: {RESERVED}")


def _whose(connection: sa.Connection, digest: str) -> _Known | None:
    """Return the key whose current or older secret this is."""
    row = connection.execute(sa.select(api_keys).where(api_keys.c.hash == digest)).one_or_none()
    until_ms = None
    if row is None:
        older = connection.execute(sa.select(old_secrets).where(old_secrets.c.hash == digest)).one_or_none()
        if older is None or not hmac.compare_digest(older.hash, digest):
            return None
        until_ms = older.expires_ms
        row = connection.execute(sa.select(api_keys).where(api_keys.c.key_id == older.key_id)).one()
    elif not hmac.compare_digest(row.hash, digest):
        return None
    if row.revoked_ms is not None:
        return None
    until_ms = min((ms for ms in (until_ms, row.expires_ms) if ms is not None), default=None)
    key = _listed(row, {})
    caller = Caller(key_id=key.key_id, tenant=key.tenant, scopes=key.scopes, endpoints=key.endpoints, weight=key.weight)
    return _Known(caller, until_ms)


def _overlaps(connection: sa.Connection, now_ms: int) -> dict[str, int]:
    """Return {key id: time until which an older secret of it is accepted}."""
    query = sa.select(old_secrets.c.key_id, sa.func.max(old_secrets.c.expires_ms))
    query = query.where(old_secrets.c.expires_ms > now_ms).group_by(old_secrets.c.key_id)
    return {key_id: int(until) for key_id, until in connection.execute(query)}


def _new_secret() -> str:
    return "sk-" + secrets.token_urlsafe(32)


def _name(name: str) -> str:
    if not isinstance(name, str) or len(name) > 256 or "\0" in name:
        raise InvalidField("name", name, "a text of at most 256 characters")
    return name


def _weight(weight: int) -> int:
    if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= MAX_WEIGHT:
        raise InvalidField("weight", weight, f"an integer from 1 to {MAX_WEIGHT}")
    return weight


def _scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    if not scopes or set(scopes) - set(SCOPES):
        raise InvalidField("scopes", list(scopes), "one or more of " + ", ".join(SCOPES))
    return tuple(scope for scope in SCOPES if scope in scopes)


def _endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(endpoints))
    if not 1 <= len(found) <= MAX_ENDPOINTS:
        raise InvalidField("endpoints", list(found), ENDPOINTS_ALLOWED)
    for entry in found:
        if not isinstance(entry, str) or not ALLOWED_ENDPOINT.fullmatch(entry):
            raise InvalidField("endpoints", entry, ENDPOINTS_ALLOWED)
    return found


def _listing(endpoints: tuple[str, ...] | None) -> str | None:
    return None if endpoints is None else msgspec.json.encode(endpoints).decode()


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _listed(row: sa.Row, overlaps: dict[str, int]) -> ApiKey:
    names = ("key_id", "prefix", "tenant", "name", "created_ms", "revoked_ms", "expires_ms", "weight")
    endpoints = None if row.endpoints is None else msgspec.json.decode(row.endpoints, type=tuple[str, ...])
    return ApiKey(
        **{name: getattr(row, name) for name in names},
        scopes=tuple(row.scopes.split()),
        endpoints=endpoints,
        overlap_ms=overlaps.get(row.key_id),
    )
