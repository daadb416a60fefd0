"""Judges of ``mlflow.genai`` that use a model of our server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_server import served

from mlflow_llm.flavors import llm

VERDICT = {
    "type": "object",
    "properties": {"rationale": {"type": "string", "maxLength": 80}, "result": {"enum": ["yes", "no"]}},
    "required": ["rationale", "result"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the endpoints ``assistant`` and ``judge``, whose model was logged with the schema of a verdict."""
    root = tmp_path_factory.mktemp("judges")
    llm.save_model(root / "chat", smollm2_dir, link_files=True)
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    defaults = {"response_format": form, "temperature": 0.0, "max_tokens": 200}
    llm.save_model(root / "judge", smollm2_dir, link_files=True, defaults=defaults)
    models = ("-m", f"{root / 'chat'}=assistant", "-m", f"{root / 'judge'}=judge")
    with served(root, *models, "-C", "max_model_len=4096") as url:
        yield url


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_judge_by_openais_route(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge by openai:/… with our URL gets a verdict of the requested type, by response_format."""
    from mlflow.genai.judges import make_judge

    monkeypatch.setenv("OPENAI_API_KEY", "x")
    judge = make_judge(
        name="polite",
        instructions="Is the text polite? {{ outputs }}",
        model="openai:/assistant",
        feedback_value_type=bool,
        base_url=f"{url}/v1/chat/completions",
        inference_params={"max_tokens": 200, "temperature": 0.0},
    )
    feedback = judge(outputs="Thank you very much.")
    assert feedback.error is None
    assert feedback.value in (True, False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_judge_by_a_workspaces_route(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge by databricks:/… works with the server as the workspace."""
    from mlflow.genai.judges import make_judge

    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("DATABRICKS_API_BASE", f"{workspace}/serving-endpoints")
    monkeypatch.setenv("DATABRICKS_API_KEY", "x")
    judge = make_judge(
        name="polite",
        instructions="Is the text polite? {{ outputs }}",
        model="databricks:/assistant",
        feedback_value_type=bool,
        inference_params={"max_tokens": 200, "temperature": 0.0},
    )
    feedback = judge(outputs="Thank you very much.")
    assert feedback.error is None
    assert feedback.value in (True, False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_scorer_by_an_endpoint(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own scorers work with endpoints:/… and our server as deployments target. MLflow asks for the verdict's
    format in words alone, which the model's own default enforces."""
    from mlflow.genai.scorers import Guidelines

    monkeypatch.setattr("mlflow.deployments.utils._deployments_target", None)
    monkeypatch.setenv("MLFLOW_DEPLOYMENTS_TARGET", workspace)
    scorer = Guidelines(name="polite", guidelines="The text must be polite.", model="endpoints:/judge")
    feedback = scorer(inputs={"q": "Say thank you."}, outputs="Thank you very much.")
    assert feedback.error is None
    assert feedback.value in ("yes", "no")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_judge_by_an_endpoint(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make_judge`` works with endpoints:/…, by the provider that litellm lacks; a missing endpoint is named."""
    import litellm
    from mlflow.exceptions import MlflowException
    from mlflow.genai.judges import make_judge

    from mlflow_llm.plugin import judges

    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setattr("mlflow.deployments.utils._deployments_target", None)
    monkeypatch.setenv("MLFLOW_DEPLOYMENTS_TARGET", workspace)
    assert [entry["provider"] for entry in litellm.custom_provider_map] == ["endpoints"]
    judges.use_endpoints()
    assert len(litellm.custom_provider_map) == 1
    parameters = {"max_tokens": 300, "temperature": 0.0, "frequency_penalty": 2.0}  # because the model repeats itself
    asked = {"feedback_value_type": bool, "inference_params": parameters}
    polite = "Is the text polite? {{ outputs }}"
    feedback = make_judge(name="polite", instructions=polite, model="endpoints:/assistant", **asked)(
        outputs="Thank you."
    )
    assert feedback.error is None
    assert feedback.value in (True, False)
    with pytest.raises(MlflowException, match="nobody"):
        make_judge(name="polite", instructions=polite, model="endpoints:/nobody", **asked)(outputs="Thanks.")
