"""Connections of the commands: to a host, with or without TLS, or to a Unix socket of this machine."""

from __future__ import annotations

import functools
import http.client
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from .shared_options import SharedOption

CA, CERT = f"{__name__}.ca", f"{__name__}.cert"  # in click's context

Connect = Callable[[float], http.client.HTTPConnection]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the Unix socket at ``path``."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connector(url: str) -> tuple[Connect, str, str]:
    """Return ``(connect, place, prefix)`` for a URL.

    ``connect(timeout)`` makes a connection, ``place`` names the server in messages, ``prefix`` goes before all paths.
    ``url`` is ``http://host:port`` or ``https://…``, with or without a path prefix, or ``unix:/path/of/socket``. Raises
    ``BadParameter``.
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = path if os.path.exists(path) else unquote(path)
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if not path or "\0" in path:
            raise click.BadParameter(f"{url!r} does not name a Unix socket; write unix:/path/of/socket")
        return functools.partial(UnixConnection, path), f"unix:{path}", ""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise click.BadParameter(f"{url!r} is not an http(s) URL or unix:/path/of/socket")
    place, prefix = f"{parts.hostname}:{port}", parts.path.rstrip("/")
    if parts.scheme == "https":
        context = client_context(_option(CA), _option(CERT))
        return lambda timeout: _secure(parts.hostname or "", port, timeout, context), place, prefix
    return lambda timeout: http.client.HTTPConnection(parts.hostname or "", port, timeout=timeout), place, prefix


def _secure(host: str, port: int, timeout: float, context: ssl.SSLContext) -> http.client.HTTPConnection:
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)


def client_context(ca: str | None, cert: str | None) -> ssl.SSLContext:
    """Return a TLS context with the system's authorities, or those in the file ``ca``.

    ``cert`` is a PEM file with the client's certificate and its key. Raises ``BadParameter``."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise click.BadParameter(f"--ca {ca}: {error.strerror or 'not a PEM file with certificates'}") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert)
        except (OSError, ssl.SSLError) as error:
            raise click.BadParameter(
                f"--cert {cert}: {error.strerror or 'not a PEM file with certificate and key'}"
            ) from None
    return context


def _option(name: str) -> Any:
    context = click.get_current_context(silent=True)
    return context.meta.get(name) if context is not None else None


def tls_options(command: Any) -> Any:
    """Add ``--ca`` and ``--cert`` (also from MLFLOW_LLM_CA and MLFLOW_LLM_CERT), for ``connector``."""
    for option, name, variable, text in (
        (
            "--cert",
            CERT,
            "MLFLOW_LLM_CERT",
            "PEM file with the client's certificate and key, for servers that require one.",
        ),
        ("--ca", CA, "MLFLOW_LLM_CA", "PEM file with the CA certificates that https servers are verified with."),
    ):
        command = click.option(
            option,
            cls=SharedOption,
            envvar=variable,
            type=click.Path(dir_okay=False),
            help=f"{text} ({variable})",
            expose_value=False,
            callback=functools.partial(_keep, name),
        )(command)
    return command


def _keep(name: str, context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[name] = value
