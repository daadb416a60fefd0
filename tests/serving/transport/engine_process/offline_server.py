"""An engine's server without a connection, over an instant model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore, InstantModel, write_model
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.engine_process.server import LOCAL, EngineServer

ONE, TWO = LOCAL + b"one", LOCAL + b"two"


class Server(EngineServer):
    """An engine server without a connection, which keeps what it would send."""

    def _send(self, identity: bytes, message: m.ToClient) -> None:
        self.sent.setdefault(identity, []).append(message)

    def events(self, identity: bytes) -> list[tuple[int, Any]]:
        messages = self.sent.pop(identity, [])
        return [item for message in messages if isinstance(message, m.Events) for item in message.items]

    def run_out(self) -> None:
        while self.core.has_work():
            self.send_events(self.core.step(), 0)


@contextmanager
def offline_server(tmp_path: Path) -> Iterator[Server]:
    """Return a server that knows the clients ``ONE`` and ``TWO``, with journals in ``tmp_path / "journal"``."""
    bundle = Bundle(content_hash="x", tasks=("completions",), model_dir=str(tmp_path), tokenizer_dir="")
    write_model(tmp_path, InstantModel())
    settings = EngineSettings()
    core = InstantCore(bundle, settings)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        found = Server(core, settings, None, socket, core.info, "g")  # type: ignore[arg-type]
        found.sent = {}
        for identity in (ONE, TWO):
            found.handle(identity, m.Hello("c", name=identity.decode(), journal=str(tmp_path / "journal")))
        yield found
