"""Whether a server could listen at an address, asked before it is started."""

from __future__ import annotations

import socket


def try_address(host: str, port: int) -> None:
    """Raises ``OSError`` where nobody can listen there now; port 0 is any free one."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
