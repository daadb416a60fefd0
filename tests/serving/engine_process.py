"""``mlflow-llm engine`` in a process of its own, on a loopback port: what another host would run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from serving_process import GATED_CORE, free_port, python_path

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.supervision.engine_spec import EngineSpec


class EngineProcess:
    """``start`` it as often as wanted, always at the same address; ``end`` is SIGTERM, and waits."""

    def __init__(
        self, bundle: Bundle, key_file: str, runtime: Path, *options: str, address: str | None, prefix: tuple[str, ...]
    ) -> None:
        self.address = address or f"tcp://127.0.0.1:{free_port()}"
        self.runtime, self._log, self.state = runtime, runtime / "log", runtime / "state"
        model = EngineSpec(bundle=bundle, core=GATED_CORE, settings=EngineSettings(idle_timeout=0.3))
        spec = runtime / "model.json"
        spec.write_bytes(msgspec.json.encode(model))
        command = [*prefix, sys.executable, "-m", "mlflow_llm.serving.cli", "engine", "--spec", str(spec)]
        self._command = [
            *command,
            "--listen",
            self.address,
            "--key-file",
            key_file,
            "--runtime-dir",
            str(runtime / "r"),
        ]
        self._command += options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as sink:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": python_path(),
                    "MLFLOW_LLM_STATE": str(self.state),
                },
            )

    def await_ready(self, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while "listening on" not in self.log():
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def pid(self) -> int:
        """Return the process id of the engine itself."""
        (status,) = (self.runtime / "r").glob("*/status.json")
        return int(json.loads(status.read_text())["pid"])

    def end(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)

    def kill(self) -> None:
        """Kill the command alone, with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(240)
        assert not (self.runtime / "r").exists(), list((self.runtime / "r").rglob("*"))


@contextlib.contextmanager
def engine_process(
    bundle: Bundle, key_file: str, *options: str, address: str | None = None, prefix: tuple[str, ...] = ()
) -> Iterator[EngineProcess]:
    """Start an engine, ready or not, and end it with nothing left. ``prefix`` are words before the command."""
    # a short path of our own: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mle-") as runtime:
        engine = EngineProcess(bundle, key_file, Path(runtime), *options, address=address, prefix=prefix)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()
