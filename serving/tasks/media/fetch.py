"""Fetches a URL on behalf of a caller: one GET to one host, within a time and a size.

The connection waits for its descriptor as confined processes are waited for (``confined.wait``): in a worker and in the
gRPC process the event loop goes on, in other processes the thread waits. So every wait ends in time, whatever the
server sends, and nothing depends on whether sockets are monkey-patched.

Redirects are not followed: their target has not been allowed. Proxies from the environment are not used: a proxy looks
up the host by itself, perhaps in another network, and would get the URL of a caller whose host was allowed for this
machine. No cookies, credentials or client certificates are sent.
"""

from __future__ import annotations

import _socket  # gevent replaces ``socket``, whose sockets belong to the thread that makes them
import contextlib
import errno
import functools
import http.client
import io
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote

from ...sandbox import wait

T = TypeVar("T")
CHUNK_BYTES = 1 << 16
OVERHEAD_BYTES = 1 << 19  # bytes of a response beyond its body: headers, the sizes of chunks, what is read ahead
URL_SAFE_CHARACTERS = (
    "/:@!$&'()*+,;=~?%[]"  # as they are in a path or query; what else is not a letter or digit is percent-encoded
)


class NotFetched(Exception):
    """The URL cannot be fetched; the text says why in a few words, with nothing that the server wrote."""


class TooLarge(Exception):
    """The error that there are more bytes than allowed."""


def system_resolve(host: str, port: int, seconds: float) -> list[Any]:
    """Look up a host as ``socket.getaddrinfo`` does. Raises ``OSError``. The system's resolver has its own time limit,
    whatever ``seconds`` says."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


current_resolve: Callable[[str, int, float], list[Any]] = system_resolve


def use_resolve(resolve: Callable[[str, int, float], list[Any]]) -> None:
    """Set the function with which this process looks up hosts from now on."""
    global current_resolve
    current_resolve = resolve


def fetch(url: SplitResult, maximum: int, until: float) -> bytes:
    """Return the body of ``url``, an http or https URL: at most ``maximum`` bytes, before ``until`` (monotonic).

    Raises ``NotFetched`` and ``TooLarge``.
    """
    host, secure = str(url.hostname), url.scheme == "https"
    try:
        connected = connect_to(host, url.port or (443 if secure else 80), until)
        with _Connection(connected, until) as connection:
            if secure:
                connection.secure(host)
            connection.sendall(_request(url))
            return _body(connection, maximum)
    except TimeoutError:
        raise NotFetched("it took too long") from None
    except (http.client.IncompleteRead, ssl.SSLEOFError, ConnectionResetError, BrokenPipeError):
        raise NotFetched("the server closed the connection too early") from None
    except ssl.SSLCertVerificationError:
        raise NotFetched("the server's certificate is not valid for it") from None
    except ssl.SSLError:
        raise NotFetched("the TLS connection with the server failed") from None
    except (http.client.HTTPException, ValueError):
        raise NotFetched("the server's answer is not valid HTTP") from None
    except OSError:
        raise NotFetched("the connection with the server failed") from None


def _request(url: SplitResult) -> bytes:
    host = f"[{url.hostname}]" if ":" in str(url.hostname) else url.hostname
    target = quote(url.path or "/", safe=URL_SAFE_CHARACTERS, errors="replace")
    if url.query:
        target += "?" + quote(url.query, safe=URL_SAFE_CHARACTERS, errors="replace")
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {host}" if url.port is None else f"Host: {host}:{url.port}",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "User-Agent: mlflow-llm",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _body(connection: _Connection, maximum: int) -> bytes:
    with http.client.HTTPResponse(connection, method="GET") as response:  # type: ignore[arg-type]
        response.begin()
        if response.status != 200:
            redirect = ", a redirect, which is not followed" if 300 <= response.status < 400 else ""
            raise NotFetched(f"the server answered {response.status}{redirect}")
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise NotFetched("the server sent it compressed")
        if (response.length or 0) > maximum:
            raise TooLarge
        data = bytearray()
        while chunk := response.read(CHUNK_BYTES):
            data += chunk
            if len(data) > maximum:
                raise TooLarge
            connection.expect(CHUNK_BYTES)
        if response.length:
            raise http.client.IncompleteRead(b"")
    if not data:
        raise NotFetched("the server sent nothing")
    return bytes(data)


def connect_to(host: str, port: int, until: float) -> _socket.socket:
    """Connect to one of the host's addresses; each gets its share of the remaining time."""
    try:
        found = current_resolve(host, port, _left(until))
    except TimeoutError:
        raise
    except (OSError, UnicodeError):
        raise NotFetched("its host is not known") from None
    last: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for tried, (family, kind, protocol, _, address) in enumerate(found):
        share = time.monotonic() + _left(until) / (len(found) - tried)
        made = _socket.socket(family, kind, protocol)
        try:
            _connect(made, address, share)
            return made
        except OSError as error:
            made.close()
            last = error
        except BaseException:  # of a greenlet that is killed while it waits
            made.close()
            raise
    raise last


def _connect(made: _socket.socket, address: Any, until: float) -> None:
    made.setblocking(False)
    error = made.connect_ex(address)
    if error in (errno.EINPROGRESS, errno.EINTR):
        _await(made, True, until)
        error = made.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def _await(made: _socket.socket, writing: bool, until: float) -> None:
    while not wait(made.fileno(), writing, _left(until)):
        pass


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Connection(io.RawIOBase):
    """A connection with a server, plain or with TLS. It is the socket and the file of ``http.client.HTTPResponse``.

    More than ``OVERHEAD_BYTES`` bytes beyond what is expected of the body are an ``HTTPException``: endless headers, or
    millions of chunks of a byte, would keep this process busy for as long as it waits.
    """

    def __init__(self, connected: _socket.socket, until: float) -> None:
        self._socket = connected
        self._until = until
        self._expected = OVERHEAD_BYTES + CHUNK_BYTES
        self._tls: ssl.SSLObject | None = None
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()

    def secure(self, host: str) -> None:
        """Begin TLS. Raises ``ssl.SSLError``, also for a certificate that is not valid for ``host``."""
        self._tls = tls_context().wrap_bio(self._arrived, self._leaving, server_hostname=host)
        self._secured(self._tls.do_handshake)

    def expect(self, size: int) -> None:
        """Expect further ``size`` bytes of the body."""
        self._expected += size

    def sendall(self, data: bytes) -> None:
        if self._tls is None:
            self._send(data)
        else:
            self._secured(functools.partial(self._tls.write, data))

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, CHUNK_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self._receive(len(view)) if self._tls is None else self._decrypted(self._tls, len(view))
        view[: len(data)] = data
        self._expected -= len(data)
        if self._expected < 0:
            raise http.client.HTTPException
        return len(data)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            _await(self._socket, True, self._until)
            with contextlib.suppress(BlockingIOError):
                view = view[self._socket.send(view) :]

    def _receive(self, size: int) -> bytes:
        """Return at least one byte; b"" at the end. It waits even if there is something, so that others get a turn."""
        while True:
            _await(self._socket, False, self._until)
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv(size)

    def _decrypted(self, tls: ssl.SSLObject, size: int) -> bytes:
        try:
            return self._secured(functools.partial(tls.read, size))
        except ssl.SSLZeroReturnError:
            return b""

    def _secured(self, step: Callable[[], T]) -> T:
        """Do a step of TLS as often as it needs, and send and receive in between what it asks for."""
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._send(self._leaving.read())
                if data := self._receive(CHUNK_BYTES):
                    self._arrived.write(data)
                else:
                    self._arrived.write_eof()
            else:
                self._send(self._leaving.read())
                return done


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context: loading the system's certificates takes tens of milliseconds."""
    return ssl.create_default_context()
