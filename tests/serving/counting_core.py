"""The instant engine with a count of its own, on files of its own: the truth that a ledger is measured against.

``<model directory>/truth/<pid>`` gets a line a request (``+ request_id serial``) and a line a step
(``= request_id:n …``), written with the step itself: after a kill all but the last line is certain, and the last one
was generated or not.
The serial is what follows "#" in the last message of the prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore

CORE = f"{__name__}:CountingCore"


def importable() -> Any:
    """Make this module importable, in a context, for processes started inside."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))


class CountingCore(InstantCore):
    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        super().__init__(bundle, settings)
        directory = Path(bundle.model_dir, "truth")
        directory.mkdir(exist_ok=True)
        tokenizer = Path(bundle.tokenizer_dir, "tokenizer.json")
        self._characters = _characters(tokenizer)
        self._out = os.open(directory / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, request: ValidRequest, client: Any, *, continues: bool = False) -> None:
        prompt = "".join(self._characters.get(token, "") for token in request.sequences[0].prompt_token_ids)
        serial = re.findall(r"#(\d+)", prompt)
        self._write("+", request.request_id, *serial[-1:])
        super().add(request, client, continues=continues)

    def step(self) -> list[Any]:
        reported = super().step()
        counts: Counter[str] = Counter()
        for _, request_id, event in reported:
            if isinstance(event, Tokens):
                counts[request_id] += len(event.token_ids)
        if counts:
            self._write("=", *(f"{request_id}:{count}" for request_id, count in counts.items()))
        return reported

    def _write(self, *words: str) -> None:
        os.write(self._out, (" ".join(words) + "\n").encode())


def _characters(path: Path) -> dict[int, str]:
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    return {token: character for character, token in vocabulary.items()}


class Truth:
    """The records that every engine process of a model wrote.

    ``serials`` maps a ledger's request id to the caller's serial, ``certain`` to the tokens generated, ``doubtful`` to
    those of the last step of engines that were killed. ``steps`` has for each engine the request ids of each step.
    """

    def __init__(self, model_dir: str, killed: set[int]) -> None:
        self.serials: dict[str, int] = {}
        self.certain: Counter[str] = Counter()
        self.doubtful: Counter[str] = Counter()
        self.steps: list[list[set[str]]] = []
        for path in sorted(Path(model_dir, "truth").iterdir()):
            whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self._read(whole, int(path.name) in killed)

    def total(self, counts: Counter[str]) -> int:
        """Return the number of tokens of callers' requests; the server's own (warm-up, measuring) have no serial."""
        return sum(tokens for name, tokens in counts.items() if name in self.serials)

    def _read(self, lines: list[str], killed: bool) -> None:
        steps = [line.split()[1:] for line in lines if line.startswith("=")]
        for line in lines:
            if line.startswith("+") and len(words := line.split()) == 3:
                self.serials[words[1]] = int(words[2])
        self.steps.append([{word.rpartition(":")[0] for word in words} for words in steps])
        for number, words in enumerate(steps, 1):
            counts = self.doubtful if killed and number == len(steps) else self.certain
            for word in words:
                request_id, _, tokens = word.rpartition(":")
                counts[request_id] += int(tokens)
