"""The steps of something long, as people see them on standard error."""

from __future__ import annotations

import io

import pytest

from mlflow_llm.serving.system import load_steps
from mlflow_llm.serving.system.load_steps import LoadStep
from mlflow_llm.serving.system.step_line import CLEAR, StepLine, duration, watched


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_pipe_gets_a_line_for_each_step() -> None:
    """A stream that cannot be drawn again gets one line for a step, with its size, however often it is shown."""
    out = io.StringIO()
    line = StepLine(out)
    for done in (0, 1000, 2000):
        line.show("packing", done, 2000)
    line.show("testing")
    line.clear()
    assert out.getvalue() == "packing: 2 kB\ntesting\n"


def test_a_terminal_gets_one_line(terminal: Terminal) -> None:
    """A terminal gets one line, with bytes done of all and, after a second, the time that is left."""
    now = [0.0]
    line = StepLine(terminal, clock=lambda: now[0])
    line.show("packing", 0, 4_000_000)
    now[0] = 2.0
    line.show("packing", 1_000_000, 4_000_000)
    now[0] = 2.1  # too soon to draw again
    line.show("packing", 1_100_000, 4_000_000)
    line.clear()
    assert terminal.getvalue().split(CLEAR) == [
        "",
        "packing: 0 bytes of 4 MB",
        "packing: 1 MB of 4 MB, 6 s left",
        "",
    ]


def test_a_step_without_a_size_shows_its_time(terminal: Terminal) -> None:
    """A step whose size is not known shows the seconds that it has taken."""
    now = [0.0]
    line = StepLine(terminal, clock=lambda: now[0])
    line.show("testing")
    now[0] = 3.0
    line.show("testing")
    assert terminal.getvalue().split(CLEAR)[-2:] == ["testing", "testing: 3 s"]


def test_a_dumb_terminal_is_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot draw again gets lines."""
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    StepLine(out).show("testing")
    assert out.getvalue() == "testing\n"


def test_control_characters_of_a_name_are_escaped() -> None:
    """The name of a step may quote a path; it cannot send commands to the terminal."""
    out = io.StringIO()
    StepLine(out).show("loading \x1b[2J")
    assert out.getvalue() == "loading \\u001b[2J\n"


def test_watched_ends_its_line_when_the_block_fails() -> None:
    """The drawing thread ends with the block, whatever ends that."""
    out = io.StringIO()
    with pytest.raises(OSError, match="full"), watched(StepLine(out), "downloading x", lambda: 1, 10):
        raise OSError("full")
    assert out.getvalue() == "downloading x: 10 bytes\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (-1, "0 s")])
def test_durations(seconds: float, text: str) -> None:
    """A duration is in seconds, or in minutes and seconds."""
    assert duration(seconds) == text


def test_load_steps_go_to_the_listener() -> None:
    """A reported step reaches the listener of the process, and nobody once there is none."""
    found: list[LoadStep] = []
    load_steps.listen(found.append)
    load_steps.report("packing", 3, 9)
    load_steps.listen(None)
    load_steps.report("testing")
    assert found == [LoadStep(name="packing", done=3, total=9)]
