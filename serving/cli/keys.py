"""``mlflow-llm keys``: API keys of a store."""

from __future__ import annotations

import time

import click

from ..metering.keys import SCOPES, Keys
from ..metering.limits import Limits
from .limits import LIMIT, limit_of
from .store import database, opened


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command()
@database
@click.option("--tenant", default="default", show_default=True)
@click.option("--name", default="", help="A note for people.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("invoke",), show_default=True)
@click.option("--limit", "limits", multiple=True, metavar="KIND=VALUE", help=f"What the key may use. {LIMIT}")
def create(database: str, tenant: str, name: str, scopes: tuple[str, ...], limits: tuple[str, ...]) -> None:
    """Make a key and print its secret, once.

    Scopes: "invoke" runs requests, "manage" changes endpoints and sees every tenant's usage, "usage" does neither.
    Any key sees its own tenant's usage.
    """
    found = [limit_of(limit) for limit in limits]
    with opened(database, make=True) as store:
        secret, key = Keys(store).create(tenant, name=name, scopes=scopes)
        for kind, value in found:
            Limits(store).set("key", key.key_id, kind, value)
    click.echo(secret)
    click.echo(f"key {key.key_id} of tenant {key.tenant}; the secret is not stored and cannot be shown again", err=True)


@keys.command("list")
@database
@click.option("--tenant", help="Only this tenant's.")
def list_(database: str, tenant: str | None) -> None:
    """Show the keys, never their secrets."""
    with opened(database) as store:
        found = Keys(store).list(tenant)
    for key in found:
        state = "revoked" if key.revoked_ms else "active"
        made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.created_ms / 1000))
        click.echo("\t".join((key.key_id, key.prefix + "…", key.tenant, ",".join(key.scopes), made, state, key.name)))


@keys.command()
@database
@click.argument("key")
def revoke(database: str, key: str) -> None:
    """Revoke KEY (its id); servers refuse it within seconds."""
    with opened(database) as store:
        click.echo(f"revoked {Keys(store).revoke(key).key_id}")
