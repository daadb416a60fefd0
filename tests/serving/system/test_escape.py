"""Escaping of callers' and models' text in logs and on terminals."""

import importlib
import io
import json
import logging

import pytest
from click.testing import CliRunner

from mlflow_llm.serving import cli
from mlflow_llm.serving.cli import store
from mlflow_llm.serving.system.escape import VisibleFormatter, visible, visible_line
from mlflow_llm.serving.system.logs import JsonLines

EVIL = "a\x1b[2J\x9b31m\r\x00\x7f‮txt.exe⁦b⁩\u2028\u200f\ud800é😀 \u200d你\tx\nend"
HIDDEN = [c for c in EVIL if c not in "\t\n\u200d" and not c.isprintable()]


@pytest.mark.parametrize("one", [visible, visible_line])
def test_nothing_is_hidden(one):
    """Control and bidirectional characters, and halves of pairs, are spelt out; letters of every script stay."""
    found = one(EVIL)
    assert len(HIDDEN) == 11
    assert not set(HIDDEN) & set(found)
    assert r"\u001b[2J" in found
    assert r"\u202etxt.exe" in found
    assert "é😀 \u200d你" in found
    assert ("\n" in found) == (one is visible)
    found.encode()


def test_json_lines_mean_what_they_say():
    """A log line of the server hides nothing in it, and who parses it has the text as it was."""
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", None, None)
    record.fields = {"user": EVIL}
    line = JsonLines().format(record)
    assert not set(HIDDEN) & set(line)
    assert "\n" not in line
    assert json.loads(line)["user"] == EVIL


def test_a_message_is_one_line():
    """An engine's log has one line a message, so that no message forges another; a traceback keeps its lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(VisibleFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("own")
    log.addHandler(handler)
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("adapter %s", EVIL)
    written = stream.getvalue()
    assert written.startswith("ERROR adapter a\\u001b[2J")
    assert "\nTraceback (most recent call last):\n" in written
    assert not set(HIDDEN) & set(written)


def test_control_characters_are_escaped_on_terminals(monkeypatch):
    """Control characters in a model's reply or an endpoint's name reach the terminal escaped."""

    chats = importlib.import_module("mlflow_llm.serving.cli.chat.command")
    endpoints = importlib.import_module("mlflow_llm.serving.cli.endpoints.listing")

    class Server:
        def __init__(self, *args):
            pass

        def get(self, path):
            return {"data": []}

        def stream(self, path, body):
            yield {"id": EVIL, "choices": [{"delta": {"content": EVIL}}], "usage": None}

        understood = chats.Client.understood

    monkeypatch.setattr(chats, "Client", Server)
    found = CliRunner().invoke(cli.cli, ["chat", "--no-log", "--model", "m", "hello"])
    assert found.exit_code == 0
    assert found.stdout.startswith("a\\u001b[2J")
    assert not set(HIDDEN) & set(found.output)
    assert not set(HIDDEN) & set(store.table(["name"], [[EVIL]], right=0))
    with pytest.MonkeyPatch.context() as patched:
        shown = []
        patched.setattr(endpoints.click, "echo", lambda text, **_: shown.append(text))
        endpoints.table([("name",), (EVIL,)])
    assert not set(HIDDEN) & set("".join(shown))
