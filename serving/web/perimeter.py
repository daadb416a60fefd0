"""Where a server listens, and whom it lets in: the part of its settings that is about addresses and connections."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Meta

from ..checked import Checked
from ..errors import InvalidField
from ..settings import Count, Seconds

Port = Annotated[int, Meta(ge=0, le=65535)]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._~:-]{1,253}$")]
HostNames = Annotated[tuple[HostName, ...], Meta(description="a list of hosts' names or addresses, without ports")]


class Perimeter(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``host`` is loopback unless told otherwise. ``allowed_hosts`` are names (``Host``) under which a server without
    keys is reached, beside this machine's own; on loopback it takes no others (``sites``).

    ``max_connections`` are a worker's places, ``max_connections_per_address`` those that one address may have of them,
    half by default; the connection that has waited longest for its client makes room (``places``). ``io_timeout``
    (seconds) ends a connection whose client neither sends nor takes a byte for so long: what a slow reader can make us
    hold is then bounded. ``first_byte_timeout`` (seconds) ends one that has sent nothing at all. With ``probe_port``
    probes and metrics have a listener of their own, on ``probe_host`` (``host`` by default), with places of its own;
    ``/metrics`` is then there alone.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    allowed_hosts: HostNames = ()
    max_connections: Count = 1000
    max_connections_per_address: Count | None = None
    io_timeout: Seconds = 30.0
    first_byte_timeout: Seconds = 5.0
    probe_host: str | None = None
    probe_port: Port | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe_host is not None and self.probe_port is None:
            raise InvalidField("probe_host", self.probe_host, "null without probe_port")
        if self.probe_port and self.probe_port == self.port and (self.probe_host or self.host) == self.host:
            raise InvalidField("probe_port", self.probe_port, f"another port than the server's own, {self.port}")

    @property
    def most_of_an_address(self) -> int:
        return self.max_connections_per_address or max(1, self.max_connections // 2)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
