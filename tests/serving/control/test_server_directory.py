"""The directories that servers leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.control.server_directory import server_directory

SERVER = """
import time
from mlflow_llm.serving.control.server_directory import server_directory
with server_directory() as directory:
    print(directory, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_server(place: Path) -> Path:
    """Start a server, kill it with all its processes and return the directory that it leaves."""
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        directory = Path(server.stdout.readline().strip())
        server.kill()
    return directory


def test_a_directory_goes_with_its_server(place: Path) -> None:
    """A server's directory is removed when the server ends."""
    with server_directory() as directory:
        assert directory.parent == place
    assert list(place.iterdir()) == []


def test_the_next_start_removes_directories_of_killed_servers(place: Path) -> None:
    """Directories of killed servers are removed, those of living servers or workers and all other files are kept."""
    left, used = killed_server(place), killed_server(place)
    worker = PlanDirectory(used).add_worker()
    other = place / "mlflow-llm-server-of-others"
    other.mkdir()
    (place / "mlflow-llm-server-link").symlink_to(other)
    with server_directory() as first, server_directory() as second:
        assert not left.exists()
        assert {used, other, first, second} < set(place.iterdir())
    worker.remove()
    with server_directory():
        assert not used.exists()
    assert other.exists()
