"""``mlflow-llm receipt``: signed receipts of requests."""

from __future__ import annotations

import json
from typing import BinaryIO
from urllib.parse import quote

import click
import msgspec

from ...http.management.paths import RECEIPT_KEYS, RECEIPTS
from ...metering.proof.receipts import Receipt, choices_with, decode, is_genuine
from ...system.escape import visible_line
from ..http import Client, url_options

PUBLIC_BYTES = 32


@click.group()
def receipt() -> None:
    """Print and verify signed receipts of requests."""


@receipt.command()
@click.argument("request_id")
@url_options
def get(request_id: str, url: str, key: str | None) -> None:
    """Print the receipt of a request as JSON.

    REQUEST_ID is the `id` of the reply, not its X-Request-Id. The key must have sent the request, or see its usage.
    """
    found = Client(url, key).get(RECEIPTS.replace("<name>", quote(request_id, safe="")))
    click.echo(json.dumps(found, indent=2))


@receipt.command()
@click.argument("file", type=click.File("rb"))
@click.option("--public-key", help="The server's public key (64 hexadecimal digits). Without it, the server is asked.")
@click.option("--text", type=click.File("rb"), help="File with a text: also check that it is the answer.")
@url_options
def verify(file: BinaryIO, public_key: str | None, text: BinaryIO | None, url: str, key: str | None) -> None:
    """Verify a receipt.

    FILE (-: standard input) has the receipt as JSON, or as the value of the reply's header. Exits with 1 if the
    signature is not the server's, or the text another one. A public key that you kept works without a server.
    """
    try:
        given = decode(file.read())
    except (ValueError, msgspec.DecodeError) as error:
        raise click.BadParameter(f"no receipt: {error}", param_hint="FILE") from None
    if not is_genuine(given, _public(public_key, url, key)):
        raise click.ClickException("not genuine: the receipt was altered, or signed by another server")
    content = given["receipt"]
    if text is not None and not _is_answer(given, text.read()):
        raise click.ClickException("the receipt is genuine, and the text is not the answer")
    cost = f"{content.get('cost')} {content.get('currency')}".rstrip()
    tokens = f"{content.get('prompt_tokens')} prompt and {content.get('completion_tokens')} completion tokens"
    shown = f"genuine: request {content.get('request_id')} of {content.get('tenant')}, {tokens}, {cost}"
    click.echo(visible_line(shown + ("" if text is None else ", and the text is its answer")))


def _is_answer(given: Receipt, text: bytes) -> bool:
    try:
        said = text.decode()
        found = choices_with(given, said) or choices_with(given, said.removesuffix("\n"))
    except UnicodeDecodeError:
        return False
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    return bool(found)


def _public(given: str | None, url: str, key: str | None) -> bytes:
    if given is None:
        client = Client(url, key)
        with client.understood():
            given = str(client.get(RECEIPT_KEYS)["keys"][0]["public_key"])
    try:
        public = bytes.fromhex(given)
    except ValueError:
        public = b""
    if len(public) != PUBLIC_BYTES:
        raise click.BadParameter("not 64 hexadecimal digits", param_hint="--public-key")
    return public
