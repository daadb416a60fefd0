"""``mlflow-llm prices``: what a token costs, and in which currency."""

from __future__ import annotations

from typing import Any

import click

from ...interface.errors import InvalidField
from ...metering.accounts.money import micro_units
from ...metering.store.time_formats import format_utc
from ..store import table
from .accounts import AccountsApi, print_notes, with_accounts


@click.group()
def prices() -> None:
    """Set, list and remove prices.

    Prices are in currency units per million tokens.

    Works on a database (--database), or through a server (--url) with a key that has the scope "manage".
    """


@prices.command("set")
@with_accounts(make=True)
@click.argument("entity")
@click.option("--input", "input_", help="Price of a million prompt tokens (default: 0).")
@click.option("--cached", help="Price of a million prompt tokens found in the prefix cache (default: as --input).")
@click.option("--output", help="Price of a million generated tokens (default: 0).")
@click.option("--unit-minute", help="Price of a reserved token/s for a minute (default: 0).")
@click.option("--effective", metavar="WHEN", help="When the price takes effect: a future day or time (default: now).")
def set_(accounts: AccountsApi, entity: str, input_: str | None, effective: str | None, **others: str | None) -> None:
    """Set the prices of a served model.

    ENTITY is the name of a served model, of its registered version (assistant/3) or model (assistant), or of its
    endpoint; the first of these with a price counts. "*" is for all models without prices of their own.

    Give at least one price. A price that is not given is 0 (--cached: the price of --input).
    """
    given = {name: value for name, value in {"input": input_, **others}.items() if value is not None}
    if not given:
        raise click.UsageError("give a price: --input, --cached, --output or --unit-minute")
    for name, value in given.items():
        micro_units(name, value)
    if micro_units("cached", given.get("cached", "0")) > micro_units("input", given.get("input", "0")):
        raise InvalidField("cached", given["cached"], f"at most the price of input, {given.get('input', '0')}")
    answer = accounts.set_price({"entity": entity, **given} | ({"effective": effective} if effective else {}))
    price, unit = answer["price"], f" {answer['currency']}".rstrip()
    click.echo(f"{entity}: {price['input']}{unit} in, {price['cached']}{unit} cached, {price['output']}{unit} out")
    print_notes(answer)


@prices.command("list")
@with_accounts()
def list_(accounts: AccountsApi) -> None:
    """List the prices, and since when they apply (UTC)."""
    answer = accounts.list_prices({})
    heads = ["input", "cached", "output", "unit_minute"]
    rows = [
        (price["entity"], format_utc(price["effective_ms"]), *(price[head] for head in heads))
        for price in answer["prices"]
    ]
    if answer["currency"]:
        click.echo(f"in {answer['currency']}")
    click.echo(table(("entity", "since", "input", "cached", "output", "unit-minute"), rows, right=4))


@prices.command()
@with_accounts()
@click.argument("entity")
def remove(accounts: AccountsApi, entity: str) -> None:
    """Remove all prices of a served model.

    This includes future prices of ENTITY. Requests that were already admitted keep their price.
    """
    accounts.delete_price({"entity": entity})
    click.echo(f"{entity}: removed all prices")


@prices.command()
@with_accounts(make=True)
@click.argument("currency", required=False)
def currency(accounts: AccountsApi, currency: str | None) -> None:
    """Show or set the currency of prices, budgets and costs.

    CURRENCY is a name, such as EUR or USD. Nothing is converted, so it cannot change once costs have been booked.
    """
    answer: dict[str, Any] = (
        accounts.get_currency() if currency is None else accounts.set_currency({"currency": currency})
    )
    click.echo(answer["currency"] or "no currency is set")
