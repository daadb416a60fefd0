"""``mlflow-llm completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "mlflow-llm"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that completes commands and options.

    \b
    bash:  mlflow-llm completion bash > ~/.local/share/bash-completion/completions/mlflow-llm
    zsh:   mlflow-llm completion zsh > "${fpath[1]}/_mlflow-llm"
    fish:  mlflow-llm completion fish > ~/.config/fish/completions/mlflow-llm.fish

    The next shell then completes with TAB. For this shell alone: source <(mlflow-llm completion bash)
    """
    from . import COMPLETE, cli

    found = get_completion_class(shell)
    assert found is not None, "click knows all of SHELLS"
    click.echo(found(cli, {}, PROGRAM, COMPLETE).source())
