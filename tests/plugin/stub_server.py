"""A stub of the server, without a model: the management API of one process, started with the real command line.

``STUB_WAIT`` is the seconds until it listens; ``STUB_FAIL`` what it prints before it ends instead. A model whose URI
ends in ``slow`` is pending for good. ``GET /started`` is what it was started with.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API = "/api/2.0/serving-endpoints"
OPTIONS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))  # ``--require-keys`` stands alone, and after them
NAMED = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_LLM_DATABASE")
STARTED = {"words": sys.argv[1:], **{name: os.environ.get(name) for name in NAMED}}
ENDPOINTS: dict[str, dict[str, Any]] = {}


def served(name: str, entity: dict[str, Any]) -> None:
    pending = entity["entity_name"].endswith("slow")
    old = ENDPOINTS.get(name, {"config": {"served_entities": []}})
    state = {"ready": "READY", "config_update": "IN_PROGRESS" if pending else "NOT_UPDATING"}
    ENDPOINTS[name] = {"name": name, "state": state}
    ENDPOINTS[name]["config"] = old["config"] if pending else {"served_entities": [entity]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path in ("/ready", "/started"):
            return self._say(200, STARTED)
        if self.path == API:
            return self._say(200, {"endpoints": list(ENDPOINTS.values())})
        found = ENDPOINTS.get(self.path.rpartition("/")[2])
        return self._say(200, found) if found else self._say(404, {"message": "no such endpoint"})

    def do_POST(self) -> None:
        body = self._body()
        if self.path != API:
            return self._say(200, {"model": ENDPOINTS[self.path.split("/")[2]]["config"], "body": body})
        served(body["name"], body["config"]["served_entities"][0])
        return self._say(200, ENDPOINTS[body["name"]])

    def do_PUT(self) -> None:
        body, name = self._body(), self.path.split("/")[-2]
        entity = body["served_entities"][0]
        if entity["entity_name"].endswith("bad"):
            return self._say(400, {"message": "served_entities: no good", "error_code": "INVALID_PARAMETER_VALUE"})
        if ENDPOINTS[name]["state"]["config_update"] == "IN_PROGRESS":
            return self._say(409, {"message": "an update is in progress", "error_code": "INVALID_STATE"})
        served(name, entity)
        return self._say(200, ENDPOINTS[name])

    def do_DELETE(self) -> None:
        del ENDPOINTS[self.path.rpartition("/")[2]]
        self._say(200, {})

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _say(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> int:
    if said := os.environ.get("STUB_FAIL"):
        print(said)
        return 1
    time.sleep(float(os.environ.get("STUB_WAIT", "0")))
    served(OPTIONS["--name"], {"entity_name": OPTIONS["-m"], "entity_version": ""})
    try:
        server = ThreadingHTTPServer((OPTIONS.get("--host", "127.0.0.1"), int(OPTIONS["--port"])), Handler)
    except OSError as error:
        print(f"Error: {error}")
        return 1
    if cert := OPTIONS.get("--tls-cert"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, OPTIONS["--tls-key"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
