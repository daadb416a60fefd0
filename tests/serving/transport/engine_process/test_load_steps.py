"""How far an engine's load is, as its process writes it and its clients read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_llm.serving.supervision.supervisor import Supervisor
from mlflow_llm.serving.system.load_steps import LoadStep
from mlflow_llm.serving.transport.discovery.state_directory import STEP, StateDirectory
from mlflow_llm.serving.transport.engine_process import main


def test_steps_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step is written at once, the same step only after a while; a directory that is gone stops no load."""
    state = StateDirectory(str(tmp_path / "r"), "k" * 16)
    state.lock().release()
    state.prepare()
    now = [10.0]
    monkeypatch.setattr(main.time, "monotonic", lambda: now[0])
    write = main.step_writer(state)
    assert state.read_step() is None
    write(LoadStep(name="packing", done=1, total=9))
    write(LoadStep(name="packing", done=2, total=9))  # too soon
    assert state.read_step() == LoadStep(name="packing", done=1, total=9)
    now[0] += 1.0
    write(LoadStep(name="packing", done=3, total=9))
    assert state.read_step() == LoadStep(name="packing", done=3, total=9)
    write(LoadStep(name="testing"))
    assert state.read_step() == LoadStep(name="testing")
    state.remove(state.lock())
    write(LoadStep(name="more"))
    assert not Path(state.file(STEP)).exists()


def test_a_supervisor_without_engines_reports_no_steps() -> None:
    """No engine is loading, so there are no steps."""
    assert Supervisor().load_steps() == {}
