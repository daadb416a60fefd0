"""Options that many commands share. ``--help`` of a command names them in one line, and ``mlflow-llm help server`` says
what each means."""

from __future__ import annotations

import click

SERVER = "server"
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


def shared(command: click.Command) -> list[SharedOption]:
    """Return the shared options of a command, in their order."""
    return [one for one in command.params if isinstance(one, SharedOption)]
