"""The instant engine, whose steps a test may hold back: what comes before the next one is then up to nobody's speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore

GATE = "steps"


class GatedCore(InstantCore):
    """An engine core that takes no step beyond the number in its model directory's file ``steps``, if it exists."""

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        super().__init__(bundle, settings)
        self._gate = Path(bundle.model_dir, GATE)

    def step(self) -> list[Any]:
        try:
            last = int(self._gate.read_text())
        except FileNotFoundError:
            return super().step()
        if self._steps < last:
            return super().step()
        time.sleep(0.01)
        reported, self._outbox = self._outbox, []
        return reported


@contextlib.contextmanager
def steps_up_to(model_dir: str, number: int) -> Iterator[None]:
    """Let the engine of a model take no step after this one."""
    gate = Path(model_dir, GATE)
    gate.with_suffix(".new").write_text(str(number))
    gate.with_suffix(".new").rename(gate)
    try:
        yield
    finally:
        gate.unlink()
