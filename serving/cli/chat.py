"""``mlflow-llm chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from .http import Client, first_model, url_options

Messages = list[dict[str, Any]]
INTERRUPTED = 130  # as shells say it of what SIGINT ended


@click.command()
@url_options
@click.option("--model", help="endpoint or endpoint:adapter (default: the server's first).")
@click.option("--system", help="A system message.")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--temperature", type=click.FloatRange(0, 2))
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--stats", is_flag=True, help="After each answer its tokens and times, on standard error.")
@click.argument("message", required=False)
def chat(
    url: str,
    key: str | None,
    model: str | None,
    system: str | None,
    stats: bool,
    message: str | None,
    **sampling: Any,
) -> None:
    """Chat with a model. With MESSAGE: one answer.

    Without: a conversation. Ctrl-C stops an answer or drops the line, /new starts over, Ctrl-D ends.
    """
    client = Client(url, key)
    body = {name: value for name, value in sampling.items() if value is not None}
    body["model"] = model or first_model(client)
    start: Messages = [{"role": "system", "content": system}] if system else []
    if message is not None:
        _, stopped = _answer(client, body, [*start, {"role": "user", "content": message}], stats)
        if stopped:
            raise SystemExit(INTERRUPTED)
        return
    _converse(client, body, start, stats)


def _converse(client: Client, body: dict[str, Any], start: Messages, stats: bool) -> None:
    """Turn by turn; a turn that the server refuses is taken back, and the conversation goes on."""
    messages = list(start)
    failed = False
    for line in _lines(f"chatting with {body['model']}; /new starts over, Ctrl-D ends"):
        if line.strip() == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            text, _ = _answer(client, body, messages, stats)
        except click.ClickException as error:
            error.show()
            messages.pop()
            failed = True
            continue
        if text:
            messages.append({"role": "assistant", "content": text})
        else:  # stopped before anything came
            messages.pop()
    if failed and not sys.stdin.isatty():
        raise SystemExit(1)


def _lines(greeting: str) -> Iterator[str]:
    """What the user types, without empty lines; from a pipe without greeting and prompt."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing and history
        click.echo(greeting, err=True)
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                click.echo()
            return
        except KeyboardInterrupt:  # may be meant for an answer that has just ended
            if not terminal:
                raise SystemExit(INTERRUPTED) from None
            click.echo("\n[Ctrl-D ends]")
            continue
        if line.strip():
            yield line


def _answer(client: Client, body: dict[str, Any], messages: Messages, stats: bool) -> tuple[str, bool]:
    """Print the reply as it comes; Ctrl-C stops this reply alone. (text, stopped). Raises ``ClickException``."""
    parts: list[str] = []
    last: dict[str, Any] = {}
    started = time.perf_counter()
    first, stopped = None, False
    request = body | {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with (
            client.understood(),
            contextlib.closing(client.stream("/v1/chat/completions", request)) as chunks,  # type: ignore[type-var]
        ):
            for chunk in chunks:
                last |= {name: value for name, value in chunk.items() if value}
                for text in (choice["delta"].get("content") for choice in chunk["choices"]):
                    if text:
                        first = first or time.perf_counter()
                        parts.append(text)
                        click.echo(text, nl=False)
    except KeyboardInterrupt:
        stopped = True
        click.echo(" [stopped]" if parts else "[stopped]", nl=False)
    finally:
        if parts or stopped:
            click.echo()
    if stats:
        with client.understood():
            _tell(last, started, first or time.perf_counter(), time.perf_counter())
    return "".join(parts), stopped


def _tell(last: dict[str, Any], started: float, first: float, ended: float) -> None:
    usage = last.get("usage")
    if usage is None:  # a stopped answer: what it cost is in the server's ledger
        click.echo(f"[stopped after {ended - started:.2f} s]", err=True)
        return
    tokens = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    pace = f", {(tokens - 1) / (ended - first):.1f} tokens/s" if tokens > 1 and ended > first else ""
    click.echo(
        f"[{usage['prompt_tokens']} prompt tokens ({cached} cached), {tokens} new; "
        f"first after {(first - started) * 1e3:.0f} ms{pace}; {last['id']}]",
        err=True,
    )
