"""``mlflow-llm audit``: the audit log."""

from __future__ import annotations

import json
from typing import Any

import click

from ...metering.accounts.audit import ACTIONS, here, prune
from ...metering.store.time_formats import format_utc
from ..store import database, opened, table
from .accounts import open_accounts, store_options

HEADS = ("time", "by", "via", "request", "action", "target", "before", "after")
MAX_COLUMN_WIDTH = 60


@click.group(invoke_without_command=True)
@store_options
@click.option("--start", help="Only from this day or time on (UTC).")
@click.option("--end", help="Only before this day or time.")
@click.option("--actor", help="Only changes by this key or user of the machine.")
@click.option("--action", type=click.Choice(ACTIONS), help="Only changes of this kind.")
@click.option("--target", help="Only changes of this key (its id), endpoint, served model, or limit (SCOPE SUBJECT).")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="Number of entries, newest first."
)
@click.option("--json", "as_json", is_flag=True, help="Print whole entries as JSON.")
@click.pass_context
def audit(
    context: click.Context,
    /,
    database: str | None,
    url: str | None,
    key: str | None,
    limit: int,
    as_json: bool,
    **asked: str | None,
) -> None:
    """Show who changed endpoints, keys, limits and prices.

    The newest change comes first. Times are in UTC.
    """
    if context.invoked_subcommand is not None:
        context.default_map = {"prune": {"database": database}} if database else None
        return
    query = {name: value for name, value in asked.items() if value is not None}
    with open_accounts(database, url, key) as accounts:
        found = accounts.list_audit(query | {"limit": str(limit)})["audit"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(table(HEADS, [_row(entry) for entry in found], right=0))


@audit.command("prune")
@database
@click.argument("days", type=int)
def prune_(database: str, days: int) -> None:
    """Remove old entries.

    Removes entries that are older than DAYS (at least 90). The removal is recorded as an entry itself.
    """
    with opened(database) as store:
        click.echo(f"removed {prune(store, days, by=here('command'))} entries")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    plain = (entry["actor"], entry["via"], entry["request_id"] or "", entry["action"], entry["target"])
    return (format_utc(entry["at_ms"]), *plain, _short(entry["before"]), _short(entry["after"]))


def _short(value: Any) -> str:
    text = "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_COLUMN_WIDTH else text[: MAX_COLUMN_WIDTH - 1] + "…"
