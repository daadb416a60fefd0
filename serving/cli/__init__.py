"""The command ``mlflow-llm``. Each subcommand is a module of this package."""

from __future__ import annotations

import sys

import click

from mlflow_llm import __version__

from ..errors import PackagingError, ServingError
from ..visible import visible
from .audit import audit
from .batch import batch
from .bench import bench
from .chat import chat
from .doctor import doctor
from .endpoints import endpoints
from .engine import engine, engine_key
from .keys import keys
from .limits import limits
from .prices import prices
from .serve import serve
from .usage import usage


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Serve language models logged with MLflow."""


for command in (serve, engine, engine_key, keys, limits, prices, usage, audit, endpoints, chat, batch, bench, doctor):
    cli.add_command(command)


def main() -> None:
    """The console script: our own errors in one line, without a trace."""
    try:
        cli()
    except (ServingError, PackagingError) as error:
        click.echo(f"Error: {visible(str(error))}", err=True)
        sys.exit(1)
