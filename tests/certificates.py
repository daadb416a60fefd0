"""Certificates for tests: an authority, and the certificates it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority; ``ca`` is its certificate's file in ``place``."""

    def __init__(self, place: Path, name: str = "authority") -> None:
        self.place = place
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = str(place / f"{name}.pem")
        Path(self.ca).write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    def issue(self, name: str) -> tuple[str, str, str]:
        """Issue a certificate of this machine; return the files of the certificate, its key, and both in one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = self._builder(subject, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert = _pem(built.sign(self._key, hashes.SHA256()))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files = [self.place / f"{name}{end}" for end in (".crt", ".key", ".both")]
        for file, data in zip(files, (cert, private, cert + private), strict=True):
            file.write_bytes(data)
        return str(files[0]), str(files[1]), str(files[2])

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
