"""``mlflow-llm prices``: what a token costs."""

from __future__ import annotations

import time

import click

from ..errors import InvalidField
from ..metering.money import Price, micro_units, units
from ..metering.prices import Prices
from .store import database, opened, table


@click.group()
def prices() -> None:
    """Set and list prices.

    In currency units a million tokens.
    """


@prices.command("set")
@database
@click.argument("entity")
@click.option("--input", "input_", help="A million prompt tokens (default: 0).")
@click.option("--cached", help="A million of them found in the cache (default: as --input).")
@click.option("--output", help="A million generated tokens (default: 0).")
@click.option("--unit-minute", help="A reserved token/s for a minute (default: 0).")
def set_(database: str, entity: str, input_: str | None, **others: str | None) -> None:
    """Price ENTITY from now on: a served model's name, or "*" for all that have no price of their own.

    One price at least; what is not given costs nothing.
    """
    given = {name: value for name, value in {"input": input_, **others}.items() if value is not None}
    if not given:
        raise click.UsageError("give a price: --input, --cached, --output or --unit-minute")
    fields = {"input": "0", "output": "0", "unit_minute": "0"} | given
    fields.setdefault("cached", fields["input"])
    found = {name: micro_units(name, value) for name, value in fields.items()}
    if found["cached"] > found["input"]:
        raise InvalidField("cached", fields["cached"], f"at most the price of input, {fields['input']}")
    with opened(database, make=True) as store:
        Prices(store).set(entity, Price(**found))
    click.echo(f"{entity}: {units(found['input'])} in, {units(found['cached'])} cached, {units(found['output'])} out")


@prices.command("list")
@database
def list_(database: str) -> None:
    """Show the prices and since when they hold (UTC)."""
    with opened(database) as store:
        found = Prices(store).list()
    rows = []
    for entity, effective_ms, price in found:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(effective_ms / 1000))
        amounts = (price.input, price.cached, price.output, price.unit_minute)
        rows.append((entity, since, *map(units, amounts)))
    click.echo(table(("entity", "since", "input", "cached", "output", "unit-minute"), rows, right=4))
