"""A contender that generates one token a step for each request, and fails as the prompt's first token asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

from comparison.drive import Engine, Piece, serve


class Fake(Engine):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        if "fails" in options:
            raise ValueError(options["fails"])
        print("a library says hello on stdout")
        self._server = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        threading.Thread(target=threading.Event().wait).start()  # a library's thread that never ends
        self.versions = {"model": model, "server": str(self._server.pid)}
        self._left: dict[str, int] = {}

    def add(self, request: dict[str, Any]) -> None:
        if request["prompt"][0] == 666:
            os._exit(3)
        self._left[request["id"]] = request["max_tokens"]

    def step(self, wait: float) -> list[Piece]:
        pieces = []
        for name in list(self._left):
            self._left[name] -= 1
            pieces.append(Piece(name, [self._left[name]], "", not self._left[name]))
            if not self._left[name]:
                del self._left[name]
        return pieces


if __name__ == "__main__":
    serve(Fake)
