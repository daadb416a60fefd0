"""Settings of a server's addresses and connections: where it listens, and which clients it accepts."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from ..interface.errors import InvalidField
from ..interface.settings import Count, Seconds
from ..interface.validated_struct import Checked

Port = Annotated[int, Meta(ge=0, le=65535)]
# 107 bytes are the kernel's limit
SocketPath = Annotated[str, Meta(pattern=r"^[^\x00]{1,107}$", description="a path of 1 to 107 bytes")]
Mode = Annotated[str, Meta(pattern=r"^0?[0-7]{3}$", description="permissions such as 600 or 660")]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._~:-]{1,253}$")]
ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]{1,253})$"
ORIGIN_ALLOWED = "a list of origins, scheme://host:port in lower case, or *"
Origins = Annotated[tuple[Annotated[str, Meta(pattern=ORIGIN)], ...], Meta(description=ORIGIN_ALLOWED)]
HostNames = Annotated[tuple[HostName, ...], Meta(description="a list of hosts' names or addresses, without ports")]


class ListenSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses a server listens on, and its limits on connections.

    Attributes:
        host: address to listen on.
        port: port to listen on.
        allowed_hosts: further names (``Host``) under which a server without keys is reached, besides this machine's
            own; on loopback all others are refused (protection against DNS rebinding).
        cors_origins: origins (``https://app.example``) whose pages may call the server from a browser (CORS); ``*`` is
            every page.
        max_connections: connections per worker. When all are taken, the one that has waited longest for its client is
            closed.
        max_connections_per_address: connections per worker from one address. None is half of ``max_connections``.
        io_timeout: seconds after which a connection is closed whose client neither sends nor reads.
        first_byte_timeout: seconds after which a connection is closed on which nothing has arrived.
        probe_host: address of the probe listener. None is ``host``.
        probe_port: port of a separate listener for probes and metrics, with connections of its own. ``/metrics`` is
            then served only there.
        socket: path of a Unix socket to listen on instead of ``host`` and ``port``.
        socket_mode: permissions of the socket: whoever may write to it may use the server.
        tls_cert: PEM file with the certificate (and its chain) of gateway and probes.
        tls_key: PEM file with its key. None means that ``tls_cert`` has it too.
        tls_client_ca: PEM file with authorities. Clients of the gateway must have a certificate of one of them.
        probe_tls_client_ca: the same for the probe listener.
        grpc_port: port of KServe's inference service over gRPC, served by a separate process on ``host`` with the
            gateway's certificates.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    allowed_hosts: HostNames = ()
    cors_origins: Origins = ()
    max_connections: Count = 1000
    max_connections_per_address: Count | None = None
    io_timeout: Seconds = 30.0
    first_byte_timeout: Seconds = 5.0
    probe_host: str | None = None
    probe_port: Port | None = None
    socket: SocketPath | None = None
    socket_mode: Mode = "600"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    probe_tls_client_ca: str | None = None
    grpc_port: Port | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_probes()
        self._check_socket()
        self._check_grpc()
        for name in ("tls_key", "tls_client_ca", "probe_tls_client_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise InvalidField(name, getattr(self, name), "null without tls_cert")

    def _check_probes(self) -> None:
        if self.probe_tls_client_ca is not None and self.probe_port is None:
            raise InvalidField("probe_tls_client_ca", self.probe_tls_client_ca, "null without probe_port")
        if self.probe_host is not None and self.probe_port is None:
            raise InvalidField("probe_host", self.probe_host, "null without probe_port")
        if self.probe_port and self.probe_port == self.port and (self.probe_host or self.host) == self.host:
            raise InvalidField("probe_port", self.probe_port, f"another port than the server's own, {self.port}")

    def _check_grpc(self) -> None:
        if self.grpc_port and self.grpc_port in (self.port if self.socket is None else None, self.probe_port):
            raise InvalidField("grpc_port", self.grpc_port, "another port than the server's own and that for probes")

    def _check_socket(self) -> None:
        if self.socket is None:
            if int(self.socket_mode, 8) != 0o600:
                raise InvalidField("socket_mode", self.socket_mode, "no mode unless socket is set")
            return
        if (self.host, self.port) != ("127.0.0.1", 8000):
            raise InvalidField("socket", self.socket, "null beside host and port: a server listens at one of them")
        if self.tls_cert is not None:
            raise InvalidField("socket", self.socket, "null beside tls_cert: nobody listens in on a Unix socket")

    @property
    def max_of_an_address(self) -> int:
        return self.max_connections_per_address or max(1, self.max_connections // 2)


@lru_cache(maxsize=64)  # asked for each request, with the name in its ``Host``
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
