"""The forms of input and of ``params`` that ``predict`` takes."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import _validate_prediction_input

from mlflow_llm.flavors.llm.model.signature import lossless_signature
from mlflow_llm.flavors.llm.predict.predict_input import requests_of
from mlflow_llm.flavors.llm.predict.pyfunc import check_params, with_params
from mlflow_llm.serving.interface.errors import InvalidField

MESSAGES = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.filterwarnings("ignore:.*inferred as AnyType:UserWarning")
COMPLETION = {"prompt": "a", "max_tokens": 3}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "max_tokens": 3, "temperature": 0.5, "seed": 2**40},
        {"prompt": ["a", "b"], "stop": "x", "logit_bias": {"1": 2}},
        {"input": [1, 2, 3]},
        {"prompt": "a", "stop": None, "stream": False, "n": 2, "max_token": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop": ["a", "b"]},
    ],
)
def test_a_dict_is_one_request_and_a_list_is_many(body):
    """A dict gives one object; the same dict in a list or tuple, even alone, gives a list."""
    assert requests_of(body, "chat") == ([body], True)
    assert requests_of([body], "chat") == ([body], False)
    assert requests_of((body, COMPLETION), "chat") == ([body, COMPLETION], False)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("null", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT], ids=repr)
def test_a_null_in_a_frame_says_nothing(null, count):
    """A null in a frame counts as missing, in one row and in many."""
    frame = pd.DataFrame(
        {"prompt": ["a"] * count, "max_tokens": [3] * count, "stop": pd.Series([null] * count, dtype=object)}
    )
    assert requests_of(frame, "chat") == ([COMPLETION] * count, False)


def test_nan_of_a_dict_is_kept():
    """A NaN in a caller's dict is kept and not taken for a missing field; ``pd.NA`` becomes null."""
    (request,), _ = requests_of({"prompt": "a", "temperature": float("nan"), "stop": pd.NA}, "chat")
    assert np.isnan(request.pop("temperature"))
    assert request == {"prompt": "a", "stop": None}


@pytest.mark.parametrize("given", [[], (), pd.DataFrame(), pd.DataFrame({"prompt": []}), pd.Series([], dtype=object)])
def test_empty_input_gives_an_empty_list(given):
    """Input without rows gives no request and no error."""
    assert requests_of(given, "chat") == ([], False)


TEXTS = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("task", TEXTS)
def test_texts_are_requests_of_the_models_first_task(task):
    """A text is one request; a list, Series, array or one-column frame of texts is one request per entry."""
    assert requests_of("hi", task) == ([TEXTS[task]], True)
    assert requests_of(np.array("hi"), task) == ([TEXTS[task]], True)
    many = (
        ["hi", "hi"],
        np.array(["hi", "hi"]),
        pd.Series(["hi", "hi"]),
        pd.DataFrame(["hi", "hi"]),
        pd.DataFrame({"question": ["hi", "hi"]}),
    )
    for given in many:
        assert requests_of(given, task) == ([TEXTS[task]] * 2, False)
    assert requests_of(["hi", COMPLETION], task) == ([TEXTS[task], COMPLETION], False)
    (_, missing), _ = requests_of(pd.DataFrame({"text": ["hi", None]}), task)
    assert list(missing.values()) == [None]


def test_arrays_of_a_parquet_row_are_lists():
    """A conversation read from Parquet is an array of messages in one row, not many rows."""
    frame = pd.DataFrame([{"messages": np.array(MESSAGES, dtype=object), "max_tokens": np.int64(3)}])
    assert requests_of(frame, "chat") == ([{"messages": MESSAGES, "max_tokens": 3}], False)


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (5, "body: 5 is not allowed; expected an object with messages, prompt, input or query; a text"),
        (None, "body: None"),
        (pd.DataFrame({"prompt": ["a"], "max_token": [5]}), "max_token: 5 .*did you mean 'max_tokens'"),
        (pd.DataFrame({"prompt": ["a"], "max_token": [None]}), "max_token: None"),
        (pd.DataFrame({"promt": ["a"]}), "promt: 'a' .*did you mean 'prompt'"),
        (pd.DataFrame({"answers": [1]}), "answers: 1"),
        (pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), "prompt: 'a second column'"),
    ],
    ids=range(7),
)
def test_invalid_requests_are_refused(given, reported):
    """An invalid request is refused by its place, or by the column's name with the nearest known one."""
    with pytest.raises(InvalidField, match=reported):
        requests_of(given, "chat")


DEEP = {"prompt": "a", "logit_bias": functools.reduce(lambda inner, _: [inner], range(200), 1)}


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ([5, "hi"], "body: 5 is not allowed; expected a text, or an object with messages, prompt or input"),
        ((None, "hi"), "body: None"),
        (pd.Series([None, "hi"], dtype=object), "body: None"),
        (pd.Series([np.nan, "hi"]), "body: nan"),
        (np.array([1, "hi"], dtype=object), "body: 1"),
        ([DEEP, "hi"], "body: 'a deep nest of objects and lists'"),
    ],
    ids=range(6),
)
def test_an_invalid_entry_is_an_error_in_its_place(given, reported):
    """An entry that is not a request becomes an error in its place, and the others stay requests."""
    (error, text), single = requests_of(given, "completions")
    assert str(error).startswith(reported)
    assert (text, single) == ({"prompt": "hi"}, False)


def test_columns_that_came_without_names():
    """Columns named by position, as MLflow's ``spark_udf`` does for several columns, are refused with the way to name
    them."""
    names = lossless_signature().inputs.input_names()
    frame = pd.DataFrame({names[0]: ["hi"]}, columns=names)
    with pytest.raises(InvalidField, match=r"columns without names.*struct\('prompt', …\)"):
        requests_of(frame, "chat")


def test_a_deep_row_of_a_frame_is_an_error_in_its_place():
    """A row of a frame that is nested too deep becomes an error in its place, as in a list."""
    (error, text), _ = requests_of(pd.DataFrame([DEEP, {"prompt": "hi"}]), "completions")
    assert isinstance(error, InvalidField)
    assert text == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("params", "reported"),
    [
        ({"foo": 1}, "params.foo: 1 is not allowed: no such field"),
        ({"max_token": 5}, "params.max_token: .*did you mean 'max_tokens'"),
        ({"prompt": "x"}, "params.prompt"),
        ([1], r"params: \[1\]"),
    ],
)
def test_unknown_params_are_refused(params, reported):
    """Params that are not fields are refused, also without rows."""
    with pytest.raises(InvalidField, match=reported):
        check_params(params)


def test_the_signature_lists_params_of_one_value():
    """The signature lists every field of a scalar type as a param, since MLflow enforces these."""
    schema = lossless_signature().params
    given = {"temperature": 0, "max_tokens": 5, "adapter": "pirate", "echo": True, "seed": 2**40}
    _, params = _validate_prediction_input({"prompt": "a"}, dict(given), lossless_signature().inputs, schema)
    assert {name: value for name, value in params.items() if value is not None} == given
    assert not {"messages", "prompt", "input", "stream", "stop", "logprobs"} & set(params)
    with pytest.raises(MlflowException, match="max_tokens"):
        _validate_prediction_input({"prompt": "a"}, {"max_tokens": "many"}, lossless_signature().inputs, schema)


def test_a_request_stands_over_params():
    """A request's own value overrides params; null counts as missing in either."""
    params = {"temperature": 0.5, "max_tokens": 5, "seed": None}
    body = {"prompt": "a", "temperature": 0.0, "max_tokens": None}
    assert with_params(body, params) == {"prompt": "a", "temperature": 0.0, "max_tokens": 5}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (np.int64(2), 2),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array(["a", "b"]), ["a", "b"]),
        (("a",), ["a"]),
        ({"1": np.int8(3)}, {"1": 3}),
        (pd.NA, None),
    ],
    ids=repr,
)
def test_params_have_json_types_as_requests_have(given, read):
    """Params and requests take values of numpy and pandas; a null of pandas counts as missing."""
    found = with_params({"prompt": "a"}, {"stop": given})
    assert found == {"prompt": "a"} | ({} if read is None else {"stop": read})
    assert type(found.get("stop")) is type(read)
