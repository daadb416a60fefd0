"""``mlflow-llm limits``: what keys, tenants and endpoints may use."""

from __future__ import annotations

import click
import sqlalchemy as sa

from ..errors import InvalidField, NotFound
from ..metering.keys import ANONYMOUS, Keys
from ..metering.limits import MAX_VALUE, SCOPES, Limits
from ..metering.money import micro_units, units
from ..metering.store import Store
from ..metering.tables import endpoints
from ..metering.windows import KINDS, UNITS
from .store import database, opened, table

LIMIT = f"KIND=VALUE, KIND one of {', '.join(KINDS)}"


def limit_of(text: str) -> tuple[str, int]:
    """``"otpm=20000"`` or, for money, ``"budget_month=25.00"``. Raises ``InvalidField``."""
    kind, equals, value = text.partition("=")
    if not equals or kind not in KINDS:
        raise InvalidField("limit", text, LIMIT)
    if kind.startswith("budget"):
        return kind, micro_units(kind, value)
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or int(value) > MAX_VALUE:
        raise InvalidField(kind, value, f"an integer from 0 to {MAX_VALUE}")
    return kind, int(value)


def shown(kind: str, value: int) -> str:
    return units(value) if kind.startswith("budget") else str(value)


@click.group()
def limits() -> None:
    """Set, list and remove limits.

    The strictest that applies to a request wins. Kinds: itpm, otpm (input and output tokens a minute), qpm, qph
    (queries a minute, an hour), in_flight (requests at once), budget, budget_day, budget_month (money).
    """


@limits.command("set")
@database
@click.argument("scope", type=click.Choice(SCOPES))
@click.argument("subject")
@click.argument("limits", nargs=-1, required=True, metavar="KIND=VALUE...")
def set_(database: str, scope: str, subject: str, limits: tuple[str, ...]) -> None:
    """Limit SUBJECT: a key's id, a tenant, an endpoint. Scope "user" is each key at that endpoint by itself."""
    found = [limit_of(limit) for limit in limits]
    with opened(database, make=True) as store:
        _check_subject(store, scope, subject)
        for kind, value in found:
            limit = Limits(store).set(scope, subject, kind, value)
            click.echo(f"{scope} {subject}: {shown(kind, limit.value)} {unit_of(kind)}")


def _check_subject(store: Store, scope: str, subject: str) -> None:
    """Ids of keys are made by the store, so one that it does not know is a mistake: raises ``NotFound``. Endpoints may
    come later."""
    if scope == "key" and subject not in {ANONYMOUS.key_id, *(key.key_id for key in Keys(store).list())}:
        raise NotFound(f"there is no key {subject!r}; mlflow-llm keys list shows their ids")
    known = sa.select(endpoints.c.name).where(endpoints.c.name == subject)
    if scope in ("endpoint", "user") and store.read(lambda connection: connection.execute(known).first()) is None:
        click.echo(f"note: there is no endpoint {subject!r} yet; the limit holds once there is", err=True)


def unit_of(kind: str) -> str:
    return ("currency units " if kind.startswith("budget") else "") + UNITS[kind]  # type: ignore[index]


@limits.command("list")
@database
@click.option("--scope", type=click.Choice(SCOPES), help="Only this scope's.")
@click.option("--subject", help="Only this subject's.")
def list_(database: str, scope: str | None, subject: str | None) -> None:
    """Show the limits."""
    with opened(database) as store:
        found = Limits(store).list(scope, subject)
    rows = [(limit.scope, limit.subject, limit.kind, shown(limit.kind, limit.value)) for limit in found]
    click.echo(table(("scope", "subject", "kind", "value"), rows, right=1))


@limits.command()
@database
@click.argument("scope", type=click.Choice(SCOPES))
@click.argument("subject")
@click.argument("kinds", nargs=-1, required=True, type=click.Choice(KINDS), metavar="KIND...")
def remove(database: str, scope: str, subject: str, kinds: tuple[str, ...]) -> None:
    """Take limits away again."""
    with opened(database) as store:
        for kind in kinds:
            if not Limits(store).remove(scope, subject, kind):
                raise NotFound(f"{scope} {subject} has no limit {kind}")
            click.echo(f"{scope} {subject}: no {kind} any more")
