"""``mlflow-llm keys``: API keys of a store, or of a server."""

from __future__ import annotations

import json
from typing import Any

import click

from ...metering.accounts.keys import MAX_WEIGHT, OVERLAP, SCOPES
from ...metering.store.time_formats import format_utc
from ..store import table
from .accounts import AccountsApi, print_notes, with_accounts
from .limits import LIMIT, limit_options, limits_of

EXPIRES = "When the key expires: 90d, 12h, a date, an ISO 8601 time, or never."
ENDPOINT = "Allowed endpoint: NAME, or NAME:ADAPTER for that adapter only; repeatable (default: all)."
WEIGHT_HELP = "Share of an engine next to other tenants' keys: weight 3 gets three times as much as weight 1."
HEADS = ("key", "prefix", "tenant", "scopes", "endpoints", "created", "expires", "state", "weight", "name")


@click.group()
def keys() -> None:
    """Create, list, change, rotate and revoke API keys.

    Works on a database (--database), or through a server (--url) with a key that has the scope "manage".
    """


def _key_options(command: Any) -> Any:
    command = click.option("--endpoint", "endpoints", multiple=True, metavar="NAME[:ADAPTER]", help=ENDPOINT)(command)
    command = click.option("--weight", type=click.IntRange(1, MAX_WEIGHT), help=WEIGHT_HELP)(command)
    return click.option("--expires", metavar="WHEN", help=EXPIRES)(command)


@keys.command()
@with_accounts(make=True)
@click.option("--tenant", default="default", show_default=True, help="Tenant to which the key belongs.")
@click.option("--name", default="", help="Note about the key.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("invoke",), show_default=True)
@_key_options
@click.option("--limit", "limits", multiple=True, metavar="KIND=VALUE", help=f"Limit of the key; repeatable. {LIMIT}.")
@limit_options
def create(accounts: AccountsApi, limits: tuple[str, ...], soft: bool, alert_at: str | None, **fields: Any) -> None:
    """Create a key and print its secret.

    The secret cannot be shown again.

    Scopes: "invoke" runs requests and sees the usage of the key itself. "usage" sees the usage of its tenant. "manage"
    sees and changes everything: endpoints, keys, limits, prices, every tenant's usage. "end_users" is for a trusted
    front end: the end users that it names have the limits of end users.
    """
    if not limits and (soft or alert_at is not None):
        raise click.UsageError("--soft and --alert-at are for limits: give --limit too")
    found = {"limits": limits_of(limits, soft=soft, alert_at=alert_at)} if limits else {}
    answer = accounts.create_key(_given(fields) | found)
    _show_secret(answer)
    print_notes(answer)


@keys.command("list")
@with_accounts()
@click.option("--tenant", help="Only keys of this tenant.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(accounts: AccountsApi, tenant: str | None, as_json: bool) -> None:
    """List the keys, without their secrets. Times are in UTC."""
    found = accounts.list_keys({} if tenant is None else {"tenant": tenant})["keys"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(table(HEADS, [_row(key) for key in found], right=0))


@keys.command()
@with_accounts()
@click.argument("key_id", metavar="KEY")
@click.option("--name", help="Note about the key.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    help="New scopes, instead of the present ones; repeatable.",
)
@_key_options
def update(accounts: AccountsApi, key_id: str, **fields: Any) -> None:
    """Change what a key may do.

    KEY is the id of the key. --endpoint '*' allows all endpoints again. Servers follow within seconds.
    """
    given = _given(fields)
    if not given:
        raise click.UsageError("nothing to change; give --name, --scope, --expires, --endpoint or --weight")
    answer = accounts.update_key(key_id, given)
    click.echo(table(HEADS, [_row(answer["key"])], right=0))
    print_notes(answer)


@keys.command()
@with_accounts()
@click.argument("key_id", metavar="KEY")
@click.option(
    "--overlap", default=OVERLAP, show_default=True, metavar="TIME", help="How long the old secret remains valid."
)
@click.option("--expires", metavar="WHEN", help=EXPIRES)
def rotate(accounts: AccountsApi, key_id: str, **fields: Any) -> None:
    """Give a key a new secret and print it.

    KEY is the id of the key. It does not change, so limits and usage stay with the key. The secret cannot be shown
    again. --overlap 0 ends the old secret at once.
    """
    answer = accounts.rotate_key(key_id, _given(fields))
    _show_secret(answer)
    if answer["key"]["overlap_ms"] is not None:
        click.echo(f"the old secret is accepted until {format_utc(answer['key']['overlap_ms'])} UTC", err=True)


@keys.command()
@with_accounts()
@click.argument("key_id", metavar="KEY")
def revoke(accounts: AccountsApi, key_id: str) -> None:
    """Revoke a key with all its secrets.

    KEY is the id of the key. Servers refuse it within seconds.
    """
    click.echo(f"revoked {accounts.revoke_key(key_id)['key']['key_id']}")


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items() if v not in (None, ())}


def _show_secret(answer: dict[str, Any]) -> None:
    click.echo(answer["secret"])
    key = answer["key"]
    until = f", until {format_utc(key['expires_ms'])} UTC" if key["expires_ms"] else ""
    text = f"key {key['key_id']} of tenant {key['tenant']}{until}; the secret is not stored and cannot be shown again"
    click.echo(text, err=True)


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    return (
        key["key_id"],
        key["prefix"] + "…",
        key["tenant"],
        ",".join(key["scopes"]),
        "all" if key["endpoints"] is None else ",".join(key["endpoints"]),
        format_utc(key["created_ms"]),
        format_utc(key["expires_ms"]) or "never",
        key["state"],
        str(key["weight"]),
        key["name"],
    )
