"""The state directories of one user's engine processes: one for each engine, below a runtime directory.

::

    <runtime>/                  0700   $XDG_RUNTIME_DIR/mlflow-llm, else <tmp>/mlflow-llm-<uid>
        <key>.lock              held while a process looks for, starts, ends or removes the engine <key>
        <key>/                  0700
            engine.lock         held by the engine process and its standby, as long as one of them lives
            socket              the ZeroMQ socket for clients on this host
            spec.json           the engine's ``ProcessSpec``; standby-spec.json is that of its warm standby
            status.json         loading | ready | failed, written by the engine
            step.json           the step of the load that is under way, and how far it is
            adapters.json       adapters loaded at run time, for the engine's successor after a crash
            engine.log
            load.log            the part of engine.log that the last load wrote
            clients/<id>        held by each client as long as it lives

Nothing here outlives its owners: the engine removes everything when it ends, a client removes the files of a killed
engine, and ``sweep`` removes what remains when both were killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from ...interface.errors import PackagingError, Unavailable
from ...system.file_locks import FileLock, acquire, create_locked, is_held, try_acquire
from ...system.files import is_private, replace_file, xdg_dir
from ...system.load_steps import LoadStep

KEY_LENGTH = 16
SOCKET = "socket"
LOG = "engine.log"
LOAD_LOG = "load.log"
STEP = "step.json"
LOG_BYTES = 64 * 1024  # how much of a load's log is kept
MAX_SOCKET_PATH = 107  # bytes in sockaddr_un.sun_path, less the closing NUL
MAX_REMAKES = 100  # how often in a row the runtime directory is made again

Sleep = Callable[[float], None]


class Status(Struct, frozen=True, kw_only=True):
    """The state of an engine process, from ``status.json``.

    ``generation`` differs for every engine process; ``kind`` is the kind of a failure: packaging or engine_died.
    """

    state: Literal["loading", "ready", "failed"]
    generation: str
    pid: int
    kind: str = ""
    reason: str = ""


def default_runtime_dir() -> str:
    """Return the default runtime directory.

    It is the first of ``$XDG_RUNTIME_DIR/mlflow-llm``, ``<tmp>/mlflow-llm-<uid>`` and ``/tmp/mlflow-llm-<uid>`` whose
    path is short enough for sockets.
    """
    base = xdg_dir("XDG_RUNTIME_DIR")
    if base and base.is_dir() and _fits(os.path.join(base, "mlflow-llm")):
        return os.path.join(base, "mlflow-llm")
    path = os.path.join(tempfile.gettempdir(), f"mlflow-llm-{os.getuid()}")
    return path if _fits(path) else f"/tmp/mlflow-llm-{os.getuid()}"


def _fits(runtime: str) -> bool:
    return len(os.fsencode(os.path.join(runtime, "k" * KEY_LENGTH, SOCKET))) <= MAX_SOCKET_PATH


def check_runtime_dir(runtime: str) -> str:
    """Return ``runtime`` as an absolute path. Raises ``PackagingError`` if a Unix socket's path would be too long."""
    runtime = os.path.abspath(runtime)
    if not _fits(runtime):
        limit = MAX_SOCKET_PATH - KEY_LENGTH - len(SOCKET) - 2
        raise PackagingError(f"state directory {runtime}: its path may have {limit} bytes at most")
    return runtime


def make_private(path: str) -> None:
    """Create the directory ``path`` for this user only and check that it is private. Raises ``Unavailable``."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_private(path)


def check_private(path: str, kind: Callable[[int], bool] = stat.S_ISDIR) -> None:
    """Raise ``Unavailable`` unless this user owns ``path`` and others have no access to it.

    Another user could have put a socket there. ``FileNotFoundError`` is passed on.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise  # removed in the meantime: the caller tries again
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from None
    if not kind(found.st_mode) or not is_private(found):
        raise Unavailable(f"{path} is not private to this user; remove it or set XDG_RUNTIME_DIR")


class RuntimeAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that was loaded while its engine ran, as ``adapters.json`` records it for a successor."""

    path: str
    pinned: bool = False


class StateDirectory:
    """The state directory of the engine ``key``: its files and locks."""

    def __init__(self, runtime: str, key: str) -> None:
        self.runtime, self.key = runtime, key
        self.path = os.path.join(runtime, key)
        self.clients_dir = os.path.join(self.path, "clients")
        self.engine_lock_path = os.path.join(self.path, "engine.lock")
        self.socket_path = os.path.join(self.path, SOCKET)

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def lock(self, *, sleep: Sleep = time.sleep, timeout: float | None = None) -> FileLock:
        """Acquire the right to start, end or remove this engine. It is only held for moments."""
        self._make_runtime()
        return acquire(f"{self.path}.lock", make_parent=self._make_runtime, sleep=sleep, timeout=timeout)

    def _make_runtime(self) -> None:
        for _ in range(MAX_REMAKES):
            with contextlib.suppress(FileNotFoundError):  # its last user removed it just after it was made
                make_private(self.runtime)
                return
        make_private(self.runtime)

    def try_lock(self) -> FileLock | None:
        """Do the same as ``lock`` without waiting; None if it is held by another or the directory does not exist."""
        try:
            return try_acquire(f"{self.path}.lock")
        except FileNotFoundError:
            return None

    def prepare(self) -> None:
        """Make the directories. The caller holds ``lock``."""
        make_private(self.path)
        make_private(self.clients_dir)

    @property
    def engine_alive(self) -> bool:
        """Whether the engine or its warm standby holds the engine lock."""
        return is_held(self.engine_lock_path)

    def register_client(self, client_id: str) -> FileLock:
        """Create a lock file for a client and return it, held."""
        return create_locked(os.path.join(self.clients_dir, client_id))

    def live_clients(self) -> set[str]:
        """Return the ids of the live clients, and remove the files of dead ones."""
        alive: set[str] = set()
        try:
            names = os.listdir(self.clients_dir)
        except FileNotFoundError:
            return alive
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(self.clients_dir, name)
            if is_held(path):
                alive.add(name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return alive

    def read_status(self) -> Status | None:
        """Return the status that the engine wrote last, or None if there is none that can be read."""
        try:
            with open(self.file("status.json"), "rb") as file:
                return msgspec.json.decode(file.read(), type=Status)
        except (OSError, msgspec.MsgspecError):
            return None

    def read_step(self) -> LoadStep | None:
        """Return the step that the engine's load has reached, or None if none is known."""
        try:
            with open(self.file(STEP), "rb") as file:
                return msgspec.json.decode(file.read(), type=LoadStep)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_json(self, name: str, value: object) -> None:
        """Write ``value`` to a file atomically: processes that read it never see a partial file."""
        replace_file(self.file(name), msgspec.json.encode(value))

    def remove_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file(name))

    def remove(self, lock: FileLock) -> None:
        """Remove everything, then ``lock`` (held by the caller), and the runtime directory if it is unused."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock.release(unlink=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.runtime)

    def remove_if_abandoned(self) -> bool:
        """Remove the files of an ended engine, unless a client or an engine still uses them.

        Return False if another process holds the lock: it may have seen a client that is gone by now.
        """
        if not os.path.isdir(self.runtime):
            return True
        lock = self.try_lock()
        if lock is None:
            return False
        if self.engine_alive or self.live_clients():
            lock.release()
        else:
            self.remove(lock)
        return True

    def log_tail(self, num_bytes: int = LOG_BYTES) -> str:
        """Return the end of the engine's log, "" if there is none."""
        return tail(self.file(LOG), num_bytes)

    def keep_load_log(self, start: int) -> None:
        """Save the log from byte ``start`` on to its own file, since the log continues to grow."""
        text = tail(self.file(LOG), LOG_BYTES, start=start)
        with contextlib.suppress(OSError):
            replace_file(self.file(LOAD_LOG), text.encode())


def tail(path: str, num_bytes: int, *, start: int = 0) -> str:
    """Return whole lines, at most the last ``num_bytes`` of a file after byte ``start``; "" if the file cannot be read.

    Of a line longer than that, whole words are returned: half a secret would not be recognised and masked as one.
    """
    try:
        with open(path, "rb") as file:
            begin = file.seek(0, os.SEEK_END) - num_bytes
            file.seek(max(start, begin - 1))
            text = file.read(num_bytes + 1 if begin > start else num_bytes)
    except OSError:
        return ""
    if begin > start:  # the byte before tells whether the first line is whole
        _, newline, lines = text.partition(b"\n")
        text = lines if newline else text.partition(b" ")[2]
    return text.decode(errors="replace")


def sweep(runtime: str) -> None:
    """Remove the state directories of engines that were killed together with all their clients."""
    try:
        names = os.listdir(runtime)
    except OSError:
        return
    for key in {name.removesuffix(".lock") for name in names if len(name.removesuffix(".lock")) == KEY_LENGTH}:
        StateDirectory(runtime, key).remove_if_abandoned()
