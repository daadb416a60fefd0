"""A hub id fetched over HTTP from a local hub that implements the needed parts of the protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPO = "someone/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import sys
from mlflow.exceptions import MlflowException
from mlflow_llm.flavors import llm
llm.save_model(sys.argv[1], "someone/tiny-llama", revision="v2")
try:
    llm.save_model(sys.argv[2], "someone/nothing")
except MlflowException as error:
    print(error.message)
"""


class Hub(ThreadingHTTPServer):
    """A hub that serves the files of ``folder`` and a pickle as one repository, and records the requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.files["pytorch_model.bin"] = b"a pickle"
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """The routes ``/api/models/<repo>/revision/<name>`` (list) and ``/<repo>/resolve/<commit>/<file>``."""

    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path == f"/api/models/{REPO}/revision/v2":
            siblings = [{"rfilename": name} for name in self.server.files]
            self.send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), {}, with_body)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            files = self.server.files.items()
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files]
            self.send(json.dumps(entries).encode(), {}, with_body)
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/") and path.rsplit("/", 1)[1] in self.server.files:
            data = self.server.files[path.rsplit("/", 1)[1]]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(data, headers, with_body)
        else:
            self.send(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body, status=404)

    def send(self, data: bytes, headers: dict[str, str], with_body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(llama_dir):
    server = Hub(llama_dir)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_from_the_hub(hub, llama_dir, tmp_path):
    """A hub id is downloaded at its revision and stored byte for byte without a pickle beside safetensors; an unknown
    id is a short error with its name."""
    online = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    online |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "m"), str(tmp_path / "none")]
    done = subprocess.run(command, env=online, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stored = tmp_path / "m/model/model.safetensors"
    assert stored.read_bytes() == (llama_dir / "model.safetensors").read_bytes()
    assert f"/{REPO}/resolve/{COMMIT}/model.safetensors" in hub.asked
    assert not [path for path in hub.asked if path.endswith(".bin")]
    reported = done.stdout.strip().splitlines()[-1]
    assert reported.startswith(
        "model: 'someone/nothing' is not a local path and could not be fetched from the hub: 404"
    )
    assert len(reported) < 300
