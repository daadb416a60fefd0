"""Where a server listens, and whether it could, asked before it is started."""

from __future__ import annotations

import socket

from .perimeter import Perimeter


def addresses(settings: Perimeter) -> list[tuple[str, int]]:
    """The gateway's, then that for probes."""
    found = [(settings.host, settings.port)]
    if settings.probe_port is not None:
        found.append((settings.probe_host or settings.host, settings.probe_port))
    return found


def bind(host: str, port: int) -> str:
    """An address as gunicorn's configuration has it."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def try_address(host: str, port: int) -> None:
    """Raises ``OSError`` where nobody can listen there now; port 0 is any free one."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
