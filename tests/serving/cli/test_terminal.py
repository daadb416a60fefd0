"""Words that wrap while they stream, as a terminal shows them; where history is kept."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_llm.serving.cli.terminal import Wrapped, history_file


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows of text, newlines, cursor-left and erase-to-end."""
    lines, column = [""], 0
    for found in re.finditer(r"\x1b\[(\d*)([DK])|(.)", written, re.DOTALL):
        count, verb, character = found.groups()
        if verb == "D":
            column -= int(count)
        elif verb == "K":
            lines[-1] = lines[-1][:column]
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column] + character
            column += 1
    return lines


def wrapped(text: str, columns: int, pieces: int = 3) -> list[str]:
    out: list[str] = []
    writer = Wrapped(out.append, columns)
    for start in range(0, len(text), pieces):
        writer.write(text[start : start + pieces])
    return screen("".join(out))


TEXT = "The quick brown fox jumps over the lazy dog, and then goes home to sleep until the next morning comes."


@pytest.mark.parametrize("columns", [20, 33, 60])
@pytest.mark.parametrize("pieces", [1, 4, 1000])
def test_words_wrap_as_textwrap_has_them(columns: int, pieces: int) -> None:
    """However the text is cut into pieces, the screen shows what the standard library's wrapping gives."""
    shown = [line.rstrip() for line in wrapped(TEXT, columns, pieces)]
    assert shown == textwrap.wrap(TEXT, columns)


def test_a_long_word_is_broken() -> None:
    """A word that no line holds goes on in the next line where it meets the edge."""
    assert wrapped("ab " + "x" * 25, 10) == ["ab xxxxxxx", "xxxxxxxxxx", "xxxxxxxx"]


@given(st.text(alphabet="abc \n", max_size=200), st.integers(8, 40), st.integers(1, 50))
def test_nothing_is_lost_and_no_line_is_too_long(text: str, columns: int, pieces: int) -> None:
    """Every visible character is on the screen once, in order, and no line exceeds the width."""
    lines = wrapped(text, columns, pieces)
    assert max(map(len, lines)) <= columns
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_no_terminal_no_wrapping() -> None:
    """Text that goes into a pipe is not wrapped."""
    out: list[str] = []
    Wrapped(out.append, None).write(TEXT)
    assert out == [TEXT]


def test_wide_characters_count_twice() -> None:
    """Ten Chinese characters fill twenty columns."""
    assert wrapped("一二三四五 六七八九十", 12) == ["一二三四五 ", "六七八九十"]


def test_no_history_without_a_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no history file, and no error, if the state directory cannot be created."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path / "file" / "below"))
    assert history_file() is None
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path / "state"))
    kept = history_file()
    assert kept is not None
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_history_that_others_could_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing history file is made private; a symbolic link or another user's file is not used."""
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path))
    file = tmp_path / "chat_history"
    file.write_text("")
    file.chmod(0o666)
    assert history_file() == file
    assert file.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        assert history_file() is None
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert history_file() is None
