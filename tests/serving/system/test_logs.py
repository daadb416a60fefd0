"""The log goes to a pipe that may have no reader: nothing waits for it, and what is lost is said."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from mlflow_llm.serving.system.log_queue import QueuedFile, QueuedHandler
from mlflow_llm.serving.system.logs import JsonLines

PAGE = 4096  # the smallest pipe
SCRIPT = """
import fcntl, logging, os, sys, time
from mlflow_llm.serving.system import logs

def unread_stderr():
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.dup2(write, 2)
    return read

"""


@pytest.fixture
def pipe():
    """Yield a small pipe: the file to read, and the descriptor to write to."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PAGE)
    with open(read) as file:
        yield file, write
    os.close(write)


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def log_to(fd: int, limit: int):
    """Return a function that logs its argument by a handler with a queue of so few lines."""
    handler = QueuedHandler(fd, limit)
    handler.setFormatter(JsonLines())

    def log(event: object) -> None:
        handler.handle(logging.makeLogRecord({"msg": str(event), "levelname": "INFO"}))

    return log


def test_an_unread_pipe_loses_lines_and_says_how_many(pipe):
    """An unread pipe blocks nobody; read again, it has lines in order, the number of lost ones, and later lines."""
    found, write = pipe
    log, total = log_to(write, 10), 1000
    for number in range(total):
        log(number)
    lost = expected = 0
    while expected < total:
        line = json.loads(found.readline())
        if line["event"] == "log lines lost":
            assert line["level"] == "warning"
            lost += line["lines"]
            expected += line["lines"]
        else:
            assert int(line["event"]) == expected
            expected += 1
    assert lost > 0
    log("later")
    assert json.loads(found.readline())["event"] == "later"


def test_a_non_blocking_pipe_is_waited_for(pipe):
    """A non-blocking pipe is waited for and gets every line whole."""
    found, write = pipe
    os.set_blocking(write, False)
    log = log_to(write, 10)
    for event in ("a" * 3 * PAGE, "b"):
        log(event)
    assert [json.loads(line)["event"][:2] for line in itertools.islice(found, 2)] == ["aa", "b"]


def test_all_is_written_at_the_end_and_by_one_process():
    """A process writes all its lines in order before it ends, and a fork repeats none of its parent's."""
    done = run(
        """
        logs.configure()
        for number in range(3000):
            logs.event(str(number))
        child = os.fork()
        if not child:
            logs.event("child")
            logging.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout, events.count("child")) == (0, "", 1)
    assert [event for event in events if event != "child"] == [str(number) for number in range(3000)]


def test_a_worker_ends_with_an_unread_pipe():
    """A gevent-patched worker with an unread pipe ends without waiting for a reader."""
    done = run(
        """
        from gevent import monkey
        monkey.patch_all()
        unread_stderr()
        logs.configure()
        for number in range(20000):
            logs.event(str(number))
            if number % 1000 == 0:
                time.sleep(0)  # the loop's turn
        print("alive", flush=True)
        """
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_a_renamed_file_is_left(tmp_path):
    """A log file that is renamed keeps what it has; later lines go into a new file of the old name."""
    handler = QueuedFile(str(tmp_path / "log"))
    handler.setFormatter(JsonLines())
    for event in ("before", "after"):
        handler.handle(logging.makeLogRecord({"msg": event, "levelname": "INFO"}))
        handler.flush()
        if event == "before":
            (tmp_path / "log").rename(tmp_path / "log.1")
    found = [json.loads((tmp_path / name).read_text())["event"] for name in ("log.1", "log")]
    os.close(handler.fd)
    assert found == ["before", "after"]


def test_one_form_for_all_that_is_said(tmp_path):
    """Events, what libraries log, warnings and steps are lines of JSON, on standard error and in the log file."""
    done = run(
        f"""
        import warnings
        from mlflow_llm.serving.system.step_line import StepLine

        logs.take_over(file={str(tmp_path / "log")!r})
        logs.event("listening", sentence="listening on :80", url=":80")
        logging.getLogger("another").warning("from a library")
        warnings.warn("old")
        StepLine().show("packing", 0, 2000)
        """
    )
    assert (done.returncode, done.stderr) == (0, (tmp_path / "log").read_text())
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "info"]
    assert lines[0]["message"] == "listening on :80"
    assert lines[1]["event"] == "from a library"
    assert "UserWarning: old" in lines[2]["event"]
    assert (lines[3]["event"], lines[3]["step"], lines[3]["bytes"]) == ("step", "packing", 2000)
