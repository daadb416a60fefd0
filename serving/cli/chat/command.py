"""``mlflow-llm chat``: a conversation in the terminal, streamed, with a server or with a model of this machine."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import click

from ..system.escape import visible, visible_line
from .http import Client, first_model, url_options
from .local_model import LocalModel
from .terminal import Wrapped, turns

Messages = list[dict[str, Any]]
INTERRUPTED = 130  # as shells say it of what SIGINT ended
HELP = """\
/new                 start a new conversation
/set FIELD VALUE     set a request field, such as /set temperature 0.2 or /set system "Answer in French."
/set [FIELD]         unset a field; without FIELD, show the fields that are set
/model [NAME]        switch to another endpoint or endpoint:adapter; without NAME, list them
/help                show this help
/bye                 end the conversation, like Ctrl-D
Alt-Enter begins a new line. A paste of several lines is one message. Ctrl-C stops an answer or clears the line.
//… sends a message that begins with a slash."""


class Server(Protocol):
    """The other side of a conversation: a ``Client`` of a server, or a ``LocalModel``."""

    def get(self, path: str) -> Any: ...
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...
    def understood(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(slots=True)
class Conversation:
    """The state of a chat: ``fields`` of every request, and ``messages`` so far without the system message."""

    server: Server
    fields: dict[str, Any]
    system: str | None
    stats: bool
    messages: Messages = field(default_factory=list)

    def body(self, messages: Messages) -> dict[str, Any]:
        start: Messages = [{"role": "system", "content": self.system}] if self.system else []
        return self.fields | {
            "messages": [*start, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@click.command()
@url_options
@click.option(
    "-m", "--model-uri", help="Run this logged model, Hugging Face directory or hub id here, without a server."
)
@click.option(
    "-C", "--config", "config", multiple=True, metavar="KEY=VALUE", help="With -m: engine setting; repeatable."
)
@click.option("--model", help="Endpoint or endpoint:adapter (default: the server's first).")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--temperature", type=click.FloatRange(0, 2))
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--stats", is_flag=True, help="Print tokens and times of each answer on standard error.")
@click.argument("message", required=False)
def chat(
    url: str,
    key: str | None,
    model_uri: str | None,
    config: tuple[str, ...],
    model: str | None,
    system: str | None,
    stats: bool,
    message: str | None,
    **sampling: Any,
) -> None:
    """Chat with a model.

    With MESSAGE, the command prints one answer. Without it, the command holds a conversation: Ctrl-C stops an answer or
    clears the line, /help lists further commands, and Ctrl-D ends the conversation.
    """
    fields = {name: value for name, value in sampling.items() if value is not None}
    if config and model_uri is None:
        raise click.UsageError("-C goes with -m; a server has its own settings")
    with contextlib.ExitStack() as stack:
        server: Server
        if model_uri is None:
            server = client = Client(url, key)
            fields["model"] = model or first_model(client)
        else:
            server = stack.enter_context(LocalModel.loaded(model_uri, config))
            fields["model"] = server.get("/v1/models")["data"][0]["id"]
        talk = Conversation(server, fields, system, stats)
        if model_uri is not None and model:  # a loaded model takes any name for its own, as OpenAI's clients need it
            _choose(talk, model)
        if message is None:
            _converse(talk)
        elif _answer(talk, [{"role": "user", "content": message}])[1]:
            raise SystemExit(INTERRUPTED)


def _converse(talk: Conversation) -> None:
    """Hold a conversation. A turn that fails is removed, and the conversation goes on."""
    failed = False
    for text in turns(f"chatting with {visible_line(str(talk.fields['model']))}; /help lists commands, Ctrl-D quits"):
        try:
            if text.startswith("/") and not text.startswith("//"):
                if _command(talk, text.strip()):
                    break
                continue
            _turn(talk, text.removeprefix("/") if text.startswith("//") else text)
        except click.ClickException as error:
            error.show()
            failed = True
    if failed and not sys.stdin.isatty():
        raise SystemExit(1)


def _turn(talk: Conversation, text: str) -> None:
    messages = [*talk.messages, {"role": "user", "content": text}]
    answer, _ = _answer(talk, messages)
    if answer:  # else it was stopped before anything came
        talk.messages = [*messages, {"role": "assistant", "content": answer}]


def _command(talk: Conversation, line: str) -> bool:
    """Execute a slash command; True ends the conversation. Raises ``ClickException``."""
    word, _, rest = line.partition(" ")
    match word:
        case "/bye" | "/exit" | "/quit":
            return True
        case "/new":
            talk.messages = []
        case "/set":
            _set(talk, *rest.split(maxsplit=1))
        case "/model":
            _choose(talk, rest.strip())
        case "/help" | "/?":
            click.echo(HELP, err=True)
        case _:
            raise click.ClickException(
                f"{word} is not a command; /help lists them, //… sends a message that begins with a slash"
            )
    return False


def _set(talk: Conversation, name: str = "", value: str | None = None) -> None:
    """Set a request field, to be checked by the server. The value is JSON where it parses as such, else a string."""
    if name == "model":
        _choose(talk, value or "")
    elif name == "system":
        talk.system = _value(value) if value else None
    elif name in ("messages", "stream", "stream_options"):
        raise click.ClickException(f"{name} is set by the conversation itself")
    elif value is not None:
        talk.fields[name] = _value(value)
    elif name:
        talk.fields.pop(name, None)
    if not name:
        shown = talk.fields | ({"system": talk.system} if talk.system else {})
        click.echo(
            "\n".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in shown.items()), err=True
        )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _choose(talk: Conversation, name: str) -> None:
    with talk.server.understood():
        names = [entry["id"] for entry in talk.server.get("/v1/models")["data"]]
    if not name:
        click.echo(
            "\n".join(f"{'*' if one == talk.fields['model'] else ' '} {visible_line(one)}" for one in names), err=True
        )
    elif name.partition(":")[0] not in {one.partition(":")[0] for one in names}:
        raise click.ClickException(f"there is no {name}; available: {', '.join(names)}")
    else:
        talk.fields["model"] = name


def _answer(talk: Conversation, messages: Messages) -> tuple[str, bool]:
    """Print the reply as it is generated and return ``(text, stopped)``; Ctrl-C stops this reply alone.

    Raises ``ClickException``.
    """
    parts: list[str] = []
    last: dict[str, Any] = {}
    started = time.perf_counter()
    first, stopped, cut = None, False, False
    shown = Wrapped.on_stdout()
    try:
        with (
            talk.server.understood(),
            contextlib.closing(talk.server.stream("/v1/chat/completions", talk.body(messages))) as chunks,  # type: ignore[type-var]
        ):
            for chunk in chunks:
                last |= {name: value for name, value in chunk.items() if value}
                for choice in chunk["choices"]:
                    cut = cut or choice.get("finish_reason") == "length"
                    if text := choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        parts.append(text)
                        shown.write(visible(text))
    except KeyboardInterrupt:
        stopped = True
        click.echo(" [stopped]" if parts else "[stopped]", nl=False)
    finally:
        if parts or stopped:
            click.echo()
    with talk.server.understood():
        if cut:
            click.echo(
                f"[cut off after {last['usage']['completion_tokens']} tokens: max_tokens or end of context]", err=True
            )
        if talk.stats:
            _show_stats(last, started, first or time.perf_counter(), time.perf_counter())
    return "".join(parts), stopped


def _show_stats(last: dict[str, Any], started: float, first: float, ended: float) -> None:
    usage = last.get("usage")
    if usage is None:  # a stopped answer: what it cost is in the server's ledger
        click.echo(f"[stopped after {ended - started:.2f} s]", err=True)
        return
    tokens = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    pace = f", {(tokens - 1) / (ended - first):.1f} tokens/s" if tokens > 1 and ended > first else ""
    click.echo(
        f"[{usage['prompt_tokens']} prompt tokens ({cached} cached), {tokens} new; "
        f"first after {(first - started) * 1e3:.0f} ms{pace}; {visible_line(str(last['id']))}]",
        err=True,
    )
