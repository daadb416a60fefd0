"""MLflow's signature enforcement: bypassed for models of this flavor, unchanged for all others."""

from __future__ import annotations

import io
import json

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import scoring_server
from mlflow.types import ColSpec, DataType, Schema

from mlflow_llm.flavors.llm import errors
from mlflow_llm.flavors.llm.model.names import LOADER_MODULE
from mlflow_llm.flavors.llm.model.signature import lossless_signature
from mlflow_llm.flavors.llm.predict import signature_enforcement
from mlflow_llm.serving.interface.errors import PackagingError

pyfunc = signature_enforcement.pyfunc
pytestmark = pytest.mark.filterwarnings("ignore:.*inferred as AnyType:UserWarning")
OWN = ModelSignature(inputs=Schema([ColSpec(DataType.string, "prompt")]))


class Echo:
    def predict(self, model_input, params=None):
        return [getattr(model_input, "data", model_input), params]

    def predict_stream(self, model_input, params=None):
        yield self.predict(model_input, params)


def model(signature: ModelSignature, loader: str = LOADER_MODULE) -> pyfunc.PyFuncModel:
    signature_enforcement.install()
    meta = Model(signature=signature, flavors={pyfunc.FLAVOR_NAME: {pyfunc.MAIN: loader}})
    return pyfunc.PyFuncModel(meta, Echo(), predict_stream_fn="predict_stream")


@pytest.fixture
def ours() -> pyfunc.PyFuncModel:
    return model(lossless_signature())


GIVEN = [
    {"prompt": "x", "max_token": 5},
    {"messages": np.array([1]), "nan": float("nan")},
    [{"prompt": "x"}],
    [],
    "text",
    ["text"],
    pd.DataFrame({"prompt": ["x"], "max_token": [5]}),
    pd.DataFrame(),
    pd.Series(["a"]),
    None,
]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{type(given).__name__} {given!r}"[:30])
def test_input_and_params_arrive_as_they_were_given(ours, given):
    """Input and params arrive as the very objects given, unknown names included, in ``predict`` and
    ``predict_stream``."""
    params = {"foo": 1, "stop": ["a"]}
    for data, found in (ours.predict(given, params=params), next(ours.predict_stream(given, params=params))):
        assert data is given
        assert found == params


@pytest.mark.parametrize(("signature", "loader"), [(OWN, LOADER_MODULE), (lossless_signature(), "mlflow.sklearn")])
def test_other_signatures_and_models_are_mlflows(signature, loader):
    """A caller's own signature and a model of another flavor are still enforced."""
    data, _ = model(signature, loader).predict({"prompt": "x", "foo": 1})
    assert isinstance(data, pd.DataFrame)
    assert list(data.columns) == ["prompt"]


def served(model, body, kind="application/json"):
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = scoring_server.invocations(data, kind, model, model.metadata.get_input_schema())
    found = json.loads(answer.response)
    return found.get("predictions") if isinstance(found, dict) else found


ROWS = [{"prompt": "a", "max_token": 1}, {"messages": [{"role": "user"}]}]


@pytest.mark.parametrize("form", ["inputs", "instances", "dataframe_records"])
def test_forms_of_the_scoring_server(ours, form):
    """Rows with different and unknown fields arrive as they were sent, with params beside them."""
    assert served(ours, {form: ROWS, "params": {"foo": 1}}) == [ROWS, {"foo": 1}]
    assert served(ours, {form: "text"}) == ["text", None]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "temperature": 0.5, "foo": 1},
        {"query": "x", "documents": ["a", "b"], "top_n": 1},
        {"text_1": "x", "text_2": ["a", "b"]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_request_as_the_body(ours, body):
    """A body that is a request arrives whole, with none of its fields taken for a param."""
    assert served(ours, body) == [body, None]


class Columns:
    def predict(self, model_input, params=None):
        return model_input.data.to_dict("list")


def test_tables_of_the_scoring_server():
    """``dataframe_split``, CSV and Parquet keep columns that are not request fields, and numbers stay numbers."""
    ours = pyfunc.PyFuncModel(model(lossless_signature()).metadata, Columns())
    expected = {"prompt": ["a", "b"], "max_token": [1, 2]}
    frame = pd.DataFrame(expected)
    parquet = io.BytesIO()
    frame.to_parquet(parquet)
    assert served(ours, {"dataframe_split": json.loads(frame.to_json(orient="split"))}) == expected
    for data, kind in (
        (frame.to_csv(index=False), "text/csv"),
        (parquet.getvalue(), scoring_server.CONTENT_TYPE_PARQUET),
    ):
        answer = scoring_server.invocations(data, kind, ours, ours.metadata.get_input_schema())
        assert json.loads(answer.response) == {"predictions": expected}


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b'{"inputs": [', "body: invalid JSON at character"),
        (b'{"prompt": "\xff"}', "body: invalid JSON: not UTF-8"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "body: an integer has more than 4300 digits"),
        (b"[" * 100_000, "too deeply"),
        (b"[]", "expected a JSON object"),
        ({"inputs": [], "instances": []}, "exactly one of"),
        ({"foo": 1}, "exactly one of messages, prompt, input, query, text_1, inputs"),
        ({"inputs": [], "max_tokens": 1}, "max_tokens: 1 is not allowed: no such field"),
        ({"inputs": [], "param": {}}, "did you mean 'params'"),
        ({"dataframe_split": {"columns": ["a"]}}, "dataframe_split: "),
        ({"dataframe_split": {"columns": ["a"], "data": 1}}, "dataframe_split: "),
        ({"dataframe_split": {"columns": "a", "data": [[1]]}}, "dataframe_split: "),
        (
            {"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}},
            r"dataframe_split\.data\[0\]: .* expected a list of 1 values",
        ),
        (
            {"dataframe_split": {"columns": ["prompt", "max_tokens"], "data": [["a", 2], ["b"]]}},
            r"dataframe_split\.data\[1\]: \['b'\] is not allowed; expected a list of 2 values",
        ),
        ({"dataframe_split": {"columns": ["a"], "data": ["x"]}}, r"dataframe_split\.data\[0\]: "),
    ],
)
def test_bodies_that_are_refused(ours, body, reported):
    """Invalid bodies and unknown keys beside the rows are refused by name, without repeating the body."""
    with pytest.raises(errors.RequestError, match=reported) as caught:
        served(ours, body)
    assert caught.value.get_http_status_code() == 400
    assert len(caught.value.message) < 300


def test_an_mlflow_that_drops_fields_is_found(monkeypatch):
    """A version of MLflow that would drop fields fails the load, with the loss and the versions that work."""
    model(lossless_signature())
    monkeypatch.setattr(pyfunc, "_validate_prediction_input", lambda data, params, *rest: ({"prompt": "x"}, params))
    with pytest.raises(PackagingError, match=rf"MLflow {mlflow.__version__} .*\(predict\).* dropped unseen"):
        signature_enforcement.prove()


def test_an_mlflow_without_the_function_is_found(monkeypatch):
    """A version of MLflow that lacks one of the functions fails the load."""
    monkeypatch.setattr(signature_enforcement, "installed", False)
    monkeypatch.delattr(pyfunc, "_validate_prediction_input")
    with pytest.raises(PackagingError, match=r"mlflow\.pyfunc\._validate_prediction_input"):
        signature_enforcement.install()
