"""``mlflow-llm help``: the help of a command, or of what several commands share."""

from __future__ import annotations

from typing import Any

import click

from .serve.help_text import settings_help
from .shared_options import SERVER, SharedOption, shared

SERVER_COMMANDS = (("chat",), ("keys", "create"))  # that have all options of the topic between them
WHERE = """\
Commands that ask a server find it by --url. Those for keys, limits, prices, usage and the audit log can also open the
database itself, with --database, on a machine that reaches it; --url then asks a server instead. An
option whose help names an environment variable can also be set by that variable."""
TOPICS = {SERVER: "options for the server or database, the key and certificates", "settings": "engine settings (-C)"}


@click.command("help", epilog="\b\nTopics:\n" + "\n".join(f"  {name:<10}{text}" for name, text in TOPICS.items()))
@click.argument("words", nargs=-1, metavar="[TOPIC | COMMAND...]")
@click.pass_context
def show(context: click.Context, words: tuple[str, ...]) -> None:
    """Explain shared options, or a command."""
    root = context.find_root()
    if words == (SERVER,):
        click.echo(_server(root))
    elif words == ("settings",):
        click.echo(settings_help().removeprefix("\b\n"))
    else:
        command, inner = _found(root, words)
        click.echo(command.get_help(inner))


def _found(root: click.Context, words: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    """Return the command that the words name. Raises ``UsageError``."""
    command, context = root.command, root
    for word in words:
        inner = command.get_command(context, word) if isinstance(command, click.Group) else None
        if inner is None:
            topics = ", ".join(TOPICS)
            raise click.UsageError(f"{' '.join(words)}: no such command, nor one of the topics {topics}")
        command, context = inner, click.Context(inner, info_name=word, parent=context)
    return command, context


def _server(root: click.Context) -> str:
    found: dict[str, tuple[click.Context, SharedOption]] = {}
    for words in SERVER_COMMANDS:
        command, context = _found(root, words)
        for option in shared(command):
            found.setdefault(str(option.name), (context, option))
    formatter = root.make_formatter()
    formatter.write_paragraph()
    formatter.write_text(WHERE.replace("\n", " "))
    with formatter.section("Options"):
        records: list[Any] = [option.meaning(context) for context, option in found.values()]
        formatter.write_dl([record for record in records if record is not None])
    return formatter.getvalue().strip("\n")
