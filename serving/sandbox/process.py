"""The parent's side of one confined process: start it, give it work, kill it. For one thread or greenlet at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posix  # the functions that gevent replaces in ``os`` only work on a worker's main thread
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .child import ANSWER, HEAD
from .limits import MIB, Ended, Exceeded, Limits, NoProcess, Refused

Wait = Callable[[int, bool, float], bool]
"""``wait(fd, writing, seconds)`` returns whether ``fd`` can be read (or written) within the time."""

LARGE_BYTES = 2 << 30
MAX_SOURCES = 64  # templates that one process may know before it is replaced
CHUNK_BYTES = 1 << 18
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)
# variables that rendering depends on (the time zone) or that an interpreter needs to start; no keys and no tokens
ENVIRONMENT = ("PATH", "LANG", "LANGUAGE", "TZ", "TZDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "HOME")


class Process:
    """A confined process and the pipes to it. Raises ``NoProcess`` if it cannot be started."""

    def __init__(self) -> None:
        # pipes, not sockets: gevent replaces sockets by its own, which belong to the thread that makes them
        asks, self._writer = os.pipe()
        self._reader, answers = os.pipe()
        try:
            self.pid = _spawn(asks, answers)
        except OSError as error:
            os.close(self._reader)
            os.close(self._writer)
            raise NoProcess(f"no process can be started: {error.strerror}") from None
        finally:
            os.close(asks)
            os.close(answers)
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        # the pid may be reused if another thread waits for all children
        self._handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        self.owner = os.getpid()
        self._known: set[str] = set()
        self._is_large = False

    @property
    def is_used_up(self) -> bool:
        """Whether it should be replaced: it knows too many templates, or its last memory limit was gigabytes."""
        return self._is_large or len(self._known) >= MAX_SOURCES

    def run(self, work: dict[str, Any], data: bytes, source: str | None, limits: Limits, wait: Wait) -> Any:
        """Do ``work``, which may use raw ``data`` or a template ``source``, and return its value.

        Raises ``Exceeded``, ``Refused``, ``Ended``. After any exception other than ``Refused``, the process has ended
        or is unusable: ``close`` it.
        """
        if source is not None:
            key = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
            work = {**work, "key": key} if key in self._known else {**work, "key": key, "source": source}
            self._known.add(key)
        asked = json.dumps(work, default=_placeholder, ensure_ascii=False).encode(errors="surrogatepass")
        self._is_large = limits.memory >= LARGE_BYTES
        began = time.monotonic()
        until = began + limits.patience
        try:
            self._send(HEAD.pack(len(asked), len(data), limits.seconds, limits.memory) + asked, until, wait)
            self._send(data, until, wait)
            kind, length, size = ANSWER.unpack(self._receive(ANSWER.size, until, wait))
            if length > 4 * limits.output + MIB or size > limits.raw:
                raise Exceeded(_too_long(limits))
            text = self._receive(length, until, wait)
            raw = self._receive(size, until, wait)
        except (BrokenPipeError, EOFError):
            raise self._end(limits, time.monotonic() - began) from None
        return (json.loads(text), raw) if kind == b"b" else _value(kind, text, limits)

    def close(self) -> None:
        """Kill the process and wait for its end. Call it once."""
        os.close(self._reader)
        os.close(self._writer)
        if self.owner == os.getpid():  # otherwise it belongs to the process that this one was forked from
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if self._handle >= 0:
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)
                os.waitid(os.P_PID, self.pid, os.WEXITED)
        if self._handle >= 0:
            os.close(self._handle)

    def _end(self, limits: Limits, elapsed: float) -> Exception:
        """Return why the process ended. If another thread has already waited for it, the elapsed time decides."""
        try:
            died = _signal(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT))
        except ChildProcessError:
            died = signal.SIGPROF if elapsed >= limits.seconds else None
        if died == signal.SIGPROF:
            return Exceeded(_too_slow(limits))
        if died in CRASHES:
            return Exceeded(f"it crashed its process ({signal.Signals(died).name})")
        return Ended(signal.Signals(died).name if died else "it left")

    def _send(self, data: bytes, until: float, wait: Wait) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._writer, view[:CHUNK_BYTES]) :]
            except BlockingIOError:
                _await(self._writer, True, until, wait)

    def _receive(self, size: int, until: float, wait: Wait) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self._reader, min(size, CHUNK_BYTES))
            except BlockingIOError:
                _await(self._reader, False, until, wait)
                continue
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _await(fd: int, writing: bool, until: float, wait: Wait) -> None:
    if not wait(fd, writing, max(0.0, until - time.monotonic())) and time.monotonic() >= until:
        raise Exceeded("more time than there is")


def _signal(ended: Any) -> int | None:
    """Return the signal that killed a process, or None if it exited."""
    return ended.si_status if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else None


def _spawn(asks: int, answers: int) -> int:
    environment = {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith("LC_")}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
    child = str(Path(__file__).with_name("child.py"))
    return posix.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-B", child, paths],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, asks, 0),
            (os.POSIX_SPAWN_DUP2, answers, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
        setsigmask=[],
        setpgroup=0,  # so that a terminal's Ctrl-C does not reach it
    )


def _value(kind: bytes, data: bytes, limits: Limits) -> Any:
    if kind == b"t":
        return data.decode(errors="surrogatepass")
    if kind == b"v":
        return json.loads(data)
    if kind == b"e":
        raised = json.loads(data)
        raise Refused(str(raised["kind"]), str(raised["message"]), raised["line"])
    raise Exceeded(_too_long(limits) if kind == b"o" else f"more than {limits.memory // MIB} MiB of memory")


def _too_slow(limits: Limits) -> str:
    return f"more than {limits.seconds:.3g} seconds of CPU time"


def _too_long(limits: Limits) -> str:
    return f"more than {limits.output} characters of output"


def _placeholder(value: Any) -> Any:
    """Return a replacement for a value that JSON cannot hold, in the form in which transformers shows it to a
    template."""
    item = getattr(value, "item", None)  # for NumPy scalars
    return item() if callable(item) and getattr(value, "shape", None) == () else f"<{type(value).__name__}>"
