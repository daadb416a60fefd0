"""Judges by ``endpoints:/…`` in a process that has only imported MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import mlflow
from mlflow import deployments
from mlflow.exceptions import MlflowException
from mlflow.genai.judges import make_judge

asked = []

class Client:
    def predict(self, endpoint, inputs):
        asked.append((endpoint, inputs.get("response_format", {}).get("type")))
        if inputs["temperature"] == 9:
            raise MlflowException.invalid_parameter_value("temperature: 9 is not allowed")
        verdict = {"role": "assistant", "content": '{"result": true, "rationale": "so"}'}
        choice = {"index": 0, "message": verdict, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": endpoint, "choices": [choice],
                "usage": usage}

deployments.get_deploy_client = lambda target: Client()
values = []
for temperature in (0.0, 9, 0.0):
    judge = make_judge(name="polite", instructions="Is it polite? {{ outputs }}", model="endpoints:/assistant",
                       feedback_value_type=bool, inference_params={"temperature": temperature})
    try:
        values.append(judge(outputs="Thank you.").value)
    except MlflowException as error:
        values.append("temperature: 9" in str(error))
print(json.dumps([asked, values]))
"""


def test_verdicts_keep_their_type_after_a_failed_judge() -> None:
    """``endpoints:/…`` needs no call, and a refused request does not leave later verdicts without their type."""
    pytest.importorskip("litellm")
    given = {"MLFLOW_DEPLOYMENTS_TARGET": "http://127.0.0.1:1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    asked, values = json.loads(run.stdout.splitlines()[-1])
    assert values == [True, True, True]
    assert asked == [["assistant", form] for form in ("json_schema", "json_schema", None, "json_schema")]


def test_a_litellm_that_cannot_take_the_provider_stays_as_it_is() -> None:
    """A program that imports such a litellm goes on, with a warning that names what does not work."""
    program = (
        "import mlflow, sys, types\n"
        "from mlflow_llm.plugin import judges\n"
        "sys.modules['litellm'] = types.ModuleType('litellm')\n"
        "judges.add_provider(None)\n"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "judges cannot use endpoints:/" in run.stderr
