"""The metering store of the commands, and tables on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import click

from ..control.settings import DATABASE_VARIABLE
from ..metering.store.checks import NoStore
from ..metering.store.store import Store
from ..system.escape import visible_line

DATABASE = "URL of the database, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE)."
database = click.option("--database", envvar=DATABASE_VARIABLE, required=True, help=DATABASE)


@contextlib.contextmanager
def opened(url: str, *, make: bool = False) -> Iterator[Store]:
    """Yield the store at ``url``; ``make`` it where it is new. Raises ``ClickException`` where there is none."""
    try:
        store = Store(url, make=make)
    except NoStore as error:
        raise click.ClickException(str(error)) from None
    try:
        yield store
    finally:
        store.close()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    """Return a table as text; its last ``right`` columns, of numbers, are right-aligned."""
    rows = [[visible_line(cell) for cell in row] for row in rows]
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
