"""Where a server listens, and whom it lets in: the part of its settings that is about addresses and connections."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Meta

from ..checked import Checked

Port = Annotated[int, Meta(ge=0, le=65535)]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._~:-]{1,253}$")]
HostNames = Annotated[tuple[HostName, ...], Meta(description="a list of hosts' names or addresses, without ports")]


class Perimeter(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``host`` is loopback unless told otherwise. ``allowed_hosts`` are names (``Host``) under which a server without
    keys is reached, beside this machine's own; on loopback it takes no others (``sites``)."""

    host: str = "127.0.0.1"
    port: Port = 8000
    allowed_hosts: HostNames = ()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
