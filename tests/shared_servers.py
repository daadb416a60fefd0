"""Servers shared by several files of tests: started for the first test that asks, ended with the last of the files.

An idle one still takes a few percent of a CPU as long as the other tests run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

TOGETHER = {  # files by name: one process of tests runs those of a line, one after the other
    name: servers
    for servers, names in {
        "unsteady, fast, deliberate": (
            "test_server_faults.py",
            "test_server_recovery.py",
            "test_server_refusals.py",
            "test_server_limits.py",
            "test_stalled_engine_health.py",
            "test_keep_alive.py",
        ),
        "observed": ("test_gateway_recipe.py", "test_gateway_app.py", "test_broken_streams.py", "test_commands.py"),
        "url": ("test_agent_clients.py", "test_client_libraries.py", "test_server_clients.py", "test_judges.py"),
    }.items()
    for name in names
}


class SharedServers:
    """``get(name, start)``: what ``start()`` gives on entering, the same until ``close``."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._servers: dict[str, Any] = {}

    def get(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        if name not in self._servers:
            self._servers[name] = self._running.enter_context(start())
        return self._servers[name]

    def close(self) -> None:
        """Stop all servers; one that is asked for again is started anew."""
        self._servers.clear()
        self._running.close()


SERVERS = SharedServers()
