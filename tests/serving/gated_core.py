"""The instant engine, whose steps a test may hold back: what comes before the next one is then up to nobody's speed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore

GATE = "steps"


class GatedCore(InstantCore):
    """An engine core that takes no step beyond the number in its model directory's file ``steps``, if it exists.

    The file has the last step's number, or the number of steps that may follow and a name that no other gate has.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        super().__init__(bundle, settings)
        self._gate = Path(bundle.model_dir, GATE)
        self._seen, self._last = "", 0

    def step(self) -> list[Any]:
        try:
            gate = self._gate.read_text()
        except FileNotFoundError:
            return super().step()
        if gate != self._seen:
            self._seen, (number, *name) = gate, gate.split()
            self._last = int(number) + (self._steps if name else 0)
        if self._steps < self._last:
            return super().step()
        time.sleep(0.01)
        reported, self._outbox = self._outbox, []
        return reported


def steps_up_to(model_dir: str, number: int) -> AbstractContextManager[None]:
    """Let the engine of a model take no step after this one."""
    return _gate(model_dir, str(number))


def steps_more(model_dir: str, number: int) -> AbstractContextManager[None]:
    """Let the engine of a model take so many steps from its next one on, whatever its heartbeat last said."""
    return _gate(model_dir, f"{number} {uuid.uuid4()}")


@contextlib.contextmanager
def _gate(model_dir: str, text: str) -> Iterator[None]:
    gate = Path(model_dir, GATE)
    gate.with_suffix(".new").write_text(text)
    gate.with_suffix(".new").rename(gate)
    try:
        yield
    finally:
        gate.unlink()
