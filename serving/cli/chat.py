"""``mlflow-llm chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

from typing import Any

import click

from .http import Client, url_options


@click.command()
@url_options
@click.option("--model", help="endpoint or endpoint:adapter (default: the server's first).")
@click.option("--system", help="A system message.")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--temperature", type=click.FloatRange(0, 2))
@click.argument("message", required=False)
def chat(
    url: str,
    key: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    message: str | None,
) -> None:
    """Chat with a model. With MESSAGE: one answer; without: a conversation, ended by Ctrl-D."""
    client = Client(url, key)
    options: dict[str, Any] = {"model": model or client.get("/v1/models")["data"][0]["id"], "stream": True}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        if message is None:
            try:
                message = input("> ")
            except (EOFError, KeyboardInterrupt):
                click.echo()
                return
            if not message.strip():
                message = None
                continue
            alone = False
        else:
            alone = not (len(messages) > 1)
        messages.append({"role": "user", "content": message})
        text = _answer(client, {**options, "messages": messages})
        if alone:
            return
        messages.append({"role": "assistant", "content": text})
        message = None


def _answer(client: Client, body: dict[str, Any]) -> str:
    """Print the reply as it comes; Ctrl-C stops this reply alone. The text."""
    parts: list[str] = []
    chunks = client.stream("/v1/chat/completions", body)
    try:
        for chunk in chunks:
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                parts.append(text)
                click.echo(text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False)
    finally:
        chunks.close()  # type: ignore[attr-defined]
    click.echo()
    return "".join(parts)
