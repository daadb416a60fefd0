"""Find the engine process that already has a model loaded, or start one.

All processes of a user share one engine process, even if many of them start at once. ``state_directory`` describes the
files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...interface.bundle import Bundle
from ...interface.errors import EngineDied, PackagingError, ShuttingDown
from ...interface.settings import EngineSettings
from ...system import child
from ...system.file_locks import FileLock, acquire
from ..auth import check_address, read_key
from ..process_spec import ENGINE_CORE, MODULE, ProcessSpec, core_of
from .membership import Membership
from .state_directory import (
    KEY_LENGTH,
    LOG,
    SOCKET,
    Sleep,
    StateDirectory,
    Status,
    check_private,
    check_runtime_dir,
    default_runtime_dir,
    sweep,
)

Progress = Callable[[str], None]
POLL_SECONDS = 0.03
ROOM_BYTES = 1 << 20  # bytes; a file system with less is full
SAYS_WHY = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception)\b|Thread creation failed|cannot allocate", re.I)
KILL_SECONDS = 10.0
LOCK_SECONDS = 1.0  # seconds to wait for a free engine lock: a process that tests the lock holds it for a moment


def engine_key(bundle: Bundle, settings: EngineSettings, core: str = ENGINE_CORE) -> str:
    """Return the key of an engine: 16 hex digits of a SHA-256.

    Engines with the same weights, adapters, settings, code, environment and user have the same key, no matter where the
    files are or by which name the interpreter was started (``python``, ``python3.11``)."""
    described = msgspec.json.encode(
        (
            bundle.content_hash,
            bundle.draft.content_hash if bundle.draft is not None else "",
            bundle.tasks,
            bundle.embedding,
            sorted((name, _adapter_hash(path)) for name, path in bundle.adapters.items()),
            settings,
            core,
            [_version(name) for name in ("mlflow-llm", "torch", "transformers")],
            os.path.realpath(sys.prefix),
            os.path.realpath(sys.executable),
            child.package_place(),
            os.getuid(),
        ),
        order="sorted",
    )
    return hashlib.sha256(described).hexdigest()[:KEY_LENGTH]


def _adapter_hash(path: str) -> str:
    """Return the SHA-256 over an adapter's files, up to the first that cannot be read (the engine will report that)."""
    found = hashlib.sha256()
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(path)):
            if name.endswith((".json", ".safetensors")):
                with open(os.path.join(path, name), "rb") as file:
                    found.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Launcher:
    """The ``Finder`` that starts the engine if none runs, and starts it again when it is gone.

    Each ``replica`` number of the same model and settings is a separate engine. ``progress`` is called with "loading"
    and "ready". Raises ``PackagingError`` for a bad address or key file.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: EngineSettings,
        *,
        state_dir: str | None = None,
        progress: Progress | None = None,
        core: str = ENGINE_CORE,
        listen: str | None = None,
        key_file: str | None = None,
        adapter_dirs: Sequence[str] = (),
        adapter_requests: str = "",
        journals: str = "",
        drain_timeout: float = 0.0,
        replica: int = 0,
        sleep: Sleep = time.sleep,
    ) -> None:
        if listen is not None:
            check_address(listen)
            read_key(key_file)
        self.bundle, self.settings, self.core = bundle, settings, core_of(settings, core)
        self.listen, self.drain_timeout = listen, drain_timeout
        self.key_file = os.path.abspath(key_file) if key_file else None  # the engine has another working directory
        self.adapter_dirs = tuple(map(os.path.abspath, adapter_dirs))
        self.adapter_requests = os.path.abspath(adapter_requests) if adapter_requests else ""
        self.journals = os.path.abspath(journals) if journals else ""
        self.client_id = uuid.uuid4().hex
        self.generation = ""
        self.secret: bytes | None = None
        self.failed_log = ""
        self._sleep = sleep
        self._progress = progress
        self._said = ""
        runtime = check_runtime_dir(state_dir or default_runtime_dir())
        described = core if listen is None else f"{core} {listen}"
        described += f" #{replica}" if replica else ""
        self.state = StateDirectory(runtime, engine_key(bundle, settings, described))
        self._membership = Membership(self.state, self.client_id, sleep)

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        self._said = ""
        sweep(self.state.runtime)
        deadline = time.monotonic() + self.settings.start_timeout
        try:
            generation = None
            while generation is None:  # an engine that ends just as we find it is not an error
                generation = self._wait(self._join(stalled), deadline, cancelled)
        except BaseException:
            self.failed_log = self.state.log_tail()  # the log file is removed with the engine
            self.close()
            raise
        self._say("ready")
        self.generation = generation
        return f"ipc://{self.state.file(SOCKET)}"

    def _wait(self, generation: str, deadline: float, cancelled: Callable[[], bool]) -> str | None:
        """Wait for an engine and return its generation, or None if it was ready but has ended.

        Raises the same errors as ``find``.
        """
        while not self._is_ready(generation) or not self._is_private():
            if cancelled():
                raise ShuttingDown("the client was closed")
            if time.monotonic() > deadline:
                self._kill(generation)
                limit = self.settings.start_timeout
                raise EngineDied(f"the engine was not ready within start_timeout, {limit:g} seconds")
            status = self.state.read_status()
            if status is None or (status.state == "ready" and not self.state.engine_alive):
                return None
            self._sleep(POLL_SECONDS)
            status = self.state.read_status()  # another process may have restarted it in the meantime
            generation = status.generation if status else generation
        return generation

    def _is_private(self) -> bool:
        try:
            check_private(self.state.path)
        except FileNotFoundError:  # the engine has just ended
            return False
        return True

    def _join(self, stalled: str) -> str:
        """Register as a client, start the engine if there is none, and return its generation."""
        with self._locked():
            self.state.prepare()
            self._membership.join()
            status = self.state.read_status()
            if stalled and status is not None and status.generation == stalled:
                self._kill_now(status)
                status = self.state.read_status()
            if self.state.engine_alive and status is not None and status.state != "failed":
                return status.generation
            self._await_end()
            return self.start()

    def _await_end(self) -> None:
        """Wait until an engine that has reported its failure has ended. The caller holds the lock."""
        deadline = time.monotonic() + KILL_SECONDS
        while self.state.engine_alive and time.monotonic() < deadline:
            self._sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        lock = self.state.lock(sleep=self._sleep)
        try:
            yield
        finally:
            lock.release()

    def start(self) -> str:
        """Start an engine process that holds the engine lock from the first moment: it inherits the lock from us."""
        generation = uuid.uuid4().hex
        lock = self._engine_lock()
        fd = os.dup(lock.fd)  # a fork before exec (as in gevent) closes ``lock`` itself: see ``file_locks``
        spec = ProcessSpec(
            bundle=self.bundle,
            settings=self.settings,
            runtime=self.state.runtime,
            key=self.state.key,
            generation=generation,
            lock_fd=fd,
            core=self.core,
            listen=self.listen,
            key_file=self.key_file,
            adapter_dirs=self.adapter_dirs,
            adapter_requests=self.adapter_requests,
            journals=self.journals,
            drain_timeout=self.drain_timeout,
        )
        python = None if self.settings.engine == "native" else self.settings.engine_python
        try:
            self.state.remove_file(SOCKET)
            self.state.write_json("spec.json", spec)
            self.state.write_json("status.json", Status(state="loading", generation=generation, pid=0))
            with open(self.state.file(LOG), "ab") as log:
                # runpy warns that the package has already imported the module; without this flag, that warning would
                # be the log's last line when an engine is killed while it loads
                quiet = ("-W", "ignore::RuntimeWarning:runpy")
                subprocess.run(
                    child.python_command(MODULE, self.state.file("spec.json"), flags=quiet, python=python),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=child.environment() if python is None else child.lean_environment(self.state.path),
                    pass_fds=[fd],
                    check=True,
                )
        except OSError as error:
            if python is None or error.filename != python:
                raise
            raise PackagingError(f"engine_python: {python} cannot be started: {error.strerror}") from None
        except subprocess.CalledProcessError:
            raise EngineDied(f"the engine cannot be started: {self._last_line()}") from None
        finally:
            os.close(fd)
            lock.give_away()
        return generation

    def _engine_lock(self) -> FileLock:
        path, remake = self.state.engine_lock_path, self.state.prepare
        try:
            return acquire(path, make_parent=remake, sleep=self._sleep, timeout=LOCK_SECONDS)
        except TimeoutError:
            raise EngineDied("an engine that cannot be ended holds the lock", retry_after=1.0) from None

    def _is_ready(self, generation: str) -> bool:
        """Return whether the engine is ready. Raises ``PackagingError`` or ``EngineDied`` if it has failed."""
        alive = self.state.engine_alive  # before the status: a failing engine first writes its status, then dies
        status = self.state.read_status()
        if status is None or status.generation != generation:
            return False
        if status.state == "failed":
            raise PackagingError(status.reason) if status.kind == "packaging" else EngineDied(status.reason)
        if not alive and status.state == "loading":
            raise EngineDied(self.why_killed())
        self._say("loading")
        return alive and status.state == "ready"

    def why_killed(self) -> str:
        """Say why an engine ended without a word, as far as its directory and its log tell."""
        line = self._last_line()
        if _is_full(self.state.runtime):
            return f"the engine ended while it loaded: no space is left in {self.state.runtime} (TMPDIR); {line}"
        if SAYS_WHY.search(line):
            return f"the engine ended while it loaded: {line}"
        return f"the engine was killed while it loaded (out of memory?): {line}"

    def _last_line(self) -> str:
        lines = [line for line in self.state.log_tail().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "its log is empty"

    def _say(self, stage: str) -> None:
        if self._progress is not None and stage != self._said:
            self._said = stage
            self._progress(stage)

    def _kill(self, generation: str) -> None:
        with self._locked():
            status = self.state.read_status()
            if status is not None and status.generation == generation:
                self._kill_now(status)

    def _kill_now(self, status: Status) -> None:
        """Kill an engine that makes no progress. The caller holds the state directory's lock.

        While the engine lock is held, the pid is still the engine's. Its standby also holds that lock; once the
        standby has taken over, the generation differs and nothing more is killed.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while self.state.engine_alive:
            current = self.state.read_status() or status
            if current.generation != status.generation:
                return
            if current.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(current.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise EngineDied(f"process {current.pid} cannot be killed")
            self._sleep(POLL_SECONDS)

    def alive(self) -> bool:
        return self.state.engine_alive

    def close(self) -> None:
        self._membership.leave()


def _is_full(directory: str) -> bool:
    try:
        return shutil.disk_usage(directory).free < ROOM_BYTES
    except OSError:  # removed by the engine's last user
        return False
