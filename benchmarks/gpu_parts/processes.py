"""Contenders in processes of their own, whose records arrive one by one: what is cut by time keeps what it had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import msgspec

from .plan import Contender, Plan, Record

SCRIPT = Path(__file__).parents[1] / "gpu.py"
GRACE = 10.0  # seconds in which a contender ends its own processes
MARK = "RESULT "
QUIET = {**os.environ, "TQDM_DISABLE": "1"}  # progress bars would be the last that a failed contender said
Runner: TypeAlias = Callable[[str, Plan, float], list[Record]]


def serve_records(contender: Contender, plan: Plan) -> None:
    """Print the records of a contender, in its own process."""
    signal.signal(signal.SIGTERM, _leave)
    for record in contender(plan):
        print(MARK + json.dumps(record), flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def in_a_process(name: str, plan: Plan, seconds: float) -> list[Record]:
    """Return a contender's records. The last says ``cut`` if time ended before it did, or ``error`` if it failed."""
    command = [sys.executable, str(SCRIPT), "--run", name, "--plan", msgspec.json.encode(plan).decode()]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, env=QUIET)
        late = False
        try:
            process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(process)
        records = list(read(out))
        if late:
            records.append({"part": name, "cut": f"not done in {seconds:.0f} s"})
        elif process.returncode:
            err.seek(0)
            said = err.read().strip().splitlines() or ["nothing was said"]
            ended = f"ended by signal {-process.returncode}: " if process.returncode < 0 else ""
            records.append({"part": name, "error": ended + said[-1][:300]})
            print("\n".join(said[-40:]), file=sys.stderr)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return records


def read(out: Iterator[str]) -> Iterator[Record]:
    out.seek(0)  # type: ignore[attr-defined]
    for line in out:
        if line.startswith(MARK) and line.endswith("\n"):
            yield json.loads(line.removeprefix(MARK))


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a contender: first it alone, which ends what it started, then its whole group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Beside:
    """Contenders that run side by side on threads, each waiting for its process."""

    def __init__(self, run: Runner) -> None:
        self._run = run
        self._threads: list[threading.Thread] = []
        self._records: list[list[Record]] = []

    def start(self, name: str, plan: Plan, seconds: float) -> None:
        place = len(self._records)
        self._records.append([])

        def wait() -> None:
            self._records[place] = self._run(name, plan, seconds)

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def records(self) -> list[Record]:
        for thread in self._threads:
            thread.join()
        return [record for records in self._records for record in records]
