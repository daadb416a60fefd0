"""``mlflow-llm endpoints payloads``: the texts of requests that an endpoint's payload log has."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from ...http.management.paths import PAYLOADS
from ...system.escape import visible_line
from ..http import Client, url_options
from . import listing

TEXT_CHARACTERS = 60  # characters of a text in the table
HEAD = ("STARTED (UTC)", "STATUS", "TENANT", "REQUEST ID", "REQUEST", "ANSWER")


@click.command()
@click.argument("name")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 200), help="Requests, the newest first.")
@click.option("--request-id", help="Only this request.")
@click.option("--parquet", type=click.Path(dir_okay=False), help="Write every request to this Parquet file.")
@click.option("--delete", is_flag=True, help="Delete every text of the endpoint.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --delete.")
@url_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the whole texts.")
def payloads(
    name: str,
    limit: int,
    request_id: str | None,
    parquet: str | None,
    delete: bool,
    yes: bool,
    url: str,
    key: str | None,
    as_json: bool,
) -> None:
    """Show the texts of requests to the endpoint NAME.

    An endpoint has them where its payload log is on (endpoints update NAME --payload-log on). They are shown to keys
    with the scope "manage".
    """
    client, path = Client(url, key), PAYLOADS.replace("<name>", quote(name, safe=""))
    if delete and parquet is not None:
        raise click.UsageError("--delete or --parquet, not both")
    if delete:
        client.get(f"{path}?limit=1")  # a name that is wrong is told before the question
        if not yes:
            click.confirm(f"delete the texts of every request to {visible_line(name)}?", abort=True, err=True)
        click.echo(f"deleted the texts of {client.delete(path)['deleted']} requests", err=True)
        return
    if parquet is not None:
        Path(parquet).write_bytes(client.get_bytes(f"{path}?format=parquet"))
        click.echo(f"wrote {parquet}", err=True)
        return
    only = "" if request_id is None else f"&request_id={quote(request_id, safe='')}"
    found = client.get(f"{path}?limit={limit}{only}")["payloads"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    with client.understood():
        listing.table([HEAD, *map(_row, found)])


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    started = datetime.datetime.fromtimestamp(one["started_ms"] / 1000, datetime.UTC)
    texts = [_short(_asked(one["request"])), _short(_said(one["response"]))]
    return (f"{started:%Y-%m-%d %H:%M:%S}", str(one["status_code"]), one["tenant"], one["request_id"], *texts)


def _asked(request: str | None) -> str | None:
    """Return the last message or the prompt of a request, or all of it if it has neither."""
    body = _object(request)
    messages = body.get("messages")
    found = messages[-1] if isinstance(messages, list) and messages else body
    asked = found.get("content", found.get("prompt", found.get("input"))) if isinstance(found, dict) else None
    return asked if isinstance(asked, str) else request


def _said(response: str | None) -> str | None:
    """Return the text of the first choice of a reply, or all of it if there is none."""
    choices = _object(response).get("choices") or [{}]
    said = choices[0].get("text") or choices[0].get("message", {}).get("content")
    return said if isinstance(said, str) else response


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _short(text: str | None) -> str:
    if text is None:
        return "-"
    shown = visible_line(text)
    return shown if len(shown) <= TEXT_CHARACTERS else f"{shown[: TEXT_CHARACTERS - 2]} …"
