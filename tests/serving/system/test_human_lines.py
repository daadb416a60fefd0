"""The log as a person at a terminal reads it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from mlflow_llm.serving.system import logs


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    logs.handler.cache_clear()
    yield
    logs.handler.cache_clear()


def record(event: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"msg": event, "levelno": level, "levelname": logging.getLevelName(level), "fields": fields}
    )


def test_a_line_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has the time, the level, the event and the fields; texts with blanks are quoted."""
    monkeypatch.setenv("NO_COLOR", "1")
    line = logs.HumanLines().format(record("request", status=200, path="/v1/models", error="no such model"))
    assert re.fullmatch(r'\d\d:\d\d:\d\d info request  status=200 path=/v1/models error="no such model"', line)


def test_a_sentence_stands_in_place_of_event_and_fields() -> None:
    """An event that has a sentence is that sentence to people, and both to programs."""
    said = record("listening", url="http://127.0.0.1:80")
    said.sentence = "listening on http://127.0.0.1:80"
    assert logs.HumanLines().format(said).endswith(f" {said.sentence}")
    line = json.loads(logs.JsonLines().format(said))
    assert (line["event"], line["url"], line["message"]) == ("listening", "http://127.0.0.1:80", said.sentence)


def test_levels_have_colours() -> None:
    """The level is in colour, and nothing else is."""
    line = logs.HumanLines().format(record("fault", logging.ERROR))
    assert "\x1b[31merror\x1b[0m fault" in line
    assert line.count("\x1b") == 2


def test_control_characters_are_escaped() -> None:
    """A field that quotes a caller cannot send commands to the terminal."""
    line = logs.HumanLines().format(record("request", path="/\x1b[2J"))
    assert "\\u001b[2J" in line


@pytest.mark.parametrize(("terminal", "kind"), [(True, logs.HumanLines), (False, logs.JsonLines)])
def test_the_form_follows_standard_error(terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets lines for people, anything else gets JSON."""
    monkeypatch.setattr(logs, "is_terminal", lambda: terminal)
    assert type(logs.handler().formatter) is kind
