"""``serve --grpc-port`` says what is missing before a model is read."""

from __future__ import annotations

import importlib.util
import socket

import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.errors import InvalidField


def test_without_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without grpcio the error names the extra that installs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "grpc" else find(name, *rest))
    done = CliRunner().invoke(cli, ["serve", "-m", "models:/a/1", "--port", "0", "--grpc-port", "0"])
    assert done.exit_code != 0
    assert "pip install 'mlflow-llm[grpc]'" in done.output


def test_a_port_that_is_taken() -> None:
    """A gRPC port that another process, or another listener of the server, uses is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(cli, ["serve", "-m", "models:/a/1", "--port", "0", "--grpc-port", port])
    assert done.exit_code != 0
    assert f"cannot listen on 127.0.0.1:{port} (--grpc-port)" in done.output
    for other in ({"port": 9000}, {"probe_port": 9000}):
        with pytest.raises(InvalidField, match="grpc_port: 9000"):
            ServerSettings(grpc_port=9000, **other)
