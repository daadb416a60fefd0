"""The processes of a server whose endpoints change."""

from __future__ import annotations

import contextlib
import json

import psutil
from processes import gone
from serving_process import Running

from mlflow_llm.serving.interface.settings import EngineSettings

ENGINE = EngineSettings(idle_timeout=0.3)


def engines(server: Running) -> list[int]:
    """Return the process ids of the living engines."""
    found = []
    for status in server.runtime.glob("*/status.json"):
        try:
            pid = json.loads(status.read_text())["pid"]
        except FileNotFoundError:
            continue
        if not gone(pid):
            found.append(pid)
    return found


def controllers(server: Running) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # just ended
            found += [process] if any("control.main" in word for word in process.cmdline()) else []
    return found
