"""The recorded sessions of docs/how-to/terminal.md about endpoints and engines."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from command_processes import await_line, llm_command
from recorded_sessions import normal, run, sessions

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port

PAGE = Path(__file__).parents[2] / "docs/how-to/terminal.md"


def test_the_recorded_sessions_of_an_operator(
    saved_model: Path, second_model: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session of the two sections shows what the page says, but for times, hashes, memory and kernels."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(store)
    try:
        experiment = mlflow.create_experiment("assistant", artifact_location=str(tmp_path / "artifacts"))
        for model in (saved_model, second_model):
            with mlflow.start_run(experiment_id=experiment):
                llm.log_model(model.parent / "hf", name="model", registered_model_name="assistant")
    finally:
        mlflow.set_tracking_uri(None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # which the line before has taken from the environment
    port = free_port()
    words = ["--database", f"sqlite:///{place}/serving.db", "--port", str(port), "--workers", "1"]
    with llm_command(place, "serve", "serve", *words) as log:
        await_line(log, "listening on")
        for command, shown in (*sessions(PAGE, "Endpoints"), *sessions(PAGE, "Engines")):
            told = run(command, shown, {"MLFLOW_LLM_URL": f"http://127.0.0.1:{port}"})
            assert normal(told) == normal(shown), command
