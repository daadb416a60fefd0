"""``mlflow-llm windows``: the sums that limits are checked against."""

from __future__ import annotations

import click

from ...metering.accounts.audit import here
from ..store import database, opened


@click.group()
def windows() -> None:
    """Repair the sums that limits are checked against."""


@windows.command()
@database
@click.option(
    "--shift",
    type=click.IntRange(0, 10**10),
    help="Seconds by which the clock was ahead. Without it, what was used at times in the future counts as used now.",
)
def repair(database: str, shift: int | None) -> None:
    """Repair times in the future, which a server with a wrong clock has left, and the windows of all limits.

    Set the clock of that server first. Other servers may go on.
    """
    from ...metering.ledger.window_repair import repair as repaired

    with opened(database) as store:
        done = repaired(store, shift=shift, by=here())
    click.echo(
        f"{done.rows} ledger rows and {done.minutes} provisioned minutes moved back by {done.shift} s, "
        f"{done.windows} windows rebuilt"
    )
