"""The leader's end of its Ray process: orders go there, and the newest report comes back, without waiting for it."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import threading
import time
from collections.abc import Callable

import msgspec

from ...system import child
from .messages import Launch, Order, Report

logger = logging.getLogger(__name__)

HANGING_SECONDS = 60.0
"""After so long without an answer the process is replaced: some calls of Ray's wait for a cluster that is gone."""
END_SECONDS = 5.0


class RayProcess:
    """A Ray process, started with ``launch`` and restarted when it ends or hangs. One thread calls the methods."""

    def __init__(self, launch: Launch, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._launch, self._monotonic = launch, monotonic
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[Report | None] = queue.Queue()
        self._waiting_since: float | None = None
        self._trouble = ""
        self._start()

    def _start(self) -> None:
        answers: queue.Queue[Report | None] = queue.Queue()
        self._answers = answers
        self._waiting_since = None
        command = child.python_command("serving.control.ray_runtime.process")
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=child.environment())
        threading.Thread(target=_read, args=(process, answers), name="ray-reports", daemon=True).start()
        self._write(msgspec.json.encode(self._launch))

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its end is noticed by its answers
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Report | None:
        """Return the report that answers the last order, once; None if it has not come."""
        try:
            report = self._answers.get_nowait()
        except queue.Empty:
            since = self._waiting_since
            if since is None or self._monotonic() - since < HANGING_SECONDS:
                return None
            report, self._trouble = None, f"Ray has not answered for {HANGING_SECONDS:g} s"
        self._waiting_since = None
        if report is not None:
            self._trouble = ""
            return report
        self._trouble = self._trouble or "the process that speaks with Ray has ended; the server's log says why"
        logger.warning("%s; starting it again", self._trouble)
        self.close()
        self._start()
        return Report(error=self._trouble)

    def send(self, order: Order) -> None:
        """Send an order. Call it when the last one was answered."""
        if self._waiting_since is None:
            self._waiting_since = self._monotonic()
            self._write(msgspec.json.encode(order))

    @property
    def is_free(self) -> bool:
        """Whether the last order was answered."""
        return self._waiting_since is None

    def close(self) -> None:
        """End the process; what it has started on the cluster goes on."""
        if (process := self._process) is None:
            return
        self._process = None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[Report | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            try:
                answers.put(msgspec.json.decode(line, type=Report))
            except msgspec.DecodeError:
                logger.warning("the process that speaks with Ray wrote %.200r", line)
    answers.put(None)
