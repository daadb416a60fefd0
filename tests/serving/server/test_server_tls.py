"""Real servers behind TLS and on a Unix socket, and the commands that speak to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from click.testing import CliRunner
from instant_model import write_instant_model
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException
from server_calls import BODY, until
from serving_process import Running, free_port, running

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.interface.bundle import Bundle

LONG = BODY | {"stream": True, "max_tokens": 4000}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_instant_model(tmp_path_factory.mktemp("secured"), step_delay=0.01)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(bundle: Bundle, authority: Authority) -> Iterator[tuple[Running, int]]:
    """Yield a server that requires client certificates, except for its probes, and the probes' port."""
    cert, key, _ = authority.issue("server")
    port = free_port()
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    with running(bundle, probe_port=port, until="probes and metrics on https", **files) as server:
        until(lambda: answered(lambda: probe(authority, port, "/ready")) == 200)
        yield server, port


def answered(ask) -> int:
    with contextlib.suppress(OSError):
        return int(ask())
    return 0


def client(authority: Authority, cert: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if cert is not None:
        context.load_cert_chain(cert)
    return context


@contextlib.contextmanager
def asking(
    context: ssl.SSLContext, port: int, body: dict | None, path: str = "/v1/chat/completions"
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPSConnection("localhost", port, timeout=240, context=context)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), JSON)
        yield connection.getresponse()


def probe(authority: Authority, port: int, path: str) -> int:
    with asking(client(authority), port, None, path) as answer:
        return answer.status


def running_sequences(authority: Authority, port: int) -> int:
    with asking(client(authority), port, None, "/health") as answer:
        return int(json.load(answer)["endpoints"]["assistant"]["running"])


def test_requests_over_tls(secured: tuple[Running, int], authority: Authority) -> None:
    """A client with a certificate is answered, whole and streamed; one that leaves has its sequence aborted."""
    server, probes = secured
    context = client(authority, authority.issue("client")[2])
    with asking(context, server.port, BODY) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    with asking(context, server.port, BODY | {"stream": True}) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with asking(context, server.port, LONG) as answer:
        answer.readline()
        until(lambda: running_sequences(authority, probes) == 1)
    until(lambda: running_sequences(authority, probes) == 0)


def test_who_is_turned_away(secured: tuple[Running, int], authority: Authority, tmp_path: Path) -> None:
    """A client without a certificate, with one of another authority, or below TLS 1.2 gets no answer; one that speaks
    plain HTTP gets an error that says so."""
    server, _ = secured
    other = Authority(tmp_path, "other")
    old = client(authority, authority.issue("old")[2])
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (client(authority), client(authority, other.issue("stranger")[2]), old):
        with pytest.raises(OSError), asking(context, server.port, BODY):
            pass
    plain = http.client.HTTPConnection("localhost", server.port, timeout=240)
    with contextlib.closing(plain):
        plain.request("GET", "/ping")
        answer = plain.getresponse()
        assert (answer.status, b"https" in answer.read()) == (400, True)
    assert "Traceback" not in server.log()


def test_probes_over_tls(secured: tuple[Running, int], authority: Authority) -> None:
    """Probes have the same certificate and ask for none."""
    _, probes = secured
    assert [probe(authority, probes, path) for path in ("/ping", "/metrics", "/v1/models")] == [200, 200, 404]


def test_a_renewed_certificate(secured: tuple[Running, int], authority: Authority) -> None:
    """A server goes over to a new certificate while it runs, on each of its listeners."""
    server, probes = secured
    mine = authority.issue("reader")[2]

    def names() -> set[str]:
        return {shown(client(authority, mine), port) for port in (server.port, probes)}

    assert names() == {"server"}
    new_cert, new_key, _ = authority.issue("renewed")
    os.replace(new_key, authority.place / "server.key")
    os.replace(new_cert, authority.place / "server.crt")
    until(lambda: names() == {"renewed"})
    authority.issue("server")
    until(lambda: names() == {"server"})


def shown(context: ssl.SSLContext, port: int) -> str:
    """Return the name in the certificate of the server at ``port``."""
    plain = socket.create_connection(("localhost", port), timeout=240)
    with context.wrap_socket(plain, server_hostname="localhost") as secure:
        found = secure.getpeercert()
    assert found is not None
    ((_, name),) = found["subject"][0]
    return str(name)


def test_commands_over_tls(secured: tuple[Running, int], authority: Authority) -> None:
    """The commands take an authority and a certificate; without them they say what is wrong."""
    server, _ = secured
    url = ["--url", f"https://localhost:{server.port}"]
    trusted = [*url, "--ca", authority.ca, "--cert", authority.issue("commands")[2]]
    for words in (["endpoints", *trusted], ["chat", *trusted, "--max-tokens", "4", "Hi"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["keys", "list", *trusted])  # the server has no TLS
    assert (done.exit_code, "no server answers" in done.output, "database" in done.output) == (1, False, True), (
        done.output
    )
    done = CliRunner().invoke(cli, ["endpoints", *url])
    assert (done.exit_code, "certificate verify failed" in done.output) == (1, True), done.output
    done = CliRunner().invoke(cli, ["endpoints", *url, "--ca", "/nothing"])
    assert (done.exit_code, "--ca /nothing" in done.output) == (2, True), done.output


def test_deployments_over_tls(
    secured: tuple[Running, int], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's deployments client takes ``llm:https://…``, and its files from the environment."""
    server, _ = secured
    target = get_deploy_client(f"llm:https://localhost:{server.port}")
    with pytest.raises(MlflowException, match="no server answers at https://localhost"):
        target.list_deployments()
    monkeypatch.setenv("MLFLOW_LLM_CA", authority.ca)
    monkeypatch.setenv("MLFLOW_LLM_CERT", authority.issue("deployments")[2])
    assert [one["name"] for one in target.list_deployments()] == ["assistant"]
    found = target.predict(endpoint="assistant", inputs=BODY)
    assert found["usage"]["completion_tokens"] == 8
    monkeypatch.setenv("MLFLOW_LLM_CERT", "/nothing")
    with pytest.raises(MlflowException, match="no server answers"):
        target.list_deployments()


@pytest.fixture(scope="module")
def local(bundle: Bundle) -> Iterator[str]:
    """Yield the (short) path of the Unix socket of a server of two workers."""
    with tempfile.TemporaryDirectory(prefix="mll-") as place:
        yield from serving_at(bundle, str(Path(place, "llm.sock")))


def serving_at(bundle: Bundle, path: str) -> Iterator[str]:
    with running(bundle, workers=2, socket=path, until="listening on unix:") as server:
        until(lambda: answered(lambda: over(path, "GET", "/ready")[0]) == 200)
        yield path
        assert "Traceback" not in server.log()
    assert not os.path.exists(path)


class Local(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("anything", timeout=240)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def over(path: str, method: str, route: str, body: dict | None = None) -> tuple[int, bytes]:
    with contextlib.closing(Local(path)) as connection:
        connection.request(method, route, body and json.dumps(body), JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_unix_socket(local: str) -> None:
    """A server on a Unix socket answers to its user alone, whatever the request's Host, and aborts what is left."""
    assert stat.S_IMODE(os.stat(local).st_mode) == 0o600
    status, body = over(local, "POST", "/v1/chat/completions", BODY)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 8)

    def sequences() -> int:
        return int(json.loads(over(local, "GET", "/health")[1])["endpoints"]["assistant"]["running"])

    with contextlib.closing(Local(local)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(LONG), JSON)
        connection.getresponse().readline()
        until(lambda: sequences() == 1)
    until(lambda: sequences() == 0)


def test_commands_over_a_unix_socket(local: str) -> None:
    """chat, bench and endpoints take unix: URLs."""
    bench = ["bench", "--concurrency", "1", "--requests", "1", "--max-tokens", "4", "--prompt-words", "4"]
    for words in (["endpoints"], ["chat", "--max-tokens", "4", "Hi"], bench):
        for url in (f"unix:{local}", f"unix://{local}"):
            done = CliRunner().invoke(cli, [*words, "--url", url])
            assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["endpoints", "--url", "unix:/nothing"])
    assert (done.exit_code, "unix:/nothing" in done.output) == (1, True), done.output


def test_a_socket_that_is_taken(local: str, tmp_path: Path) -> None:
    """A socket in use, a file that is no socket and a missing directory are refused before a model loads."""
    (tmp_path / "file").write_text("mine")
    for path in (local, str(tmp_path / "file"), str(tmp_path / "none" / "socket")):
        spec = tmp_path / "serve.json"
        spec.write_text(json.dumps({"settings": {"socket": path}}))
        done = CliRunner().invoke(cli, ["serve", "--spec", str(spec)])
        assert (done.exit_code, f"cannot listen on unix:{path}" in done.output) == (1, True), done.output
    assert (tmp_path / "file").read_text() == "mine"
    assert over(local, "GET", "/ping")[0] == 200
