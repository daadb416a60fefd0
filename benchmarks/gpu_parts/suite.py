"""The tests of the device's path, in a process of pytest, with kernels compiled for the device."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .plan import Plan, Record

ROOT = Path(__file__).parents[2]
PROCESSES = 4  # on a device, where most of a test is the start of an engine
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)\b")
SECONDS = re.compile(r" in \d+\.\d+s\b")
SUMMARY = 20.0  # seconds in which an interrupted pytest says what it found
HURRIED = 8.0  # the same, if this process is ended: less than it has until it is killed
NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


def command(plan: Plan) -> list[str]:
    """Return pytest's command, with the plugins that are installed."""
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short"]
    if find_spec("pytest_timeout") is not None:
        asked += ["--timeout", "120"]
    if find_spec("xdist") is not None and not plan.on_cpu:
        asked += ["-n", str(PROCESSES)]
    return [*asked, *plan.tests]


def run(plan: Plan) -> Iterator[Record]:
    """Yield what pytest counted. Tests that take longer than the plan's limit, or than this process may run, are
    interrupted, and counted so far."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command(plan), cwd=ROOT, stdout=log, stderr=log)
        cut, summary = "", SUMMARY
        try:
            try:
                if not ended(process, plan.limit):
                    cut = f"not done in {plan.limit:.0f} s"
            except SystemExit:  # by a signal
                cut, summary = "this process was ended", HURRIED
            if cut:
                process.send_signal(signal.SIGINT)
                ended(process, summary)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read()
    told = {"cut": cut} if cut else {}
    yield {"part": "tests", "status": process.returncode, **read(said), **told, "log": said[-200_000:]}


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the end of ``process``, at most ``seconds``; return whether it came."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def last_line(said: str) -> str:
    """Return pytest's line of numbers, which libraries may write after."""
    return next((line for line in reversed(said.splitlines()) if SECONDS.search(line)), "")


def read(said: str) -> Record:
    """Return the numbers of pytest's last lines, and the names of tests that failed."""
    counts = {kind.rstrip("s"): int(number) for number, kind in COUNTED.findall(last_line(said))}
    return {"counts": counts, "failed": NAMED.findall(said)}
