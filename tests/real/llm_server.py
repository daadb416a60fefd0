"""``mlflow-llm serve`` for tests with real weights: on a free port, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mlflow_llm.serving.control.spec import ServeSpec

WARNINGS_OF_CLIENTS = [  # about their own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@contextlib.contextmanager
def served(root: Path, *arguments: str, spec: ServeSpec | None = None, **environment: str) -> Iterator[str]:
    """Yield the server's URL, from ready to drained; ``root`` takes the log, and ``spec`` overrides the arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if spec is None:
        arguments = ("--port", str(port), "--workers", "1", *arguments)
    else:
        spec = msgspec.structs.replace(spec, settings=msgspec.structs.replace(spec.settings, port=port, workers=1))
        (root / "spec.json").write_bytes(msgspec.json.encode(spec))
        arguments = ("--spec", str(root / "spec.json"))
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", *arguments]
    given = os.environ | environment
    with open(root / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=given)
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, (root / "log").read_text()[-3000:]
            assert time.monotonic() < until, (root / "log").read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(240)
