"""The recorded conversation of docs/how-to/terminal.md, with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_sessions import normal, run, sessions

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.load.model_cache import logged_root

PAGE = Path(__file__).parents[2] / "docs/how-to/terminal.md"


def test_the_recorded_conversation(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session of the section shows what the page says, but for times, ids and speeds."""
    recorded = sessions(PAGE, "A conversation")
    assert len(recorded) >= 6
    (tmp_path / "smollm2").symlink_to(smollm2_dir)
    monkeypatch.chdir(tmp_path)
    environment = {"MLFLOW_LLM_STATE": str(tmp_path / "state")}
    with llm._load_pyfunc(str(logged_root("smollm2"))) as model:
        model.session.connect()  # an engine that the commands find, so that none of them loads the model
        for command, shown in recorded:
            assert normal(run(command, shown, environment)) == normal(shown), command
