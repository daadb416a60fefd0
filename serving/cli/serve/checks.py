"""The checks of ``mlflow-llm serve`` before minutes of loading."""

from __future__ import annotations

import errno
import importlib.util

import click

from ...control.settings import ServerSettings, ledger_dir
from ...http.gunicorn.listen_addresses import addresses, bind, try_address
from ...http.gunicorn.tls import gateway_tls, probe_tls


def check_place(settings: ServerSettings) -> None:
    """Check the state directory, the addresses to listen on, and the store.

    Raises ``PackagingError``, ``ClickException``.
    """
    _check_tokens(settings)
    _check_grpc(settings)
    if settings.database is not None:
        from ..store import opened  # and SQLAlchemy

        ledger_dir(settings)
        with opened(settings.database, make=True):
            pass
    gateway_tls(settings)
    probe_tls(settings)
    for address in addresses(settings):
        try:
            try_address(address)
        except OSError as error:
            other = {errno.EADDRINUSE: "; choose another address with --port, --probe-port or --socket"}.get(
                error.errno or 0, ""
            )
            raise click.ClickException(f"cannot listen on {bind(address)}: {error.strerror}{other}") from None


def _check_grpc(settings: ServerSettings) -> None:
    """Raise ``ClickException`` where gRPC could not be served."""
    if settings.grpc_port is None:
        return
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
        raise click.ClickException("--grpc-port needs grpcio: pip install 'mlflow-llm[grpc]'")
    address = (settings.host, settings.grpc_port)
    try:
        try_address(address)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {bind(address)} (--grpc-port): {error.strerror}") from None


def _check_tokens(settings: ServerSettings) -> None:
    """Raise ``ClickException`` where bearer tokens could not be verified; a JWKS URL may answer later."""
    if settings.jwt_jwks is None:
        return
    try:
        from ...frontend import jwks
    except ModuleNotFoundError:
        raise click.ClickException("--jwt-jwks needs joserfc: pip install 'mlflow-llm[jwt]'") from None
    if jwks.is_url(settings.jwt_jwks):
        return
    try:
        with open(settings.jwt_jwks, "rb") as file:
            found = jwks.parsed(file.read())
    except (OSError, jwks.BadKeySet) as error:
        raise click.ClickException(f"--jwt-jwks {settings.jwt_jwks}: {error}") from None
    if not found:
        raise click.ClickException(f"--jwt-jwks {settings.jwt_jwks}: it has no public key for verifying signatures")
