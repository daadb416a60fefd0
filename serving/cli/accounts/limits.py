"""``mlflow-llm limits``: what keys, tenants, endpoints and end users may use."""

from __future__ import annotations

from typing import Any

import click

from ...interface.errors import InvalidField
from ...metering.accounts.alert_shares import parse_shares
from ...metering.accounts.limits import MAX_VALUE, SCOPES
from ...metering.accounts.money import micro_units
from ...metering.accounts.windows import BUDGETS, KINDS
from ..advice import for_limit
from ..store import table
from .accounts import AccountsApi, print_notes, with_accounts

LIMIT = f"KIND=VALUE, with KIND one of {', '.join(KINDS)}"


def limits_of(given: tuple[str, ...], *, soft: bool, alert_at: str | None) -> dict[str, Any]:
    """Parse ``"otpm=20000"`` or, for money, ``"budget_month=25.00"``, as a body has them. Raises ``InvalidField``."""
    more: dict[str, Any] = {"soft": True} if soft else {}
    if alert_at is not None:
        more["alert_at"] = list(parse_shares("alert_at", alert_at))
    found: dict[str, Any] = {}
    for text in given:
        kind, equals, value = text.partition("=")
        if not equals or kind not in KINDS:
            instead = for_limit(kind)
            raise InvalidField("limit", text, LIMIT if instead is None else f"{LIMIT}: {kind} is {instead} here")
        found[kind] = {"value": _value(kind, value), **more} if more else _value(kind, value)
    return found


def limit_options(command: Any) -> Any:
    """Add ``--soft`` and ``--alert-at``, which hold for all limits of a command."""
    command = click.option(
        "--alert-at",
        metavar="SHARES",
        help="Shares of the limits at which webhooks are told once in each window, such as 0.5,0.8,1; an empty text "
        "means none. Without it, budgets have those of the server.",
    )(command)
    return click.option("--soft", is_flag=True, help="The limits are counted and refuse nothing.")(command)


def _value(kind: str, value: str) -> int | str:
    if kind in BUDGETS:
        micro_units(kind, value)
        return value
    if not (value.isascii() and value.isdigit()) or len(value) > 16 or int(value) > MAX_VALUE:
        raise InvalidField(kind, value, f"an integer from 0 to {MAX_VALUE}")
    return int(value)


@click.group()
def limits() -> None:
    """Set, list and remove limits.

    A request has to be within every limit that applies to it. Kinds: itpm and otpm (input and output tokens per
    minute), qpm and qph (queries per minute and per hour), in_flight (concurrent requests), budget, budget_day and
    budget_month (money).

    Works on a database (--database), or through a server (--url) with a key that has the scope "manage".
    """


_end_user = click.option(
    "--end-user", metavar="NAME", help="The end user whose own limit it is; without it, that of each of them."
)


@limits.command("set")
@with_accounts(make=True)
@click.argument("scope", type=click.Choice(SCOPES))
@click.argument("subject")
@click.argument("limits", nargs=-1, required=True, metavar="KIND=VALUE...")
@limit_options
@_end_user
def set_(
    accounts: AccountsApi,
    scope: str,
    subject: str,
    limits: tuple[str, ...],
    end_user: str | None,
    soft: bool,
    alert_at: str | None,
) -> None:
    """Set limits.

    SUBJECT is the id of a key, a tenant or an endpoint. With the scope "user" it is an endpoint, and the limit applies
    to each key there separately. With "key_user", "tenant_user" and "endpoint_user" it applies to each end user
    separately that a key with the scope "end_users" names, or to one of them (--end-user) in place of that limit.

    A limit that is set again without --soft refuses again.
    """
    named = {} if end_user is None else {"end_user": end_user}
    answer = accounts.set_limits(
        {"scope": scope, "subject": subject, "limits": limits_of(limits, soft=soft, alert_at=alert_at), **named}
    )
    for limit in answer["limits"]:
        whose = f"{scope} {subject}" if end_user is None else f"{scope} {subject} {end_user}"
        click.echo(f"{whose}: {limit['value']} {_unit(limit, answer['currency'])}{_more(limit)}")
    print_notes(answer)


def _more(limit: dict[str, Any]) -> str:
    """Return what a limit says beside its value: ``", soft, alerts at 0.5, 1"``."""
    said = [", soft"] if limit["soft"] else []
    if limit["alert_at"] is not None:
        said.append(f", alerts at {_shares(limit)}" if limit["alert_at"] else ", no alerts")
    return "".join(said)


def _shares(limit: dict[str, Any]) -> str:
    return ", ".join(f"{share:g}" for share in limit["alert_at"])


def _unit(limit: dict[str, Any], currency: str) -> str:
    """Return a unit: ``"EUR a month"``, ``"queries a minute"``."""
    return str(limit["unit"]).replace("money", currency or "currency units")


@limits.command("list")
@with_accounts()
@click.option("--scope", type=click.Choice(SCOPES), help="Only limits of this scope.")
@click.option("--subject", help="Only limits of this subject.")
def list_(accounts: AccountsApi, **asked: str | None) -> None:
    """List the limits."""
    answer = accounts.list_limits({name: value for name, value in asked.items() if value is not None})
    head = ["scope", "subject", "end_user", "kind", "value", "unit", "soft", "alert_at"]
    unset = {"end_user": "", "soft": False, "alert_at": None}
    head = [one for one in head if one not in unset or any(limit[one] != unset[one] for limit in answer["limits"])]
    rows = []
    for limit in answer["limits"]:
        shown = {**limit, "end_user": limit["end_user"] or "-", "unit": _unit(limit, answer["currency"])}
        shown["soft"] = "yes" if limit["soft"] else "no"
        shown["alert_at"] = "-" if limit["alert_at"] is None else _shares(limit) or "none"
        rows.append(tuple(str(shown[name]) for name in head))
    click.echo(table(tuple(name.replace("_", " ") for name in head), rows, right=0))


@limits.command()
@with_accounts()
@click.argument("scope", type=click.Choice(SCOPES))
@click.argument("subject")
@click.argument("kinds", nargs=-1, required=True, type=click.Choice(KINDS), metavar="KIND...")
@_end_user
def remove(accounts: AccountsApi, scope: str, subject: str, kinds: tuple[str, ...], end_user: str | None) -> None:
    """Remove limits."""
    named = {} if end_user is None else {"end_user": end_user}
    for kind in kinds:
        accounts.delete_limit({"scope": scope, "subject": subject, "kind": kind, **named})
        click.echo(f"{scope} {subject}: removed {kind}")
