"""The record of conversations: what is kept, what is found again, and that several processes write at once."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.chat import log_database
from mlflow_llm.serving.cli.chat.log_database import LogDatabase, LogError, LoggedTurn, encoded, new_id

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
WRITER = """
import sys
from pathlib import Path
from test_log_command import turn
from mlflow_llm.serving.cli.chat.log_database import LogDatabase
sys.stdin.read()
database = LogDatabase(Path(sys.argv[1]))
for number in range(100):
    database.add(turn(conversation=sys.argv[2], prompt=str(number)), [])
"""


def turn(**given: object) -> LoggedTurn:
    """Return a turn with ``given`` in place of its values."""
    values: dict[str, object] = {
        "id": new_id(), "conversation": "c", "parent": "", "place": "http://127.0.0.1:8000", "model": "assistant",
        "system": None, "fields": {}, "defaults": {"temperature": 0.7}, "prompt": "Hi", "reply": "Hello",
        "finish": "stop", "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2, "first_ms": 1.5,
        "seconds": 0.5, "request_id": "chatcmpl-1", "ended_ms": 1_764_000_000_000,
    }  # fmt: skip
    return LoggedTurn(**{**values, **given})  # type: ignore[arg-type]


def run(state: Path, *words: str) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of ``mlflow-llm logs``."""
    done = CliRunner(env={"MLFLOW_LLM_STATE": str(state)}).invoke(cli, ["logs", *words])
    return done.exit_code, done.stdout, done.stderr


def test_two_processes_write_at_once(state: Path) -> None:
    """Two processes that make the file and write into it at the same time lose nothing, and raise nothing."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    names = ("first", "second")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(state), name],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for name in names
    ]
    for writer in writers:  # both have imported all they need when standard input ends
        assert writer.stdin is not None
        writer.stdin.close()
    for writer in writers:
        with writer:
            assert writer.stderr is not None
            assert (writer.stderr.read(), writer.wait(240)) == (b"", 0)
    database = LogDatabase(state)
    for name in names:
        found = [one.prompt for one in database.newest(None) if one.conversation == name]
        assert found == [str(number) for number in range(100)]
    database.close()


def test_the_file_is_the_users_own(state: Path) -> None:
    """The file is readable by its user alone, and a symbolic link in its place is refused."""
    LogDatabase(state).close()
    file = state / log_database.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.rename(state / "elsewhere")
    file.symlink_to(state / "elsewhere")
    with pytest.raises(LogError, match=str(file)):
        LogDatabase(state)


def test_an_older_file_is_migrated_and_a_newer_one_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an older schema keeps its turns and gets what came later; one of a newer schema is refused."""
    database = LogDatabase(state)
    database.add(turn(), [])
    database.close()
    later = (*log_database.MIGRATIONS, "ALTER TABLE turns ADD COLUMN stars INTEGER NOT NULL DEFAULT 0")
    with monkeypatch.context() as patch:
        patch.setattr(log_database, "MIGRATIONS", later)
        newer = LogDatabase(state)
        newer.close()
    with sqlite3.connect(state / log_database.FILE) as connection:
        assert connection.execute("SELECT stars, prompt FROM turns").fetchall() == [(0, "Hi")]
    connection.close()
    with pytest.raises(LogError, match="newer version of mlflow-llm"):
        LogDatabase(state)
    assert run(state, "list")[0] == 1


def test_a_migration_that_fails_changes_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a migration stops half way, the file is as it was."""
    LogDatabase(state).close()
    broken = (*log_database.MIGRATIONS, "ALTER TABLE turns ADD COLUMN a TEXT; ALTER TABLE nowhere ADD COLUMN b TEXT")
    with monkeypatch.context() as patch:
        patch.setattr(log_database, "MIGRATIONS", broken)
        with pytest.raises(LogError, match="no such table: nowhere"):
            LogDatabase(state)
    database = LogDatabase(state)
    database.add(turn(), [])
    assert database.newest(None) == [database.branch("c")[0]]
    database.close()


def test_a_branch_is_the_newest_one(state: Path) -> None:
    """A reply that was asked for again is on the branch, and the one that it replaced is still recorded."""
    database = LogDatabase(state)
    first = turn(reply="one")
    again = turn(reply="two")
    last = turn(parent=again.id, prompt="And?")
    for one in (first, again, last):
        database.add(one, [])
    assert database.branch("c") == [again, last]
    assert database.newest(None) == [first, again, last]
    database.close()


def test_images_are_kept_once(state: Path) -> None:
    """Images come back as they were sent; the same image of two messages is stored once."""
    database = LogDatabase(state)
    part = encoded("image/png", PNG)
    first, second = turn(), turn()
    database.add(first, [part, part])
    database.add(second, [part])
    assert (database.parts(first.id), database.parts(second.id)) == ([part, part], [part])
    database.close()
    with sqlite3.connect(state / log_database.FILE) as connection:
        assert connection.execute("SELECT count(*) FROM attachments").fetchone() == (1,)
    connection.close()


def test_log_command_lists_shows_and_searches(state: Path) -> None:
    """The commands find turns by count, words in any case, and the beginning of a conversation's id."""
    database = LogDatabase(state)
    database.add(turn(conversation="a1", prompt="Größe der Welt", reply="Groß"), [])
    database.add(turn(conversation="b2", prompt="two\nlines", reply="x" * 100, model="assistant:pirate"), [])
    database.close()
    lines = run(state)[1].splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["a1", "assistant", "Größe der Welt"],
        ["b2", "assistant:pirate", "two lines"],
    ]
    assert len(run(state, "list", "-n", "1")[1].splitlines()) == 1
    assert run(state, "list", "--model", "assistant")[1].splitlines() == lines[:1]
    assert run(state, "list", "-q", "GRÖSSE welt")[1].splitlines() == lines[:1]
    assert "> two\nlines\n\n" + "x" * 100 in run(state, "show")[1]
    assert "# a1" in run(state, "show", "a")[1]
    assert "no conversation begins with 'zz'" in run(state, "show", "zz")[2]
    assert [one["reply"] for one in json.loads(run(state, "search", "größe", "--json")[1])] == ["Groß"]
    assert run(state, "search", "nowhere")[:2] == (1, "")
    assert run(state, "path")[1] == f"{state / log_database.FILE}\n"


def test_nothing_was_recorded(state: Path) -> None:
    """Without a file the commands say so, and make none."""
    code, _, told = run(state, "list")
    assert (code, told) == (1, f"Error: no conversation has been recorded: there is no {state / log_database.FILE}\n")
    assert not state.exists()
