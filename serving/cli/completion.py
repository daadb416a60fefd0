"""``mlflow-llm completion``: the script with which a shell completes commands and options, printed or installed."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ..system.escape import visible_line

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "mlflow-llm"
BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"  # without it bash looks for no user's scripts


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option(
    "--install", is_flag=True, help="Write the script to where the shell looks for it, and say where that is."
)
def completion(shell: str | None, install: bool) -> None:
    """Print or install a script that completes commands and options.

    By default, the shell is that of the variable SHELL. With --install, the next shell completes with TAB; if it needs
    something else for that, the command says what. For this shell alone: source <(mlflow-llm completion bash)
    """
    from . import COMPLETE, cli

    name = shell or _shell_of_user()
    found = get_completion_class(name)
    assert found is not None, "click knows all of SHELLS"
    script = found(cli, {}, PROGRAM, COMPLETE).source()
    if not install:
        click.echo(script)
        return
    path = _place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{script.rstrip()}\n")
    except OSError as error:
        raise click.ClickException(f"{visible_line(str(path))}: {error.strerror}") from None
    click.echo(f"wrote {visible_line(str(path))}; the next {name} completes {PROGRAM} with TAB")
    if hint := _hint(name, path):
        click.echo(hint)


def _shell_of_user() -> str:
    """Return the user's shell. Raises ``UsageError`` for one that is not known."""
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"name the shell, one of {', '.join(SHELLS)}: the variable SHELL is none of them")
    return name


def _place(shell: str) -> Path:
    """Return the file in which a shell looks for a user's completions of this program."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    if shell == "bash":
        own = os.environ.get("BASH_COMPLETION_USER_DIR")
        return (Path(own) if own else data / "bash-completion") / "completions" / PROGRAM
    if shell == "zsh":
        return data / "zsh/site-functions" / f"_{PROGRAM}"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / f"fish/completions/{PROGRAM}.fish"


def _hint(shell: str, path: Path) -> str:
    """Return what a user must do so that the shell reads ``path``; "" if nothing."""
    if shell == "bash" and not os.path.exists(BASH_COMPLETION):
        return f"bash needs the package bash-completion for that, or this line in ~/.bashrc: source {path}"
    if shell == "zsh" and str(path.parent) not in _text(Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"):
        return f"zsh needs this line in .zshrc, before compinit: fpath+=({path.parent})"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
