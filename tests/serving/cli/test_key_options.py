"""The sources of a command's API key."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.key_options import Secret, SecretFile, key_options


@click.command()
@key_options
def shown(key: str | None) -> None:
    click.echo(key or "none")


def run(*words: str, **options: object) -> Result:
    return CliRunner().invoke(shown, list(words), **options)


def test_a_key_comes_from_many_places(tmp_path: Path) -> None:
    """A key is read from a file (in two spellings), standard input, the environment (which may name a file) or the
    option.
    """
    file = tmp_path / "key"
    file.write_text("  sk-file\n")
    assert run().stdout == "none\n"
    assert run("--key", "sk-here").stdout == "sk-here\n"
    assert run("--key", "-", input="sk-stdin\nmore\n").stdout == "sk-stdin\n"
    for words in (("--key-file", str(file)), ("--key", f"@{file}")):
        assert run(*words, env={"MLFLOW_LLM_KEY": "sk-environment"}).stdout == "sk-file\n"
    assert run(env={"MLFLOW_LLM_KEY": "sk-environment"}).stdout == "sk-environment\n"
    assert run(env={"MLFLOW_LLM_KEY": f"@{file}"}).stdout == "sk-file\n"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--key", "@/no/such/file"), "/no/such/file: No such file"),
        (("--key-file", "/no/such/file"), "/no/such/file: No such file"),
        (("--key", "-"), "standard input contains no key"),
        (("--key", "sk-two words"), "the value contains no key"),
        (("--key", "sk-x", "--key-file", "/dev/null"), "contains no key"),
    ],
)
def test_invalid_keys_are_refused(words: tuple[str, ...], reported: str) -> None:
    """An invalid key is refused without being shown."""
    done = run(*words, input="")
    assert (done.exit_code, reported in done.stderr, "two words" in done.stderr) == (2, True, False), done.stderr


def test_two_keys_are_refused(tmp_path: Path) -> None:
    """Giving both --key and --key-file is refused."""
    file = tmp_path / "key"
    file.write_text("sk-file")
    assert "give one of them" in run("--key", "sk-x", "--key-file", str(file)).stderr


def test_every_command_that_takes_a_key_takes_it_so() -> None:
    """Every command that takes a key has the same options, and its help warns that a key on the command line is
    visible.
    """
    commands = dict(cli.commands) | dict(cli.commands["keys"].commands)
    for name in ("chat", "bench", "endpoints", "audit", "create", "list", "rotate"):
        options = {opt: option for option in commands[name].params for opt in option.opts}
        assert isinstance(options["--key"].type, Secret), name
        assert isinstance(options["--key-file"].type, SecretFile), name
        assert "on the command line in ps" in options["--key"].help
