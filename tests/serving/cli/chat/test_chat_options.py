"""``chat`` with standard input, images, schemas, recorded and saved conversations, and its own defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from serving_process import Running

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.chat.log_database import LogDatabase, LoggedTurn
from mlflow_llm.serving.cli.chat.message_parts import image_file
from mlflow_llm.serving.cli.chat.output_schema import schema_of

Command = Callable[..., Result]
PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
SHORT = ("--temperature", "0", "--max-tokens", "2")


def recorded(state: Path) -> list[LoggedTurn]:
    database = LogDatabase(state, make=False)
    found = database.newest(None)
    database.close()
    return found


def test_a_reply_is_bounded_and_warm(command: Command, state: Path) -> None:
    """Without values of its own a model answers at 0.7, in at most 1024 tokens; both are said, and recorded."""
    done = command("chat", "--seed", "1", "Hello")
    assert done.stderr.splitlines() == [
        "[temperature 0.7: the model has no sampling values of its own; --temperature or /set changes it]",
        "[cut off after 1024 tokens: a reply's bound in the terminal; --max-tokens or /set max_tokens changes it]",
    ]
    (turn,) = recorded(state)
    assert (turn.completion_tokens, turn.finish, turn.fields) == (1024, "length", {"seed": 1})
    assert turn.defaults == {"temperature": 0.7, "max_tokens": 1024}
    assert turn.reply + "\n" == done.stdout


def test_the_bound_gives_way_to_a_long_prompt(command: Command, state: Path) -> None:
    """If less than the bound is left of the context, the reply gets what is left and is not refused."""
    done = command("chat", "--temperature", "0", "x" * 8000)
    assert done.exit_code == 0, done.output
    (turn,) = recorded(state)
    assert turn.prompt_tokens is not None
    assert turn.completion_tokens is not None
    assert turn.prompt_tokens + turn.completion_tokens == 8192
    assert "max_tokens or end of context" in done.stderr


def test_a_bound_that_the_user_set_is_refused(command: Command) -> None:
    """A bound of the user's that does not fit is refused as it is."""
    done = command("chat", "--max-tokens", "1024", "x" * 8000)
    assert (done.exit_code, "max_tokens: 1024 does not fit" in done.stderr) == (1, True)


def test_standard_input_is_put_before_the_message(command: Command, state: Path) -> None:
    """Standard input comes before MESSAGE in one message; an empty pipe changes nothing."""
    command("chat", *SHORT, "Summarise", input="One\nTwo\n")
    command("chat", *SHORT, "Summarise", input="")
    assert [turn.prompt for turn in recorded(state)] == ["One\nTwo\n\nSummarise", "Summarise"]


def test_bytes_on_standard_input_are_refused(command: Command) -> None:
    """Standard input that is not text is an error in one line, with the option for images."""
    done = command("chat", *SHORT, "What is it?", input=b"\xff\xfe")
    assert done.exit_code == 1
    assert done.stderr == "Error: standard input is not text in UTF-8; -a FILE sends an image\n"


def test_an_image_for_a_text_model_is_refused_by_name(command: Command, tmp_path: Path, state: Path) -> None:
    """A model that reads no images says so by name, and nothing is recorded."""
    (tmp_path / "a.png").write_bytes(PNG)
    done = command("chat", *SHORT, "-a", str(tmp_path / "a.png"), "What is it?")
    assert done.exit_code == 1
    assert done.stderr == "Error: assistant reads text only; it takes no images\n"
    assert recorded(state) == []


@pytest.mark.parametrize(("content", "told"), [(b"text", "not an image"), (None, "No such file")])
def test_files_that_are_no_images(command: Command, tmp_path: Path, content: bytes | None, told: str) -> None:
    """A file that is missing or is no image is named before a server is asked."""
    file = tmp_path / "a.png"
    if content is not None:
        file.write_bytes(content)
    done = command("chat", "--url", "http://127.0.0.1:9", "-a", str(file), "Hi")
    assert (done.exit_code, done.stderr.startswith(f"Error: {file}: {told}")) == (1, True)


def test_an_image_becomes_a_part_of_the_message(tmp_path: Path) -> None:
    """The type of an image is read from its bytes, not from its name."""
    (tmp_path / "a.txt").write_bytes(PNG)
    assert image_file(str(tmp_path / "a.txt"))["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_a_conversation_goes_on(command: Command, observed: Running, state: Path) -> None:
    """--continue goes on with the last conversation and its settings, --conversation with the one that is named."""
    command("chat", *SHORT, "--model", "assistant:pirate", "--system", "Be brief.", "One")
    command("chat", *SHORT, "Other")
    first, other = recorded(state)
    command("chat", "--continue", "And?")
    command("chat", "--conversation", first.conversation, "Two")
    later = recorded(state)[2:]
    assert [(turn.conversation, turn.parent) for turn in later] == [
        (other.conversation, other.id),
        (first.conversation, first.id),
    ]
    assert (later[1].model, later[1].system) == ("assistant:pirate", "Be brief.")
    assert later[1].fields == {"temperature": 0.0, "max_tokens": 2}
    assert later[1].prompt_tokens is not None
    assert first.prompt_tokens is not None
    assert later[1].prompt_tokens > first.prompt_tokens


def test_nothing_to_continue(command: Command) -> None:
    """--continue without a record says that there is none."""
    done = command("chat", "--continue", "And?")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: --continue: no conversation has been recorded")


def test_recording_is_turned_off(command: Command, state: Path) -> None:
    """--no-log and `logs off` record nothing; `logs on` records again."""
    command("chat", *SHORT, "--no-log", "One")
    assert not state.exists()
    assert command("logs", "off").stderr == "conversations are not recorded\n"
    command("chat", *SHORT, "Two")
    assert command("logs", "on").stderr == "conversations are recorded\n"
    command("chat", *SHORT, "Three")
    assert [turn.prompt for turn in recorded(state)] == ["Three"]


def test_a_record_that_cannot_be_written_is_told(observed: Running, tmp_path: Path) -> None:
    """If the record cannot be written, chat says so once and answers."""
    (tmp_path / "file").write_text("")
    environment = {"MLFLOW_LLM_STATE": str(tmp_path / "file" / "below"), "MLFLOW_LLM_URL": observed.url}
    done = CliRunner(env=environment).invoke(cli, ["chat", *SHORT, "Hi"])
    assert done.exit_code == 0
    assert done.stderr.count("[this conversation is not recorded: ") == 1
    assert len(done.stdout) > 1


def test_the_commands_of_the_record(command: Command, state: Path, tmp_path: Path) -> None:
    """/save and /load carry a conversation over; /retry replaces the last reply; /clear begins another."""
    file = tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "One",
        "/retry",
        f"/save {file}",
        "/clear",
        "/history",
        f"/load {file}",
        "Two",
        "/history",
    ]
    done = command("chat", *SHORT, input="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    assert (saved["system"], [message["role"] for message in saved["messages"]]) == ("Be brief.", ["user", "assistant"])
    first, again, loaded, last = recorded(state)
    assert (first.conversation, first.parent, first.prompt) == (again.conversation, again.parent, again.prompt)
    assert (loaded.finish, loaded.prompt, last.prompt, last.parent) == ("loaded", "One", "Two", loaded.id)
    assert loaded.conversation != first.conversation
    told = done.stderr.splitlines()
    assert "nothing has been said yet" in told
    assert told.index("> One") < told.index("> Two")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "is not a conversation that /save wrote"),
        (
            '{"kind": "mlflow-llm conversation", "model": "m", "messages": [{"role": "user", "content": "a"}]}',
            "in turn",
        ),
        ('{"kind": "mlflow-llm conversation", "model": "m", "fields": {"topp": 1}}', "did you mean 'top_p'?"),
        (None, "No such file or directory"),
    ],
)
def test_files_that_are_no_conversations(command: Command, tmp_path: Path, text: str | None, told: str) -> None:
    """/load names what is wrong with a file, and /save replaces none that is not a conversation."""
    file = tmp_path / "talk.json"
    if text is not None:
        file.write_text(text)
    done = command("chat", *SHORT, input=f"/load {file}\n")
    assert (done.exit_code, told in done.stderr) == (1, True), done.output
    if text == "{}":
        assert "is not a conversation" in command("chat", *SHORT, input=f"/save {file}\n").stderr
        assert file.read_text() == text


def test_show_tells_settings_and_counts(command: Command) -> None:
    """/show tells where each setting comes from, tokens, speed, and why the cost is not known."""
    done = command("chat", "--max-tokens", "3", input="/set top_k null\nHello\n/show\n")
    shown = dict(line.split(maxsplit=1) for line in done.stderr.splitlines() if not line.startswith("["))
    assert shown["temperature"] == "0.7  (the default in the terminal)"
    assert (shown["max_tokens"], shown["top_k"]) == ("3", "null  (the server's own)")
    assert shown["tokens"].endswith("3 new")
    assert shown["cost"] == "not known: 404: this server keeps no ledger; start it with --database"
    assert "tokens/s, first after" in shown["last"]


def test_schemas() -> None:
    """A schema is given as JSON or as fields with types and descriptions."""
    assert schema_of('{"type": "object"}') == {"type": "object"}
    assert schema_of("name, age int, bio: in one sentence") == schema_of("name\nage int,\nbio: in one sentence")
    found = schema_of("name, age int, bio: in one sentence")
    assert found["required"] == ["name", "age", "bio"]
    assert found["properties"]["age"] == {"type": "integer"}
    assert found["properties"]["bio"] == {"type": "string", "description": "in one sentence"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("age integer", "'integer' is not a type; expected one of str, int, float, bool"),
        ("a b c", "'a b c' is no field"),
        ("a, a", "a is named twice"),
        ("", "it has no field"),
        ("{", "not JSON"),
        ("missing.json", "there is no such file"),
    ],
)
def test_schemas_that_are_none(command: Command, given: str, told: str) -> None:
    """A text that is no schema is a usage error that says what is."""
    done = command("chat", "--schema", given, "Hi")
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
