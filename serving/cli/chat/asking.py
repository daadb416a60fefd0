"""Asking for a reply, and showing it while it is generated."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click

from ...system.escape import visible, visible_line
from ..terminal import Wrapped
from .conversation import MAX_TOKENS, Asked, Conversation, Messages
from .message_parts import images_in

PATH = "/v1/chat/completions"
STOPPED = "stopped"
TEXT_ONLY = "reads text only"  # in the refusal of an image


def ask(talk: Conversation, messages: Messages) -> Asked:
    """Print the reply to ``messages`` as it is generated and return it; Ctrl-C stops this reply alone.

    Raises ``ClickException``.
    """
    try:
        found, stopped = _streamed(talk, talk.body(messages))
    except click.ClickException as error:
        if TEXT_ONLY in error.message and images_in(messages[-1]):
            raise click.ClickException(f"{visible_line(talk.model)} reads text only; it takes no images") from None
        if not _has_no_room(talk, error.message):
            raise
        found, stopped = _streamed(talk, talk.body(messages, bounded=False))  # the rest of the context is shorter
    with talk.server.understood():
        asked = Asked(
            text="".join(found.parts),
            finish=STOPPED if stopped else found.finish,
            usage=found.last.get("usage"),
            request_id=str(found.last.get("id", "")),
            first=None if found.first is None else found.first - found.started,
            seconds=time.perf_counter() - found.started,
        )
        _tell_defaults(talk)
        _tell_end(talk, asked)
    talk.created = talk.created or found.last.get("created")
    talk.asked.append(asked)
    return asked


class _Stream:
    """The part of a reply that has come so far."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.last: dict[str, Any] = {}
        self.first: float | None = None
        self.finish = ""
        self.started = time.perf_counter()

    def add(self, chunk: dict[str, Any], shown: Wrapped) -> None:
        self.last |= {name: value for name, value in chunk.items() if value}
        for choice in chunk["choices"]:
            self.finish = choice.get("finish_reason") or self.finish
            if text := choice["delta"].get("content"):
                self.first = self.first or time.perf_counter()
                self.parts.append(text)
                shown.write(visible(text))


def _streamed(talk: Conversation, body: dict[str, Any]) -> tuple[_Stream, bool]:
    """Print a reply and return it, with whether the user stopped it."""
    found, stopped = _Stream(), False
    shown = Wrapped.on_stdout()
    try:
        with (
            talk.server.understood(),
            contextlib.closing(talk.server.stream(PATH, body)) as chunks,  # type: ignore[type-var]
        ):
            for chunk in chunks:
                found.add(chunk, shown)
    except KeyboardInterrupt:
        stopped = True
        click.echo(" [stopped]" if found.parts else "[stopped]", nl=False)
    finally:
        if found.parts or stopped:
            click.echo()
    return found, stopped


def _has_no_room(talk: Conversation, message: str) -> bool:
    """Return whether a refusal says that the bound which this command set does not fit behind the prompt."""
    return "max_tokens" in talk.defaults() and f"max_tokens: {MAX_TOKENS} does not fit" in message


def _tell_defaults(talk: Conversation) -> None:
    """Say once in a conversation that its temperature is this command's choice."""
    temperature = talk.defaults().get("temperature")
    if temperature is None or talk.told_defaults:
        return
    talk.told_defaults = True
    click.echo(
        f"[temperature {temperature}: the model has no sampling values of its own; --temperature or /set changes it]",
        err=True,
    )


def _tell_end(talk: Conversation, asked: Asked) -> None:
    if asked.finish == "length" and asked.usage is not None:
        tokens = asked.usage["completion_tokens"]
        if "max_tokens" in talk.defaults() and tokens == MAX_TOKENS:
            why = "a reply's bound in the terminal; --max-tokens or /set max_tokens changes it"
        else:
            why = "max_tokens or end of context"
        click.echo(f"[cut off after {tokens} tokens: {why}]", err=True)
    if talk.stats:
        click.echo(stats(asked), err=True)


def stats(asked: Asked) -> str:
    """Return tokens and times of a reply in one line."""
    if asked.usage is None:  # a stopped reply: what it cost is in the server's ledger
        return f"[stopped after {asked.seconds:.2f} s]"
    tokens, first = asked.usage["completion_tokens"], asked.seconds if asked.first is None else asked.first
    cached = (asked.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    pace = "" if asked.tokens_per_second is None else f", {asked.tokens_per_second:.1f} tokens/s"
    return (
        f"[{asked.usage['prompt_tokens']} prompt tokens ({cached} cached), {tokens} new; "
        f"first after {first * 1e3:.0f} ms{pace}; {visible_line(asked.request_id)}]"
    )
