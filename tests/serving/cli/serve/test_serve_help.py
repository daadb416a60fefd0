"""The help of ``serve``, the completion of shells, and the schema of spec files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import COMPLETE, cli
from mlflow_llm.serving.cli.serve.help_text import GROUPS, OTHERS, first_sentence
from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec
from mlflow_llm.serving.cli.serve.spec_schema import KINDS, schema
from mlflow_llm.serving.cli.shared_options import SUMMARY, ConversationOption, SharedOption
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.settings import EngineSettings

ROOT = Path(__file__).parents[4]


def shown(*words: str) -> str:
    return CliRunner().invoke(cli, [*words, "--help"], terminal_width=100).stdout


def test_every_option_of_serve_is_in_a_group() -> None:
    """The headings come in order, every option is under one of them, and only --help is left over."""
    text = shown("serve")
    places = [text.index(f"\n{heading}:\n") for heading in (*GROUPS, OTHERS)]
    assert places == sorted(places)
    options = {one.name for one in cli.commands["serve"].params if isinstance(one, click.Option)}
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(options)
    [left] = text[places[-1] :].strip().split("\n\n")[0].splitlines()[1:]
    # click keeps the option of whoever asked first, which may be a test without the group's settings and its -h
    assert left.endswith("--help  Show this message and exit.")


def test_engine_settings_have_their_meaning() -> None:
    """Each engine setting is followed by what it does; the examples come last."""
    text = shown("serve")
    for name, meaning in EngineSettings.meanings().items():
        assert meaning
        if name != "in_process":
            assert first_sentence(meaning).split()[0] in text.partition(f"  {name} = ")[2].split("\n")[1]
    assert text.index("Engine settings (-C KEY=VALUE)") < text.index("Examples:")


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            yield from commands(inner, (*words, name))
    else:
        yield words, command


def test_shared_options_are_explained_once() -> None:
    """Options for a server have one line together in each command's help, and their meanings in ``help server``."""
    once = CliRunner().invoke(cli, ["help", "server"]).stdout
    count = 0
    for words, command in commands(cli):
        found = [one for one in command.params if isinstance(one, SharedOption)]
        if not found:
            continue
        count += 1
        text = " ".join(shown(*words).split())
        assert f"{', '.join(one.opts[0] for one in found)} {SUMMARY}" in text, words
        assert all(str(one.help)[:30] not in text for one in found), words
        assert all(re.search(rf"^  {one.opts[0]} ", once, re.MULTILINE) for one in found), words
    assert count > 20


def test_options_of_a_conversation_are_explained_once() -> None:
    """``chat --help`` explains them, ``run --help`` names each and says where, and repeats none of the texts."""
    explained, named = (" ".join(shown(word).split()) for word in ("chat", "run"))
    found = [one for one in cli.commands["run"].params if isinstance(one, ConversationOption)]
    assert len(found) == 10
    for one in found:
        text = " ".join(str(one.help).split())
        assert text in explained
        assert text not in named
        assert f"{one.opts[-1]}, " in named or f"{one.opts[-1]}. " in named
    assert "mlflow-llm help chat" in named
    others = {one.opts[0] for one in cli.commands["run"].params if isinstance(one, click.Option)}
    assert others - {one.opts[0] for one in found} == {"-C", "--model"}


@pytest.mark.parametrize("flag", ["--url", "--key", "--key-file", "--ca", "--cert", "--database"])
def test_no_command_repeats_a_shared_option(flag: str) -> None:
    """An option of that name in any command but those that start something is the shared one."""
    own = {"serve": {"--database"}, "engine": {"--key-file"}}
    for words, command in commands(cli):
        for one in command.params:
            if flag in one.opts and flag not in own.get(words[0], ()):
                assert isinstance(one, SharedOption), words


def test_help_of_commands_and_settings() -> None:
    """``help COMMAND`` is its ``--help``, ``help settings`` the list of ``serve --help``; others are refused."""
    asked = CliRunner().invoke(cli, ["help", "keys", "create"], terminal_width=100).stdout
    assert "--tenant" in asked
    settings = CliRunner().invoke(cli, ["help", "settings"]).stdout
    assert settings.strip() in "\n".join(line.removeprefix("  ") for line in shown("serve").splitlines())
    refused = CliRunner().invoke(cli, ["help", "keys", "nothing"])
    assert (refused.exit_code, "keys nothing: no such command" in refused.stderr) == (2, True)


def test_examples_are_commands_that_parse() -> None:
    """Each example names options that ``serve`` has."""
    options = {name for one in cli.commands["serve"].params for name in one.opts}
    lines = re.findall(r"mlflow-llm serve (.+)", shown("serve").partition("Examples:")[2])
    assert len(lines) >= 5
    for line in lines:
        assert {word for word in line.split("   ")[0].split() if word.startswith("-")} <= options, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    """The script of each shell names the program and the variable that the program answers to."""
    text = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert COMPLETE in text
    assert "mlflow-llm" in text


@pytest.mark.parametrize(
    ("typed", "found"), [("mlflow-llm mod", "models"), ("mlflow-llm serve --max-q", "--max-queued")]
)
def test_the_program_completes(typed: str, found: str) -> None:
    """The program answers a shell that asks what can follow."""
    asked = {COMPLETE: "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    code = "import sys; sys.argv = ['mlflow-llm']; from mlflow_llm.serving.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert f"plain,{found}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", "data/bash-completion/completions/mlflow-llm"),
        ("zsh", "data/zsh/site-functions/_mlflow-llm"),
        ("fish", "config/fish/completions/mlflow-llm.fish"),
    ],
)
def test_completion_is_installed(shell: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--install makes the shell's directory and writes the script there, for the user's shell if none is named."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)
    monkeypatch.delenv("ZDOTDIR", raising=False)
    printed = CliRunner().invoke(cli, ["completion", shell]).stdout
    done = CliRunner().invoke(cli, ["completion", "--install"])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / place) in done.stdout
    assert (tmp_path / place).read_text().strip() == printed.strip()
    assert ("fpath+=" in done.stdout) == (shell == "zsh")


@pytest.mark.parametrize("shell", ["", "/bin/tcsh"])
def test_completion_of_an_unknown_shell(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command asks for the shell's name if the user's shell is none that can be completed."""
    monkeypatch.setenv("SHELL", shell)
    done = CliRunner().invoke(cli, ["completion", "--install"])
    assert done.exit_code == 2
    assert "name the shell, one of bash, zsh, fish" in done.stderr


def test_completion_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is no directory is named, without a traceback."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    done = CliRunner().invoke(cli, ["completion", "fish", "--install"])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {tmp_path}/file/")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """A bash that has read the script completes a command by asking the program."""
    script = tmp_path / "completion"
    script.write_text(CliRunner().invoke(cli, ["completion", "bash"]).stdout)
    program = tmp_path / "mlflow-llm"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c "
        '\'import sys; sys.argv[0] = "mlflow-llm"; from mlflow_llm.serving.cli import main; main()\' "$@"\n'
    )
    program.chmod(0o755)
    typed = (
        f"source {script}; COMP_WORDS=(mlflow-llm endp); COMP_CWORD=1; "
        "$(complete -p mlflow-llm | sed -E 's/.*-F ([^ ]+).*/\\1/') mlflow-llm endp; echo ${COMPREPLY[@]}"
    )
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", typed], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["endpoints"], done.stderr


def spec_schema(kind: str) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(cli, ["spec", "schema", kind]).stdout)


def test_the_schema_is_of_the_types() -> None:
    """The schema has each field of the specs and each setting, with its meaning, and is a valid schema itself."""
    for kind, made in KINDS.items():
        found = spec_schema(kind)
        jsonschema.Draft202012Validator.check_schema(found)
        fields = {field.encode_name for field in msgspec.structs.fields(made)}
        assert set(found["$defs"][made.__name__]["properties"]) == fields
    defs = spec_schema("serve")["$defs"]
    for settings in (ServerSettings, EngineSettings):
        assert set(defs[settings.__name__]["properties"]) == set(settings.__struct_fields__)
    assert "tokens of prompt and completion" in defs["EngineSettings"]["properties"]["max_model_len"]["description"]


@pytest.mark.parametrize(
    ("spec", "is_valid"),
    [
        ({}, True),
        ({"settings": {"port": 9000}, "engine": {"kv_cache_memory": "8GiB"}}, True),
        ({"settings": {"engine_memory_budget": "12 GB"}, "engine": {"dtype": "bfloat16"}}, True),
        ({"settings": {"port": 70000}}, False),
        ({"settings": {"prot": 1}}, False),
        ({"engine": {"dtype": "half"}}, False),
        ({"engine": {"kv_cache_memory": "lots"}}, False),
        ({"profile": "closed"}, False),
        ({"extra": 1}, False),
    ],
)
def test_the_schema_and_the_reader_agree(spec: dict[str, Any], is_valid: bool, tmp_path: Path) -> None:
    """A spec that the schema allows is read, and one that it forbids is refused."""
    errors = list(jsonschema.Draft202012Validator(schema("serve")).iter_errors(spec))
    assert (not errors) == is_valid
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    if is_valid:
        read_serve_spec(str(file))
    else:
        with pytest.raises(click.ClickException, match=r"--spec .*spec\.json: "):
            read_serve_spec(str(file))


def test_the_pages_example_is_valid(tmp_path: Path) -> None:
    """The example of the page about spec files is read, and fits the schema."""
    (example,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/spec.md").read_text(), re.DOTALL)
    jsonschema.validate(json.loads(example), schema("serve"))
    file = tmp_path / "spec.json"
    file.write_text(example)
    assert read_serve_spec(str(file)).settings.port == 9000
