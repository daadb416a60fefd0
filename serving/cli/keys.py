"""``mlflow-llm keys``: API keys of a store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import click

from ..metering.keys import SCOPES, Keys
from ..metering.store import Store

database = click.option(
    "--database", envvar="MLFLOW_LLM_DATABASE", required=True, help="URL of the store, e.g. sqlite:///serving.db"
)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[Keys]:
    store = Store(url)
    try:
        yield Keys(store)
    finally:
        store.close()


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command()
@database
@click.option("--tenant", default="default", show_default=True)
@click.option("--name", default="", help="A note for people.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("invoke",), show_default=True)
def create(database: str, tenant: str, name: str, scopes: tuple[str, ...]) -> None:
    """Make a key and print its secret, once."""
    with _opened(database) as store:
        secret, key = store.create(tenant, name=name, scopes=scopes)
    click.echo(secret)
    click.echo(f"key {key.key_id} of tenant {key.tenant}; the secret is not stored and cannot be shown again", err=True)


@keys.command("list")
@database
@click.option("--tenant", help="Only this tenant's.")
def list_(database: str, tenant: str | None) -> None:
    """Show the keys, never their secrets."""
    with _opened(database) as store:
        found = store.list(tenant)
    for key in found:
        state = "revoked" if key.revoked_ms else "active"
        made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.created_ms / 1000))
        click.echo("\t".join((key.key_id, key.prefix + "…", key.tenant, ",".join(key.scopes), made, state, key.name)))


@keys.command()
@database
@click.argument("key")
def revoke(database: str, key: str) -> None:
    """Revoke KEY (its id); servers refuse it within seconds."""
    with _opened(database) as store:
        click.echo(f"revoked {store.revoke(key).key_id}")
