"""Authentication and encryption of TCP connections: CurveZMQ with both key pairs derived from one pre-shared key.

The engine's public key is also derived from the shared key, and CURVE never sends it in the clear. So only a client
with the shared key can open a connection; everything after that is encrypted (https://rfc.zeromq.org/spec/26/).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from typing import Any

import zmq
from zmq.utils import z85

from ..interface.errors import PackagingError

MIN_KEY_BYTES = 16
HEARTBEAT_MS, SILENT_MS = 3_000, 15_000  # TCP alone does not notice that a host is gone
TCP = re.compile(r"tcp://([^\s:/]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")


def check_address(address: str) -> str:
    """Return ``address`` if it has the form ``tcp://host:port``; otherwise raise ``PackagingError``."""
    found = TCP.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise PackagingError(f"{address[:200]}: expected tcp://host:port")
    return address


def write_key(path: str) -> None:
    """Write a new key of 32 random bytes, in hex, to a new file with mode 0600. Raises ``PackagingError``."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise PackagingError(f"key file {path}: {error.strerror}") from None


NO_KEY = "an engine that listens on TCP needs key_file, a file with the key its clients share"


def read_key(path: str | None, missing: str = NO_KEY) -> bytes:
    """Return the shared key from a file that only its owner can access (mode 0600 or stricter).

    Raises ``PackagingError``; ``missing`` is the message if there is no path.
    """
    if not path:
        raise PackagingError(missing)
    try:
        with open(path, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise PackagingError(f"key_file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise PackagingError(f"key_file {path} can be read by others; chmod 600 it")
    if len(key) < MIN_KEY_BYTES:
        raise PackagingError(f"key_file {path}: a key has at least {MIN_KEY_BYTES} bytes")
    return key


def _pair(key: bytes, role: str) -> tuple[bytes, bytes]:
    """Derive a (public, secret) key pair in Z85 with HMAC-SHA-256: any 32 bytes are a valid Curve25519 secret."""
    secret = z85.encode(hmac.digest(key, f"mlflow-llm {role}".encode(), hashlib.sha256))
    return zmq.curve_public(secret), secret


def secure_server(socket: Any, key: bytes) -> None:
    """Use CURVE on the addresses that ``socket`` binds from now on; earlier ones stay as they are."""
    _, secret = _pair(key, "engine")
    _watch(socket)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def secure_client(socket: Any, key: bytes) -> None:
    """Use CURVE on ``socket``; call this before it connects."""
    public, secret = _pair(key, "client")
    _watch(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, _pair(key, "engine")[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def _watch(socket: Any) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.IPV6, 1)
