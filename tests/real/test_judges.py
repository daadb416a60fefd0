"""Judges of ``mlflow.genai`` that ask a model on our server."""

from __future__ import annotations

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_judge_by_openais_route(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """openai:/… with our URL: a verdict of the type that was asked for, held to by response_format."""
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
