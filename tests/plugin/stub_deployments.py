"""Helpers for deployments of the stub server, which needs no model."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.exceptions import MlflowException
from processes import alive_after

STUB = str(Path(__file__).with_name("stub_server.py"))


def stub_command(real: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *given: [sys.executable, STUB, *real(*given)[5:]]


def started(deployment: dict[str, Any]) -> Any:
    """Return the command line and environment the server was started with."""
    with urllib.request.urlopen(f"{deployment['url']}/started", timeout=240) as answer:
        return json.loads(answer.read())


def kill(deployment: dict[str, Any]) -> None:
    process = psutil.Process(deployment["pid"])
    process.kill()
    assert not alive_after([process])


def refused(code: str, reason: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    with pytest.raises(MlflowException, match=reason) as error:
        call(*given, **named)
    assert error.value.error_code == code
