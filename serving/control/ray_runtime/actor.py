"""The actor of an engine host, on a node of the cluster: it keeps ``mlflow-llm engine --join`` running there.

The host is a process of its own, so that its engines, their drain and their connections have nothing to do with Ray's
worker. It holds the actor's end of a pipe, and drains when the actor is gone. No module of Ray's is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import zlib
from typing import Any

from ...system import child
from ...system.backoff import Backoff
from ...system.files import STATE_VARIABLE, replace_file
from ..hosts.host_identity import ID
from ..settings import default_state_dir
from .messages import Launch

FIRST_PORT, PORTS = 20_000, 10_000  # below those that the kernel gives to clients, and above those of Ray's workers
LAST_BYTES = 4096
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0


class HostActor:
    """The actor of the host ``name``, which was started for ``engine`` on the node with this address.

    ``memory`` is what the host may offer; None is all of the node's.
    """

    def __init__(self, name: str, engine: str, node_ip: str, launch: Launch, memory: int | None = None) -> None:
        self._name, self._engine, self._launch, self._memory = name, engine, launch, memory
        self._host = f"[{node_ip}]" if ":" in node_ip else node_ip
        self._place = default_state_dir() / "ray" / name
        self._process: subprocess.Popen[bytes] | None = None
        self._message = ""
        self._draining = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """Return what the leader is told of this host."""
        process = self._process
        pid = process.pid if process is not None and process.poll() is None else 0
        return {"draining": self._draining.is_set(), "message": self._message, "pid": pid}

    def drain(self) -> None:
        """Let the host move its engine and its requests to others, and end; returns at once. A second call changes
        nothing."""
        with self._lock:
            if not self._draining.is_set():
                self._draining.set()
                if self._process is not None:
                    self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the actor for good; called when its host has ended."""

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)
        while not self._draining.is_set():
            try:
                status = self._run_host()
            except OSError as error:
                status, self._message = None, str(error)
            if status == 0:  # it drained, or nothing was placed on it any more
                break
            if status is not None:
                self._message = f"the host ended with status {status}: {self._last_words()}"
            self._draining.wait(backoff.failed())
        self._draining.set()
        shutil.rmtree(self._place, ignore_errors=True)
        self.end()

    def _run_host(self) -> int:
        """Run the host once, and return its exit status."""
        self._place.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(self._place / ID, self._name.encode())
        replace_file(self._place / "key", self._launch.key.encode("latin-1"))
        environment = child.environment() | self._launch.environment | {STATE_VARIABLE: str(self._place)}
        with open(self._place / "host.log", "ab") as log, self._lock:
            if self._draining.is_set():
                return 0
            self._process = process = subprocess.Popen(
                self._command(), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd="/"
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._launch.database.encode() + b"\n")
            process.stdin.flush()
        status = process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return status

    def _command(self) -> list[str]:
        # a port of its own, so that hosts which start on one node at the same time do not take the same
        port = FIRST_PORT + zlib.crc32(self._name.encode()) % PORTS
        words = ["engine", "--join", "-", "--only", self._engine, "--name", self._name]
        words += ["--listen", f"tcp://{self._host}:{port}", "--key-file", str(self._place / "key")]
        words += ["--drain-timeout", str(self._launch.drain_timeout)]
        for key, value in self._launch.grants.items():
            words += ["-C", f"{key}={json.dumps(value)}"]
        if self._memory is not None:
            words += ["--memory", str(self._memory)]
        return child.python_command("serving.cli", *words)

    def _last_words(self) -> str:
        """Return the last line that the host wrote."""
        try:
            with open(self._place / "host.log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
