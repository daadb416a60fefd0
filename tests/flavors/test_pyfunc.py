"""What MLflow makes of each form of input, and what ``predict`` makes of that again; errors as callers see them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import _validate_prediction_input
from mlflow.pyfunc.scoring_server import infer_and_parse_data

from mlflow_llm.flavors.llm.frames import requests_of
from mlflow_llm.flavors.llm.pyfunc import PredictError, _with_params
from mlflow_llm.flavors.llm.signature import lossless_signature
from mlflow_llm.serving.errors import RequestError, ServingError, walk

MESSAGES = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.filterwarnings("ignore:.*inferred as AnyType:UserWarning")


def through_mlflow(given):
    """``given`` as the model's ``predict`` receives it."""
    data, _ = _validate_prediction_input(given, None, lossless_signature().inputs, None)
    return requests_of(data)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "max_tokens": 3, "temperature": 0.5, "seed": 2**40},
        {"prompt": ["a", "b"], "stop": "x", "logit_bias": {"1": 2}},
        {"input": [1, 2, 3]},
        {"prompt": "a", "stop": None, "stream": False, "n": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop": ["a", "b"]},
    ],
)
def test_dict_comes_back_as_given(body):
    """One request passes MLflow's signature enforcement without loss and asks for one object."""
    requests, single = through_mlflow(body)
    assert single
    assert requests == [body]


def test_list_of_dicts_drops_only_what_each_row_lacks():
    """Rows with different fields come back as they were, though pandas filled the gaps with NaN."""
    rows = [{"messages": MESSAGES}, {"prompt": "x", "max_tokens": 2, "stop": ["a"]}]
    assert through_mlflow(rows) == (rows, False)


def test_nan_of_a_single_request_is_kept():
    """NaN that a caller sent is not taken for a missing field: it is refused later."""
    (request,), _ = through_mlflow({"prompt": "a", "temperature": float("nan")})
    assert np.isnan(request["temperature"])


@pytest.mark.parametrize("form", ["inputs", "instances", "dataframe_records"])
def test_scoring_server_forms(form):
    """Each of the scoring server's forms gives its rows as plain Python values, in order."""
    rows = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 2}]
    parsed = infer_and_parse_data({form: json.loads(json.dumps(rows))}, lossless_signature().inputs)
    requests, single = through_mlflow(parsed)
    assert not single
    assert requests == rows
    assert {type(request["max_tokens"]) for request in requests} == {int}


def test_instances_of_conversations():
    """``instances`` with messages gives one conversation a row."""
    rows = [{"messages": MESSAGES}, {"messages": [{"role": "user", "content": "ho"}]}]
    parsed = infer_and_parse_data({"instances": rows}, lossless_signature().inputs)
    assert through_mlflow(parsed) == (rows, False)


def test_dataframe_split_with_null():
    """A null in one row of many is that row's default."""
    split = {"columns": ["prompt", "max_tokens"], "data": [["a", 1], ["b", None]]}
    requests, _ = through_mlflow(infer_and_parse_data({"dataframe_split": split}, lossless_signature().inputs))
    assert requests == [{"prompt": "a", "max_tokens": 1}, {"prompt": "b"}]


def test_arrays_of_a_parquet_row_are_lists():
    """A conversation read back from Parquet is an array of messages in one row, not many rows."""
    frame = pd.DataFrame([{"messages": np.array(MESSAGES, dtype=object), "max_tokens": np.int64(3)}])
    assert requests_of(frame) == ([{"messages": MESSAGES, "max_tokens": 3}], True)


def test_no_rows_give_none():
    """An empty frame of requests is no request, and no error."""
    assert requests_of(pd.DataFrame({"prompt": []})) == ([], False)


@pytest.mark.parametrize("given", ["text", ["a", "b"], {"foo": 1}, pd.Series(["a"])])
def test_what_is_no_request_is_refused(given):
    """Input in which MLflow found no field of a request is refused with what is expected."""
    with pytest.raises(RequestError, match="messages, prompt or input"):
        through_mlflow(given)


def test_params_pass_where_they_are_one_value():
    """``params`` reaches predict with every field of one scalar type; MLflow holds each to that type."""
    schema = lossless_signature().params
    given = {"temperature": 0, "max_tokens": 5, "adapter": "pirate", "echo": True, "seed": 2**40}
    _, params = _validate_prediction_input({"prompt": "a"}, dict(given), lossless_signature().inputs, schema)
    assert {name: value for name, value in params.items() if value is not None} == given
    assert not {"messages", "prompt", "input", "stream", "stop", "logprobs"} & set(params)
    with pytest.raises(MlflowException, match="max_tokens"):
        _validate_prediction_input({"prompt": "a"}, {"max_tokens": "many"}, lossless_signature().inputs, schema)


def test_a_request_stands_over_params():
    """What a request says itself wins; null says nothing, in either."""
    params = {"temperature": 0.5, "max_tokens": 5, "seed": None}
    body = {"prompt": "a", "temperature": 0.0, "max_tokens": None}
    assert _with_params(body, params) == {"prompt": "a", "temperature": 0.0, "max_tokens": 5}


def test_every_error_keeps_status_and_message():
    """Each error of the tree becomes an MlflowException with its own status, whose message nobody can lengthen."""
    for cls in walk(ServingError):
        error = cls.__new__(cls)
        ServingError.__init__(error, "short")
        told = PredictError(error)
        told.message = "Failed to predict data 'the whole prompt'"
        assert told.get_http_status_code() == cls.status
        assert json.loads(told.serialize_as_json())["message"] == "short"
