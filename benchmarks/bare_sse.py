"""A minimal Flask application under gunicorn's gevent worker that streams: the baseline of the server.

It reads the request's JSON and sends prepared events, with a pause between them or none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from load import Server, free_port

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,'
    b'"model":"bench","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
)


class BareServer(Server):
    """A server of ``tokens`` events a stream, ``pace`` seconds apart."""

    def __init__(self, tokens: int, pace: float) -> None:
        port = free_port()
        os.environ["BARE_TOKENS"], os.environ["BARE_PACE"] = str(tokens), str(pace)
        self._environment = {"BARE_TOKENS": str(tokens), "BARE_PACE": str(pace)}
        folder = os.path.dirname(os.path.abspath(__file__))
        command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-w", "1", "-b", f"127.0.0.1:{port}"]
        super().__init__([*command, "--chdir", folder, "bare_sse:application()"], port)

    def __enter__(self) -> Server:
        os.environ.update(self._environment)
        return super().__enter__()


def application() -> object:
    import gevent
    from flask import Flask, Response, request

    app = Flask("bare")
    tokens, pace = int(os.environ["BARE_TOKENS"]), float(os.environ["BARE_PACE"])

    @app.get("/ready")
    def ready() -> str:
        return "ready"

    @app.post("/v1/completions")
    def completions() -> Response:
        if not request.get_json().get("stream"):
            return Response(EVENT[6:], content_type="application/json")

        def events() -> Iterator[bytes]:
            for _ in range(tokens):
                gevent.sleep(pace)
                yield EVENT
            yield b"data: [DONE]\n\n"

        return Response(events(), content_type="text/event-stream")

    return app
