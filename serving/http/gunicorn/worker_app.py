"""Build the application in a worker process."""

from __future__ import annotations

from pathlib import Path

from flask import Flask

from ...control.spec import ServeSpec
from ...frontend.offload import give_way
from ...frontend.worker_server import worker_server
from ..app import create_app


def build(spec: ServeSpec, directory: Path, cache_secret: bytes | None = None) -> Flask:
    """Build the application of one worker. ``directory`` and ``cache_secret`` are shared by the whole server."""
    app = create_app(worker_server(spec, directory, cache_secret))
    give_way()
    return app
