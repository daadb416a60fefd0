"""``mlflow-llm usage``: what was used and what it cost."""

from __future__ import annotations

import json

import click

from ...control.settings import ServerSettings, ledger_dir
from ...metering.accounts.money import money, units
from ...metering.ledger.offline_settlement import WATCH_SECONDS, settle_ended
from ...metering.ledger.retention import fold
from ...metering.store.store import Store
from ...metering.usage.export import csv_lines, write_parquet
from ...metering.usage.filter import filter_of, groups_of
from ...metering.usage.usage import ALLOWED_GROUPS, Usage, UsageFilter, UsageSource, UsageSum
from ...metering.usage.usage import bill as wire_bill
from ..store import database, opened, table
from .accounts import open_store_or_server, store_options
from .remote_usage import RemoteUsage

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
TITLES = ("requests", "prompt", "cached", "completion", "cost")


@click.group(invoke_without_command=True)
@store_options
@click.option("--start", help="Only from this day or time on (UTC).")
@click.option("--end", help="Only before this day or time.")
@click.option("--tenant", help="Only usage of this tenant.")
@click.option("--endpoint", help="Only usage of this endpoint.")
@click.option("--entity", help="Only usage of this served model.")
@click.option("--adapter", help="Only usage of this adapter.")
@click.option("--model-version", help="Only usage of this version of a model: assistant/7.")
@click.option("--content-hash", help="Only usage of the model with this content hash.")
@click.option("--end-user", help="Only usage of this user, as requests name it.")
@click.option("--client-request-id", help="Only the requests with this id of their caller's own.")
@click.option("--tag", help="Only usage with this label of metadata or usage_context: NAME=VALUE.")
@click.option(
    "--by",
    "--group-by",
    "by",
    default="day,tenant,entity",
    show_default=True,
    help=f"Columns to sum by: {ALLOWED_GROUPS}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the bill as JSON, as /api/2.0/usage has it.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False), help="Write every request to this CSV file.")
@click.option("--parquet", type=click.Path(dir_okay=False), help="Write every request to this Parquet file.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    help="Write a chart over time to this file: tokens, and cost by the columns of --by.",
)
@click.pass_context
def usage(
    context: click.Context,
    /,
    database: str | None,
    url: str | None,
    key: str | None,
    by: str,
    as_json: bool,
    **asked: str | None,
) -> None:
    """Print the bill.

    Prints requests, tokens and cost by day, tenant and model, or by the columns of --by.

    Reads a database (--database) or asks a server (--url). A server shows what the key may see: with the scope "manage"
    all usage, with "usage" that of its tenant, otherwise its own.
    """
    if context.invoked_subcommand is not None:
        context.default_map = {name: {"database": database} for name in ("fold", "settle")} if database else None
        return
    what, groups = filter_of(asked), groups_of(by)
    with open_store_or_server(database, url, key) as found:
        source: UsageSource = Usage(found) if isinstance(found, Store) else RemoteUsage(found)
        _write_files(source, what, groups, asked)
        if as_json:
            click.echo(json.dumps(wire_bill(source, what, groups), indent=2))
            return
        sums, reserved = source.sums(what, groups), source.provisioned_cost(what)
        currency = source.currency()
    click.echo(bill(groups, sums, currency))
    for tenant, endpoint, entity, minutes, cost in reserved:
        click.echo(
            f"reserved by {tenant} on {endpoint}, {entity}: {minutes} token/s × minutes, {money(cost, currency)}"
        )
    if reserved:
        whole = sum(total.cost for total in sums) + sum(cost for *_, cost in reserved)
        click.echo(f"total with reserved throughput: {money(whole, currency)}")


def bill(groups: tuple[str, ...], sums: tuple[UsageSum, ...], currency: str = "") -> str:
    """Return a line per group and one with the totals."""
    rows = [(*total.group, *(str(getattr(total, name)) for name in COUNTS), units(total.cost)) for total in sums]
    totals = [str(sum(getattr(total, name) for total in sums)) for name in COUNTS]
    named = ("total", *[""] * (len(groups) - 1))
    titles = (*TITLES[:-1], f"cost {currency}".rstrip())
    return table((*groups, *titles), [*rows, (*named, *totals, units(sum(total.cost for total in sums)))], right=5)


def _write_files(source: UsageSource, what: UsageFilter, groups: tuple[str, ...], asked: dict[str, str | None]) -> None:
    csv_file, parquet, plot = asked["csv_file"], asked["parquet"], asked["plot"]
    try:
        if csv_file is not None:
            with open(csv_file, "w", encoding="utf-8", newline="") as file:
                file.writelines(csv_lines(source, what))
        if parquet is not None:
            write_parquet(source, what, parquet)
        if plot is not None:
            from ...metering.usage.plot import plot_usage

            plot_usage(source, what, plot, groups)
    except (OSError, ModuleNotFoundError, ValueError) as error:  # matplotlib's word for an ending it does not know
        raise click.ClickException(str(error)) from None


@usage.command("fold")
@database
@click.argument("days", type=int)
def fold_(database: str, days: int) -> None:
    """Replace old requests with daily sums.

    Folds requests that are older than DAYS. Totals do not change. DAYS is at least 32, because monthly budgets are
    computed from single requests.
    """
    with opened(database) as store:
        click.echo(f"folded {fold(store, days)} requests")


@usage.command("settle")
@database
@click.option(
    "--state",
    type=click.Path(file_okay=False),
    help="State directory of the servers (MLFLOW_LLM_STATE, otherwise the user's own).",
)
@click.option(
    "--moved",
    is_flag=True,
    help="The database was moved here and the original is gone: settle what was left there, too.",
)
def settle_(database: str, state: str | None, moved: bool) -> None:
    """Settle the requests left open by processes that have ended.

    A request that was running when its server was killed is closed with what had been counted by then, as the next
    start of a server would do. Requests of processes that still run are left alone.
    """

    def watching(count: int) -> None:
        click.echo(f"watching {count} processes of other hosts for {WATCH_SECONDS:.0f} s", err=True)

    with opened(database) as store:
        root = ledger_dir(ServerSettings(state_dir=state))
        done = settle_ended(store, root, moved=moved, watching=watching)
    click.echo(f"settled {done.rows} requests; {done.living} are open in running processes")
