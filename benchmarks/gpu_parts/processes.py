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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import msgspec

from .plan import Contender, Plan, Record

SCRIPT = Path(__file__).parents[1] / "gpu.py"
GRACE = 10.0  # seconds in which a contender ends its own processes
MARK = "RESULT "
QUIET = {**os.environ, "TQDM_DISABLE": "1"}  # progress bars would be the last that a failed contender said
POLL = 0.1  # seconds between looks at a contender
Runner: TypeAlias = Callable[[str, Plan, float], Iterable[Record]]


class Stop:
    """The signal that asked this process to end, SIGTERM or SIGINT, while the object is open; "" if none did."""

    def __init__(self) -> None:
        self.signal = ""  # set by a handler, which may take no lock
        self.status = 0

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._came) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.signal, self.status = signal.Signals(number).name, 128 + number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def serve_records(contender: Contender, plan: Plan) -> None:
    """Print the records of a contender, in its own process."""
    signal.signal(signal.SIGTERM, _leave)
    for record in contender(plan):
        print(MARK + json.dumps(record), flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def in_a_process(name: str, plan: Plan, seconds: float, stop: Stop | None = None) -> Iterator[Record]:
    """Yield a contender's records as they come. The last says ``cut`` if time ended or a signal came before it did, or
    ``error`` if it failed."""
    command = [sys.executable, str(SCRIPT), "--run", name, "--plan", msgspec.json.encode(plan).decode()]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, env=QUIET)
        read, cut = Reader(out.fileno()), ""
        try:
            while not cut and process.poll() is None:
                time.sleep(POLL)
                yield from read.records()
                if stop is not None and stop.signal:
                    cut = f"ended by {stop.signal}"
                elif time.monotonic() - began > seconds:
                    cut = f"not done in {seconds:.0f} s"
        finally:
            end(process)
        yield from read.records()
        if cut:
            yield {"part": name, "cut": cut}
        elif process.returncode:
            err.seek(0)
            said = err.read().strip().splitlines() or ["nothing was said"]
            ended = f"ended by signal {-process.returncode}: " if process.returncode < 0 else ""
            yield {"part": name, "error": ended + said[-1][:300]}
            print("\n".join(said[-40:]), file=sys.stderr)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


class Reader:
    """The records in a file that another process writes, each read once."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._at = 0

    def records(self) -> Iterator[Record]:
        """Yield what came since the last call, in whole lines."""
        said = b"".join(iter(self._more, b""))
        *lines, rest = said.split(b"\n")
        self._at -= len(rest)
        for line in lines:
            if line.startswith(MARK.encode()):
                yield json.loads(line.removeprefix(MARK.encode()))

    def _more(self) -> bytes:
        found = os.pread(self._file, 1 << 20, self._at)  # the place of the writer, which shares the file, is not moved
        self._at += len(found)
        return found


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

    def __init__(self, take: Callable[[str, Plan, float], object]) -> None:
        self._take = take
        self._threads: list[threading.Thread] = []

    def start(self, name: str, plan: Plan, seconds: float) -> None:
        self._threads.append(threading.Thread(target=self._take, args=(name, plan, seconds)))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
