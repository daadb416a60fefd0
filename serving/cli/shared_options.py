"""Options that many commands share. ``--help`` of a command names them in one line, and one place says what each means:
``mlflow-llm help server``, or the help of ``chat`` for the options of a conversation."""

from __future__ import annotations

import click

SERVER = "server"
CONVERSATION = "chat"  # the command whose help explains the options of a conversation
SUMMARY = "Which server or database, and who asks"


class SharedOption(click.Option):
    """An option that ``mlflow-llm help server`` explains.

    In the help of a command the first of them stands for all.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        together = shared(ctx.command)
        if not together or together[0] is not self:
            return None
        flags = ", ".join(option.opts[0] for option in together)
        needed = "" if not any(option.required for option in together) else "  [required]"
        return flags, f"{SUMMARY}: mlflow-llm help {SERVER}{needed}"

    def meaning(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's own lines of help."""
        return super().get_help_record(ctx)


class ConversationOption(click.Option):
    """An option of a conversation, which the help of ``chat`` explains.

    Another command names its own in ``conversation_options``.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.command.name == CONVERSATION else None


def conversation_options(parameters: list[click.Parameter]) -> str:
    """Return the line that names the options of a conversation among the parameters of a command."""
    names = ", ".join(one.opts[-1] for one in parameters if isinstance(one, ConversationOption))
    return f"Options of the conversation: {names}. Their meanings: mlflow-llm help {CONVERSATION}"


def shared(command: click.Command) -> list[SharedOption]:
    """Return the shared options of a command, in their order."""
    return [one for one in command.params if isinstance(one, SharedOption)]
