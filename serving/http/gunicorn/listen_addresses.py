"""The addresses at which a server listens, and a check before it starts whether it can listen there."""

from __future__ import annotations

import errno
import os
import socket
import stat

from ...control.listen_settings import ListenSettings

Address = tuple[str, int] | str  # a host and a port, or the path of a Unix socket


def addresses(settings: ListenSettings) -> list[Address]:
    """Return the gateway's address, then that of the listener for probes if there is one."""
    found: list[Address] = [(settings.host, settings.port) if settings.socket is None else settings.socket]
    if settings.probe_port is not None:
        found.append((settings.probe_host or settings.host, settings.probe_port))
    return found


def bind(address: Address) -> str:
    """Format an address for gunicorn's configuration and for people."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def umask(settings: ListenSettings) -> int:
    """Return the umask under which a Unix socket gets ``socket_mode``."""
    return 0o777 & ~int(settings.socket_mode, 8)


def try_address(address: Address) -> None:
    """Raise ``OSError`` if no process can listen at ``address`` now; port 0 means any free port."""
    if isinstance(address, str):
        _try_path(address)
        return
    family, kind, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(found)


def _try_path(path: str) -> None:
    """Check the path of a Unix socket. A socket file that a killed server left behind is not an error."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"{folder} is not a writable directory")
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise OSError(errno.EEXIST, "it exists already and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
