"""Certificates of a listener: what is refused when they are read, and when they are read again."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from certificates import Authority

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.http.gunicorn.tls import Tls, gateway_tls, make_context, probe_tls
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_versions_and_ciphers(authority: Authority) -> None:
    """TLS is 1.2 or newer, with forward secrecy only."""
    cert, key, _ = authority.issue("server")
    context = make_context(cert, key, None)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE
    names = [cipher["name"] for cipher in context.get_ciphers()]
    assert names
    assert all(name.startswith(("TLS_", "ECDHE-")) and "CBC" not in name for name in names)
    assert make_context(cert, key, authority.ca).verify_mode == ssl.CERT_REQUIRED


def test_files_that_cannot_be_read(authority: Authority, tmp_path: Path) -> None:
    """A missing file, a key of another certificate and a file that is not PEM are refused by the file's name."""
    cert, key, both = authority.issue("server")
    _, other, _ = authority.issue("other")
    make_context(both, None, None)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for files, reported in (
        ((str(tmp_path / "none"), key, None), "certificate .*none: No such file"),
        ((cert, str(tmp_path / "none"), None), "key .*none: No such file"),
        ((cert, key, str(tmp_path / "none")), "client CA .*none: No such file"),
        ((cert, other, None), "server.crt and .*other.key: key values mismatch"),
        ((str(nonsense), key, None), "nonsense.pem"),
        ((cert, key, str(nonsense)), "client CA .*nonsense.pem"),
        ((cert, None, None), "server.crt"),
    ):
        with pytest.raises(PackagingError, match=reported):
            make_context(*files)


def test_a_renewed_certificate_is_read_again(authority: Authority) -> None:
    """A renewed certificate is used by the next connection; files that do not match leave the old one."""
    cert, key, _ = authority.issue("server")
    tls = Tls(cert, key)
    first = tls.context
    tls.look()
    assert tls.context is first
    new_cert, new_key, _ = authority.issue("renewed")
    os.replace(new_cert, cert)
    tls.look()
    assert tls.context is first
    os.replace(new_key, key)
    tls.look()
    assert tls.context is not first


def test_listeners(authority: Authority) -> None:
    """Gateway and probe listeners have one certificate, and each has its own client CA."""
    cert, key, _ = authority.issue("server")
    settings = ServerSettings(tls_cert=cert, tls_key=key, tls_client_ca=authority.ca, probe_port=1)
    gateway, probes = gateway_tls(settings), probe_tls(settings)
    assert gateway is not None
    assert probes is not None
    assert (gateway.context.verify_mode, probes.context.verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_NONE)
    assert gateway_tls(ServerSettings()) is None
    assert probe_tls(ServerSettings()) is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tls_key": "a"}, "tls_key"),
        ({"tls_client_ca": "a"}, "tls_client_ca"),
        ({"probe_tls_client_ca": "a", "probe_port": 1}, "probe_tls_client_ca"),
        ({"probe_tls_client_ca": "a", "tls_cert": "b"}, "probe_tls_client_ca"),
        ({"socket": "/a", "port": 9}, "socket"),
        ({"socket": "/a", "tls_cert": "b"}, "socket"),
        ({"socket": ""}, "socket"),
        ({"socket": "/" + "a" * 200}, "socket"),
        ({"socket_mode": "999"}, "socket_mode"),
        ({"socket_mode": "0660"}, "socket_mode"),
    ],
)
def test_settings_without_effect(values: dict[str, object], field: str) -> None:
    """A setting that depends on another one is refused without it."""
    with pytest.raises(InvalidField, match=field):
        ServerSettings(**values)
