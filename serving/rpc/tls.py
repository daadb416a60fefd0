"""The gRPC server's TLS credentials: the same files as over HTTP, read again when they are renewed."""

from __future__ import annotations

from pathlib import Path

import grpc

from ..control.listen_settings import ListenSettings
from ..system import logs
from ..system.files import Renewals


def credentials(settings: ListenSettings) -> grpc.ServerCredentials | None:
    """Return the server's credentials, None without a certificate. Raises ``OSError``."""
    if settings.tls_cert is None:
        return None
    files = _Files(settings)
    first = files.read()
    return grpc.dynamic_ssl_server_credentials(
        first, files.changed, require_client_authentication=settings.tls_client_ca is not None
    )


class _Files:
    def __init__(self, settings: ListenSettings) -> None:
        assert settings.tls_cert is not None
        self._cert, self._key = settings.tls_cert, settings.tls_key or settings.tls_cert
        self._client_ca = settings.tls_client_ca
        self._renewals = Renewals(self._cert, self._key, self._client_ca)

    def read(self) -> grpc.ServerCertificateConfiguration:
        pair = Path(self._key).read_bytes(), Path(self._cert).read_bytes()
        root = None if self._client_ca is None else Path(self._client_ca).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=root)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for the next connection, or None if they have not changed.

        None is also returned if the files cannot be read, for example in the middle of a renewal."""
        if not self._renewals.look():
            return None
        try:
            return self.read()
        except OSError as error:
            logs.event("the certificate cannot be reloaded; the old one stays in use", level=40, error=str(error))
            return None
