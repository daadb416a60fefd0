"""The inputs of ``predict``, converted to request bodies."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin.predict_inputs import requests_of

USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def of_command(body: dict[str, Any]) -> pd.DataFrame:
    """Return the input that ``mlflow deployments predict -I`` makes of a file."""
    return pd.read_json(io.StringIO(json.dumps(body)))


def test_requests_of_a_frame() -> None:
    """A row is a request without its empty cells, and messages spread over rows are joined."""
    rows = pd.DataFrame([{"prompt": "a", "max_tokens": 2}, {"prompt": "b"}])
    assert requests_of(rows) == ([{"prompt": "a", "max_tokens": 2.0}, {"prompt": "b"}], False)
    spread = pd.DataFrame({"messages": [USER], "max_tokens": 2})
    assert requests_of(spread) == ([{"messages": [USER], "max_tokens": 2}], True)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (3, 2)])
def test_a_frame_of_parquet(lengths: tuple[int, ...]) -> None:
    """A row with arrays, as lists come back from Parquet, stays a request, however many messages it has; nulls that
    Arrow fills in are left out."""
    bodies = [{"messages": [USER, REPLY | {"name": "x"}, USER][:n], "stop": ["x", "y"], "seed": n} for n in lengths]
    file = io.BytesIO()
    pd.DataFrame(bodies).to_parquet(file)
    assert requests_of(pd.read_parquet(file)) == (bodies, False)


def test_lists_of_the_command() -> None:
    """A list as long as the messages is joined again, and a value equal in all rows is a single value."""
    body = {"messages": [USER, REPLY, USER], "stop": ["x", "y", "z"], "max_tokens": 5}
    assert requests_of(of_command(body)) == ([body], True)
    assert requests_of(of_command({"messages": [USER, USER], "stop": "x"})) == (
        [{"messages": [USER, USER], "stop": "x"}],
        True,
    )


def test_a_list_with_a_hole() -> None:
    """A field that only some of the rows have is refused as ambiguous."""
    with pytest.raises(MlflowException, match="stop: only some of the rows") as refused:
        requests_of(of_command({"messages": [USER, USER], "stop": ["x", None]}))
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"


def test_numbers_of_numpy() -> None:
    """NumPy's numbers and arrays are sent as JSON numbers and lists."""
    given = {"prompt": "a", "max_tokens": np.int64(3), "echo": np.bool_(True), "seed": np.array([1, 2])}
    (body,), _ = requests_of(given)
    assert json.dumps(body) == '{"prompt": "a", "max_tokens": 3, "echo": true, "seed": [1, 2]}'
    assert requests_of([given])[0] == [body]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (pd.Series({"prompt": "a"}), "not Series"),
        (None, "not NoneType"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: nan is not allowed"),
        ({"messages": [{"content": np.inf}]}, r"messages\[0\].content: inf is not allowed"),
        (pd.DataFrame({"prompt": ["a"], "seed": [np.inf]}), "seed: inf is not allowed"),
        ({"prompt": b"a"}, "prompt: a bytes cannot be sent"),
        ({1: "a"}, "the key 1 is not a text"),
    ],
)
def test_inputs_that_are_no_request_are_refused(inputs: Any, reason: str) -> None:
    """Input that cannot be sent is an MlflowException that names it as the caller's mistake, without a call of the
    server."""
    with pytest.raises(MlflowException, match=reason) as refused:
        get_deploy_client("llm://127.0.0.1:1").predict("a", inputs)
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"


def test_streams() -> None:
    """A request for a stream is directed to the streaming method, and the other way round."""
    client = get_deploy_client("llm://127.0.0.1:1")
    with pytest.raises(MlflowException, match="predict_stream"):
        client.predict("a", {"prompt": "x", "stream": True})
    with pytest.raises(MlflowException, match="predict does not stream"):
        client.predict_stream("a", {"prompt": "x", "stream": False})


def test_one_name() -> None:
    """Two different names for deployment and endpoint in one call are refused."""
    client = get_deploy_client("llm://127.0.0.1:1")
    for call in (
        lambda: client.predict("a", {"prompt": "x"}, endpoint="b"),
        lambda: client.get_deployment("a", endpoint="b"),
        lambda: client.create_deployment("a", "models:/a/1", endpoint="b"),
        lambda: client.delete_deployment("a", endpoint="b"),
    ):
        with pytest.raises(MlflowException, match="endpoint: 'b' beside the deployment 'a'"):
            call()
    with pytest.raises(MlflowException, match=r"no server answers at .*/endpoints/a/"):
        client.predict("a", {"prompt": "x"}, endpoint="a")


@pytest.mark.parametrize(
    "text",
    [
        '{"dataframe_split": {"columns": ["prompt", "max_tokens"], "data": [["a", 1], ["b", null], ["c", 3]]}}',
        '{"dataframe_records": [{"prompt": "a", "max_tokens": 1}, {"prompt": "b"}, {"prompt": "c", "max_tokens": 3}]}',
        '{"columns": ["prompt", "max_tokens", "x"], "data": [["a", 1, null], ["b", null, null], ["c", 3, null]]}',
    ],
)
def test_tables_in_the_forms_of_the_scoring_server(text: str) -> None:
    """Read the table in a split frame or in records, as ``mlflow deployments predict -I`` hands it over."""
    rows = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b"}, {"prompt": "c", "max_tokens": 3}]
    assert requests_of(pd.read_json(io.StringIO(text))) == (rows, False)


def test_a_split_frame_with_a_short_row_is_refused() -> None:
    """A row with more or fewer values than columns is named."""
    text = '{"dataframe_split": {"columns": ["prompt", "max_tokens"], "data": [["a", 1], ["b"]]}}'
    with pytest.raises(MlflowException, match=r"data\[1\] is not allowed; expected a list of 2 values"):
        requests_of(pd.read_json(io.StringIO(text)))
