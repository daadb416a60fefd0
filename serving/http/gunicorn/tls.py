"""TLS for a listener: versions 1.2 and 1.3, ciphers with forward secrecy, and certificates reloaded when renewed."""

from __future__ import annotations

import ssl

from ...control.listen_settings import ListenSettings
from ...interface.errors import PackagingError
from ...system import logs
from ...system.files import Renewals

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; all ciphers of TLS 1.3 are fine


class Tls:
    """The TLS of a listener. ``context`` is used for the next connection.

    ``look`` is called regularly and reloads changed files. If they cannot be read, for example in the middle of a
    renewal, ``context`` stays as it is.
    """

    def __init__(self, cert: str, key: str | None = None, client_ca: str | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._renewals = Renewals(cert, key, client_ca)
        self.context = make_context(cert, key, client_ca)

    def look(self) -> None:
        if not self._renewals.look():
            return
        try:
            self.context = make_context(self._cert, self._key, self._client_ca)
            logs.event("the certificate was reloaded", file=self._cert)
        except PackagingError as error:
            logs.event("the certificate cannot be reloaded; the old one stays in use", level=40, error=str(error))


def gateway_tls(settings: ListenSettings) -> Tls | None:
    """Return the TLS of the gateway's listener, or None. Raises ``PackagingError`` as ``make_context`` does."""
    if settings.tls_cert is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def probe_tls(settings: ListenSettings) -> Tls | None:
    """Return the TLS of the listener for probes, or None.

    It uses the gateway's certificate, but has its own client CA, because probes may have no client certificate.
    """
    if settings.tls_cert is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key, settings.probe_tls_client_ca)


def make_context(cert: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """Make an SSL context.

    Raises ``PackagingError``, naming the file, if one cannot be read or the key does not belong to the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("certificate", cert), ("key", key), ("client CA", client_ca)):
        if path is not None:
            _check_file(name, path)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise PackagingError(f"TLS: {cert} and {key or 'its key'}: {_reason(error)}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError) as error:
            raise PackagingError(f"TLS: client CA {client_ca}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_file(name: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise PackagingError(f"TLS: {name} {path}: {error.strerror}") from None


def _no_password() -> str:
    """Raise an error for a key with a password, where OpenSSL would ask for it on the terminal."""
    raise PackagingError("TLS: the key has a password; a server needs one without")


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else "no PEM"
