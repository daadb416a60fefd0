"""The metering store behind the commands that read and set what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation

import click

from ..errors import InvalidField
from ..metering.money import MILLION
from ..metering.opening import NoStore
from ..metering.store import Store
from ..web.settings import DATABASE_VARIABLE

DATABASE = "URL of the store, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE)."
database = click.option("--database", envvar=DATABASE_VARIABLE, required=True, help=DATABASE)


@contextlib.contextmanager
def opened(url: str, *, make: bool = False) -> Iterator[Store]:
    """The store at ``url``; ``make`` it where it is new. Raises ``ClickException`` where there is none."""
    try:
        store = Store(url, make=make)
    except NoStore as error:
        raise click.ClickException(str(error)) from None
    try:
        yield store
    finally:
        store.close()


def micro_units(field: str, value: str) -> int:
    """``"2.50"`` as 2_500_000. Raises ``InvalidField``."""
    allowed = "a number from 0 to 10**9 with at most 6 decimals"
    try:
        exact = Decimal(value) * MILLION
    except InvalidOperation:
        raise InvalidField(field, value, allowed) from None
    if not exact.is_finite() or not 0 <= exact <= 10**9 * MILLION or exact != int(exact):
        raise InvalidField(field, value, allowed)
    return int(exact)


def units(micro: int) -> str:
    """2_500_000 as ``"2.50"``: at least two decimals, as many as it takes."""
    whole, rest = divmod(micro, MILLION)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{decimals}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    """Columns under ``header``; the last ``right`` of them are numbers and stand to the right."""
    widths = [max(len(line[place]) for line in [header, *rows]) for place in range(len(header))]
    first = len(header) - right
    lines = [
        "  ".join(
            cell.rjust(width) if place >= first else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *rows]
    ]
    return "\n".join(lines)
