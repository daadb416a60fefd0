"""``mlflow-llm top``: the engines of a server, live."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator

import click

from ...system.escape import visible_line
from ..http import Client, url_options
from .engine_table import engines, lines
from .server_state import Sample, sample

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
SNAPSHOT_SECONDS = 1.0


@click.command()
@url_options
@click.option(
    "--interval", default=2.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds between two views."
)
@click.option("--once", is_flag=True, help="Print one view, as where standard output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one view as JSON.")
def top(url: str, key: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show engines live.

    For each served model: state, replicas, sequences in the batch, requests that wait, use of the KV cache, share of
    prompt tokens that the prefix cache held, tokens a second, memory, and adapters with the tokens that they have
    generated. Rates are those since the last view. Ctrl-C ends it.
    """
    client = Client(url, key, timeout=30)
    if once or as_json or not sys.stdout.isatty():
        _print_once(client, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt), _screen():
        before: Sample | None = None
        while True:
            before = _draw(client, before, url)
            time.sleep(interval)


def _print_once(client: Client, *, as_json: bool) -> None:
    """Print one view, whose rates are those of a second."""
    before = sample(client)
    if not before.refused:
        time.sleep(SNAPSHOT_SECONDS)
    found, _ = engines(client, before)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))


def _draw(client: Client, before: Sample | None, url: str) -> Sample | None:
    """Show the engines, or that the server does not answer, in which case the next view is tried again."""
    head = f"mlflow-llm top  {visible_line(url)}  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
    try:
        found, now = engines(client, before)
        shown = [head, "", *lines(found)]
    except click.ClickException as error:
        shown, now = [head, "", visible_line(error.message)], Sample(at=time.monotonic(), refused=error.message)
    columns, rows = shutil.get_terminal_size()
    text = "".join(f"{line[:columns]}{REST_OF_LINE}\r\n" for line in shown[: rows - 1])
    click.echo(HOME + text + REST_OF_SCREEN, nl=False)
    return None if now.refused else now


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's second screen, and give back the first as it was."""
    click.echo(ENTER, nl=False)
    try:
        yield
    finally:
        click.echo(LEAVE, nl=False)
