"""Keys, limits, prices and the audit log in the form of the management API: JSON objects in and out.

The server's management API and the commands that work on a database share this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from ...interface.errors import InvalidField, NotFound
from ...model_files.entity_names import label_of
from ...model_files.model_version import ModelVersion
from ..store.store import Store
from ..store.tables import endpoint_configs, endpoints, tenants
from ..store.time_formats import NEVER, parse_timestamp
from .audit import ACTIONS, MAX_PAGE, Actor, Audit, AuditFilter
from .authorization import ANONYMOUS
from .bodies import (
    AUDIT_QUERY,
    KEY_CHANGES,
    KEYS_QUERY,
    LIMIT_QUERY,
    LIMITS_QUERY,
    NEW_CURRENCY,
    NEW_KEY,
    NEW_LIMITS,
    NEW_PRICE,
    PRICE_QUERY,
    PRICES_QUERY,
    ROTATION,
)
from .keys import OVERLAP, RESERVED, ApiKey, Keys
from .limits import SCOPES, SHADOW, Bound, Limit, Limits, plain
from .money import Price, currency, micro_units, set_currency
from .prices import ANY, Prices
from .prices import plain as plain_price
from .windows import BUDGETS, KINDS, UNITS, Kind

Body = Mapping[str, Any]
Query = Mapping[str, str]
TOKEN_PREFIX = "jwt:"  # for callers identified by a token instead of a key of the store


class Accounts:
    """The management API's operations on a store. ``by`` is the author of changes; methods raise ``ServingError``."""

    def __init__(self, store: Store, *, by: Actor | None = None, keys: Keys | None = None) -> None:
        self._store, self._by = store, by
        self._keys = keys or Keys(store)

    # keys

    def create_key(self, body: Body) -> dict[str, Any]:
        given = NEW_KEY(body, "")
        notes = self._check_endpoints(given)  # before the key is created: a store that fails now loses no secret
        secret, key = self._keys.create(
            given["tenant"],
            name=given.get("name", ""),
            scopes=given.get("scopes", ("invoke",)),
            expires=given.get("expires", NEVER),
            endpoints=_endpoints(given),
            weight=given.get("weight", 1),
            limits=[(kind, _bound(kind, **bound)) for kind, bound in given.get("limits", {}).items()],
            by=self._by,
        )
        return {"secret": secret, "key": self._key(key), "notes": notes}

    def list_keys(self, query: Query) -> dict[str, Any]:
        asked = _known(query, KEYS_QUERY)
        return {"keys": [self._key(key) for key in self._keys.list(asked.get("tenant"))]}

    def get_key(self, key: str) -> dict[str, Any]:
        return {"key": self._key(self._keys.get(key))}

    def update_key(self, key: str, body: Body) -> dict[str, Any]:
        given = KEY_CHANGES(body, "")
        notes = self._check_endpoints(given)
        return {"key": self._key(self._keys.update(key, **given, by=self._by)), "notes": notes}

    def rotate_key(self, key: str, body: Body) -> dict[str, Any]:
        given = ROTATION(body, "")
        secret, rotated = self._keys.rotate(
            key, overlap=given.get("overlap", OVERLAP), expires=given.get("expires"), by=self._by
        )
        return {"secret": secret, "key": self._key(rotated)}

    def revoke_key(self, key: str) -> dict[str, Any]:
        return {"key": self._key(self._keys.revoke(key, by=self._by))}

    def _check_endpoints(self, given: Mapping[str, Any]) -> list[str]:
        """Check endpoint names: with a typing error in one, a key could use nothing. See ``set_limits``."""
        asked = dict.fromkeys(entry.partition(":")[0] for entry in _endpoints(given) or ())
        names = sa.select(endpoints.c.name).order_by(endpoints.c.name)
        there = self._store.read(lambda connection: connection.execute(names).scalars().all()) if asked else ()
        listed = ", ".join(there) or "nothing"
        return [
            f"there is no endpoint {name!r} yet; the key may use it once there is; served is {listed}"
            for name in asked
            if name not in there
        ]

    def _key(self, key: ApiKey) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(key)
        return found | {"state": key.state(self._keys.now_ms())}

    # limits

    def list_limits(self, query: Query) -> dict[str, Any]:
        asked = _known(query, LIMITS_QUERY)
        found = Limits(self._store).list(_one_of("scope", asked, SCOPES), asked.get("subject"))
        return {"currency": self._currency(), "limits": [_limit(limit) for limit in found]}

    def set_limits(self, body: Body) -> dict[str, Any]:
        """Set several limits in one transaction; ``notes`` in the answer name likely mistakes."""
        given = NEW_LIMITS(body, "")
        scope, subject = given["scope"], given["subject"]
        end_user = given.get("end_user", "")
        notes = self._check_subject(scope, subject)
        values = {kind: _bound(kind, **bound) for kind, bound in given["limits"].items()}
        limits = Limits(self._store)

        def work(connection: sa.Connection) -> list[Limit]:
            return [
                limits.put(connection, scope, subject, kind, value, end_user=end_user, by=self._by)
                for kind, value in values.items()
            ]

        found = self._store.write(work)
        return {"currency": self._currency(), "limits": [_limit(limit) for limit in found], "notes": notes}

    def delete_limit(self, query: Query) -> dict[str, Any]:
        asked = _known(query, LIMIT_QUERY, required=("scope", "subject", "kind"))
        _one_of("scope", asked, SCOPES)
        _one_of("kind", asked, KINDS)
        scope, subject, kind = (asked[name] for name in ("scope", "subject", "kind"))
        end_user = asked.get("end_user", "")
        if not Limits(self._store).remove(scope, subject, kind, end_user=end_user, by=self._by):
            raise NotFound(
                f"{scope} {subject} has no limit {kind}" + (f" of its own for {end_user!r}" * bool(end_user))
            )
        return {}

    def _check_subject(self, scope: str, subject: str) -> list[str]:
        """Check a limit's subject. The store creates the ids of keys, so an unknown one is a mistake: ``NotFound``.

        Endpoints may be created later, and callers with tokens are known only when they call.
        """
        of_key, of_tenant = scope in ("key", "key_user"), scope in ("tenant", "tenant_user")
        if of_tenant and subject == SHADOW:
            raise InvalidField("subject", subject, f"another tenant: {RESERVED}, which use up no limit")
        known_ids = {ANONYMOUS.key_id, *(key.key_id for key in self._keys.list())} if of_key else {subject}
        if subject not in known_ids and not subject.startswith(TOKEN_PREFIX):
            raise NotFound(f"there is no key {subject!r}; mlflow-llm keys list shows their ids")
        known = sa.select(endpoints.c.name).where(endpoints.c.name == subject)
        payers = sa.select(tenants.c.tenant).where(tenants.c.tenant == subject)
        if of_tenant and subject != ANONYMOUS.tenant and self._store.read(lambda c: c.execute(payers).first()) is None:
            return [f"no key belongs to tenant {subject!r}; the limit applies once a key or a token does"]
        if (
            scope in ("endpoint", "user", "endpoint_user")
            and self._store.read(lambda c: c.execute(known).first()) is None
        ):
            return [f"there is no endpoint {subject!r} yet; the limit applies once there is"]
        return []

    # prices

    def list_prices(self, query: Query) -> dict[str, Any]:
        asked = _known(query, PRICES_QUERY)
        found = [_price(*row) for row in Prices(self._store).list() if asked.get("entity", row[0]) == row[0]]
        return {"currency": self._currency(), "prices": found}

    def set_price(self, body: Body) -> dict[str, Any]:
        """Set a price. A missing price is 0, except that of cached tokens, which is then that of input tokens.

        ``notes`` are as in ``set_limits``.
        """
        given = NEW_PRICE(body, "")
        entity, texts = given["entity"], {name: given[name] for name in Price.__struct_fields__ if name in given}
        if not texts:
            raise InvalidField("input", None, "a price: input, cached, output or unit_minute")
        values = {name: micro_units(name, texts.get(name, "0")) for name in Price.__struct_fields__}
        if "cached" not in texts:
            values["cached"] = values["input"]
        if values["cached"] > values["input"]:
            raise InvalidField("cached", texts["cached"], f"at most the price of input, {texts.get('input', '0')}")
        at_ms = parse_timestamp("effective", given.get("effective"))
        notes = self._check_served(entity)
        price = Price(**values)
        since = Prices(self._store).set(entity, price, effective=None if at_ms is None else at_ms / 1000, by=self._by)
        return {"currency": self._currency(), "price": _price(entity, since, price), "notes": notes}

    def delete_price(self, query: Query) -> dict[str, Any]:
        asked = _known(query, PRICE_QUERY, required=("entity",))
        at_ms = _integer("effective_ms", asked.get("effective_ms"), 0, 2**53)
        if not Prices(self._store).remove(asked["entity"], effective_ms=at_ms, by=self._by):
            raise NotFound(f"{asked['entity'][:80]!r} has no such price")
        return {}

    def _check_served(self, entity: str) -> list[str]:
        served = self._served()
        if entity == ANY or entity in served:
            return []
        listed = ", ".join(sorted(served)) or "nothing"
        return [f"no endpoint serves {entity!r}, so nothing costs this yet; served is {listed}"]

    def _served(self) -> set[str]:
        """Return the names of served models in active and pending configs, and of their endpoints and registered
        models, by which prices may be set too."""
        table, one = endpoint_configs.c, endpoints.c
        current = sa.or_(table.version == one.active_version, table.version == one.pending_version)
        query = sa.select(table.name, table.config).where(table.name == one.name, current)
        configs = self._store.read(lambda connection: connection.execute(query).all())
        found: set[str] = set()
        for name, text in configs:
            found.add(name)
            for entity in msgspec.json.decode(text)["served_entities"]:
                uri = (entity.get("source") or {}).get("uri") or ""
                version = ModelVersion.of(uri, "")
                asked = entity.get("asked", "")
                found |= {label_of(entity["name"]), entity["name"], asked, version.label, version.name} - {""}
        return found

    def get_currency(self) -> dict[str, Any]:
        return {"currency": self._currency()}

    def set_currency(self, body: Body) -> dict[str, Any]:
        set_currency(self._store, NEW_CURRENCY(body, "")["currency"], by=self._by)
        return self.get_currency()

    def _currency(self) -> str:
        return currency(self._store)

    # the audit log

    def list_audit(self, query: Query) -> dict[str, Any]:
        asked = _known(query, AUDIT_QUERY)
        what = AuditFilter(
            start_ms=parse_timestamp("start", asked.get("start")) or 0,
            end_ms=parse_timestamp("end", asked.get("end")),
            actor=asked.get("actor"),
            action=_one_of("action", asked, ACTIONS),
            target=asked.get("target"),
        )
        limit = _integer("limit", asked.get("limit"), 1, MAX_PAGE) or 100
        entries, cursor = Audit(self._store).page(what, limit=limit, cursor=asked.get("cursor"))
        return {"audit": [msgspec.to_builtins(entry) for entry in entries], "next_cursor": cursor}


def _known(query: Query, allowed: Mapping[str, Any], required: tuple[str, ...] = ()) -> Query:
    """Check the names and lengths in ``query`` and return it. Raises ``InvalidField``."""
    for name, value in query.items():
        if name not in allowed:
            raise InvalidField(name[:80], value, "no such parameter; expected one of " + ", ".join(allowed))
        maximum = allowed[name].get("maxLength", 256)
        if not 0 < len(value) <= maximum or "\0" in value:
            raise InvalidField(name, value, f"a text of 1 to {maximum} characters")
    for name in required:
        if name not in query:
            raise InvalidField(name, None, "a value: it is needed")
    return query


def _one_of(name: str, query: Query, options: tuple[str, ...]) -> str | None:
    value = query.get(name)
    if value is not None and value not in options:
        raise InvalidField(name, value, "one of " + ", ".join(options))
    return value


def _integer(name: str, value: str | None, low: int, high: int) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or not low <= int(value) <= high:
        raise InvalidField(name, value, f"an integer from {low} to {high}")
    return int(value)


def _endpoints(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    found = given.get("endpoints")
    return None if found == ("*",) else found


def _bound(kind: str, value: int | str, *, soft: bool = False, alert_at: tuple[float, ...] | None = None) -> Bound:
    found = micro_units(kind, value) if isinstance(value, str) else value
    return Bound(value=found, soft=soft, alert_at=alert_at)


def _limit(limit: Limit) -> dict[str, Any]:
    kind: Kind = limit.kind
    unit = ("money " if kind in BUDGETS else "") + UNITS[kind]
    named = {"scope": limit.scope, "subject": limit.subject, "end_user": limit.end_user, "kind": kind}
    more = {"soft": limit.soft, "alert_at": limit.alert_at}
    return named | {"value": plain(kind, limit.value), "unit": unit} | more


def _price(entity: str, effective_ms: int, price: Price) -> dict[str, Any]:
    return {"entity": entity, "effective_ms": effective_ms, **plain_price(price)}
