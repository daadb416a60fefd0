"""``mlflow-llm ledger``: whether the rows of the ledger are as they were settled."""

from __future__ import annotations

from typing import BinaryIO

import click
import msgspec

from ...metering.proof.chain_check import Head, check, lines
from ...metering.proof.chain_check import head as head_of
from ..store import database, opened


@click.group()
def ledger() -> None:
    """Check that the rows of the ledger are as they were settled."""


@ledger.command()
@database
@click.option(
    "--head",
    type=click.File("rb"),
    help="File with an earlier output of `ledger head`: check that nothing up to there was changed or removed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(database: str, head: BinaryIO | None, as_json: bool) -> None:
    """Check the hash chain of the ledger.

    Names every row and link that was altered, removed or doubled, and exits with 1 if there is one. May run beside
    servers.
    """
    kept = None
    if head is not None:
        try:
            kept = msgspec.json.decode(head.read(), type=Head)
            bytes.fromhex(kept.public_key)
        except (msgspec.DecodeError, ValueError) as error:
            raise click.BadParameter(f"{head.name} is not a head of a ledger: {error}", param_hint="--head") from None
    with opened(database) as store:
        report = check(store, kept)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        for line in lines(report):
            click.echo(line)
    if report.num_problems:
        raise click.ClickException(f"the ledger has {report.num_problems} problems")


@ledger.command()
@database
def head(database: str) -> None:
    """Print the signed end of the hash chain.

    Keep it out of reach of those who can write to the database: `ledger verify --head` then also finds rows that were
    removed from the end, and a chain that was made anew.
    """
    with opened(database) as store:
        found = head_of(store)
    if found is None:
        raise click.ClickException("no request was settled and linked yet; a running server links them every 2 s")
    click.echo(msgspec.json.encode(found).decode())
