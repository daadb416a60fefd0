"""Options that many commands share. ``--help`` of a command names them in one line, and ``mlflow-llm help TOPIC`` says
what each means."""

from __future__ import annotations

from typing import Any

import click

SERVER = "server"
SUMMARY = {SERVER: "Which server or database, and who asks"}


class SharedOption(click.Option):
    """An option that belongs to a topic of ``mlflow-llm help``.

    In the help of a command the first option of a topic stands for all of them.
    """

    def __init__(self, *given: Any, topic: str = SERVER, **attributes: Any) -> None:
        super().__init__(*given, **attributes)
        self.topic = topic

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        together = shared(ctx.command, self.topic)
        if not together or together[0] is not self:
            return None
        flags = ", ".join(option.opts[0] for option in together)
        needed = "" if not any(option.required for option in together) else "  [required]"
        return flags, f"{SUMMARY[self.topic]}: mlflow-llm help {self.topic}{needed}"

    def meaning(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's own lines of help."""
        return super().get_help_record(ctx)


def shared(command: click.Command, topic: str) -> list[SharedOption]:
    """Return the options of a command that belong to a topic, in their order."""
    return [one for one in command.params if isinstance(one, SharedOption) and one.topic == topic]
