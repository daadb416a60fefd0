"""A remote artifact store, over HTTP as ``mlflow server --serve-artifacts`` has it, that notes what is fetched."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import mlflow
from stores import empty_store, own_stores

PREFIX = "/api/2.0/mlflow-artifacts/artifacts"


class RemoteStore(ThreadingHTTPServer):
    """The files below ``folder``. ``fetched`` has the path of each download that began.

    While ``open`` is not set, a download of a file named in ``slow`` sends its first half and waits.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fetched: list[str] = []
        self.slow: set[str] = set()
        self.waiting, self.open = threading.Event(), threading.Event()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{PREFIX}"

    def weights(self) -> list[str]:
        """Return the weight files that were fetched, by name."""
        return [Path(path).name for path in self.fetched if path.endswith(".safetensors")]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: clients that are killed end their connections."""


class _Handler(BaseHTTPRequestHandler):
    server: RemoteStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path.removeprefix(PREFIX)).strip("/")
        if not path:
            self._list(parse_qs(parts.query).get("path", [""])[0])
            return
        file = self.server.folder / path
        if not file.is_file():
            self._send(404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such artifact"}')
            return
        self.server.fetched.append(path)
        data = file.read_bytes()
        if file.name in self.server.slow and not self.server.open.is_set():
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.server.waiting.set()
            self.server.open.wait(1800)
            self.wfile.write(data[len(data) // 2 :])
        else:
            self._send(200, data)

    def do_PUT(self) -> None:
        file = self.server.folder / unquote(urlsplit(self.path).path.removeprefix(PREFIX)).strip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self._body())
        self._send(200, b"{}")

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _list(self, path: str) -> None:
        folder = self.server.folder / path
        found = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.is_file() else []
        files = [{"path": one.name, "is_dir": one.is_dir(), "file_size": one.stat().st_size} for one in found]
        self._send(200, json.dumps({"files": files}).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def remote_store(root: Path) -> Iterator[RemoteStore]:
    """Provide MLflow's tables in ``root``, and artifacts in a remote store whose files are in ``root``, too."""
    (root / "remote").mkdir()
    with RemoteStore(root / "remote") as server, own_stores(empty_store(root)):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mlflow.create_experiment("tests", artifact_location=server.uri)
        mlflow.set_experiment("tests")
        try:
            yield server
        finally:
            server.open.set()
            server.shutdown()
