"""A trace that was asked for where no reply can have it."""

from __future__ import annotations

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors.llm.predict.scoring_server import read_body
from mlflow_llm.flavors.llm.predict.session import Session
from mlflow_llm.serving.dialects.openai.mlflow import MlflowDialect
from mlflow_llm.serving.interface.errors import InvalidField

ASKED = {"databricks_options": {"return_trace": True}}
REFUSED = r"databricks_options\.return_trace: True is not allowed; expected false: only the replies of mlflow-llm serve"


def test_a_request_is_refused() -> None:
    """A session refuses the request by the field's name, before it starts an engine."""
    session = Session.__new__(Session)
    with pytest.raises(InvalidField, match=REFUSED):
        session.prepared(MlflowDialect().read({"prompt": "a", **ASKED}))


def test_rows_are_refused() -> None:
    """A body of rows is refused too, and one that asks for no trace is read."""
    with pytest.raises(MlflowException, match=REFUSED):
        read_body({"inputs": ["a"], **ASKED})
    assert read_body({"inputs": ["a"], "databricks_options": {"return_trace": False}})[0] == ["a"]
