"""The metering store of the commands, and tables on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import click
from click.core import ParameterSource

from ..control.settings import DATABASE_VARIABLE
from ..metering.store.checks import NoStore
from ..metering.store.store import Store
from ..system.escape import visible_line
from .shared_options import SharedOption

DATABASE = "URL of the database, e.g. sqlite:///serving.db (MLFLOW_LLM_DATABASE)."


def _nearest(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the database that the command line names, before or behind the command's name; else ``value``, which may
    be the environment's."""
    name, outer = str(parameter.name), context.parent
    if outer is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    if outer.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        return value
    return str(outer.params[name])


database = click.option(
    "--database", cls=SharedOption, envvar=DATABASE_VARIABLE, required=True, help=DATABASE, callback=_nearest
)


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
