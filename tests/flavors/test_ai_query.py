"""``ai_query`` over tables of pandas, asked of a model here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.batch import ai_query
from mlflow_llm.flavors import llm

PARAMETERS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
BODY = {"messages": [{"role": "user", "content": "number 1"}]}


@pytest.fixture(scope="module")
def root(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    return str(path)


@pytest.fixture(scope="module")
def texts(root: str) -> list[str]:
    """Return the answers of the object API to five prompts."""
    with llm.load_model(root) as model:
        return [model.chat(f"number {i}", **PARAMETERS).text for i in range(5)]


def test_rows_are_those_of_the_model(root: str, texts: list[str]) -> None:
    """Texts, lists of messages and bodies are requests, a null has no answer, and the index stays."""
    rows: list[Any] = ["number 0", BODY, [{"role": "user", "content": "number 2"}], None, "number 4"]
    frame = pd.DataFrame({"ask": rows}, index=[7, 3, 9, 1, 5])
    found = ai_query(frame, root, "ask", model_parameters=PARAMETERS)
    assert list(found.index) == [7, 3, 9, 1, 5]
    assert found["response"].tolist() == [*texts[:3], None, texts[4]]
    assert "response" not in frame.columns


def test_errors_are_raised_or_kept_by_row(root: str, texts: list[str]) -> None:
    """A refused row raises with its number, or has an errorMessage beside the results of the others."""
    frame = pd.DataFrame({"ask": ["number 0", BODY | {"temperature": 9}]})
    with pytest.raises(MlflowException, match=r"row 1: temperature: 9"):
        ai_query(frame, root, "ask", model_parameters=PARAMETERS)
    found = ai_query(frame, root, "ask", model_parameters=PARAMETERS, fail_on_error=False)["response"].tolist()
    assert found[0] == {"result": texts[0], "errorMessage": None}
    assert found[1]["result"] is None
    assert "temperature" in found[1]["errorMessage"]


def test_replies_and_formats(root: str) -> None:
    """Whole replies come as JSON, and a response_format is followed."""
    frame = pd.DataFrame({"ask": ["number 0"]})
    (whole,) = ai_query(frame, root, "ask", return_type="json", model_parameters=PARAMETERS)["response"]
    assert json.loads(whole)["usage"]["completion_tokens"] == 4
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    (choice,) = ai_query(frame, root, "ask", response_format=schema, output="choice")["choice"]
    assert json.loads(choice) in ("yes", "no")
    (again,) = ai_query(frame, root, "ask", response_format=json.dumps(schema))["response"]
    assert json.loads(again) in ("yes", "no")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"request": "nothing"}, "request: 'nothing'"),
        ({"return_type": "xml"}, "return_type: 'xml'"),
        ({"output": "ask"}, "output: 'ask'"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"fail_on_error": None}, "fail_on_error: None"),
        ({"model_parameters": "max_tokens"}, "model_parameters: 'max_tokens'"),
        ({"response_format": "{"}, "response_format: '{'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    """An argument that is not allowed is refused before any model is loaded."""
    frame = pd.DataFrame({"ask": ["x"]})
    with pytest.raises(MlflowException, match=named):
        ai_query(frame, "models:/none/1", **({"request": "ask"} | arguments))


def test_a_table_of_another_library_is_refused() -> None:
    """A table that is neither of pandas nor of Spark is refused."""
    with pytest.raises(MlflowException, match=r"df: .* is not allowed; expected a DataFrame of pandas or of Spark"):
        ai_query([{"ask": "x"}], "assistant", "ask")
