"""What ``predict`` takes, as the bodies of requests."""

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
    """What ``mlflow deployments predict -I`` makes of a file."""
    return pd.read_json(io.StringIO(json.dumps(body)))


def test_requests_of_a_frame() -> None:
    """A row is a request without its empty cells; messages spread over rows are put together again."""
    rows = pd.DataFrame([{"prompt": "a", "max_tokens": 2}, {"prompt": "b"}])
    assert requests_of(rows) == ([{"prompt": "a", "max_tokens": 2.0}, {"prompt": "b"}], False)
    spread = pd.DataFrame({"messages": [USER], "max_tokens": 2})
    assert requests_of(spread) == ([{"messages": [USER], "max_tokens": 2}], True)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (3, 2)])
def test_a_frame_of_parquet(lengths: tuple[int, ...]) -> None:
    """Lists come back from Parquet as arrays: a row stays a request, whatever the number of its messages; the nulls
    that Arrow fills in for what a message does not have are left out."""
    bodies = [{"messages": [USER, REPLY | {"name": "x"}, USER][:n], "stop": ["x", "y"], "seed": n} for n in lengths]
    file = io.BytesIO()
    pd.DataFrame(bodies).to_parquet(file)
    assert requests_of(pd.read_parquet(file)) == (bodies, False)


def test_lists_of_the_command() -> None:
    """A list as long as the messages is a list again, and a value for all of them is one value."""
    body = {"messages": [USER, REPLY, USER], "stop": ["x", "y", "z"], "max_tokens": 5}
    assert requests_of(of_command(body)) == ([body], True)
    assert requests_of(of_command({"messages": [USER, USER], "stop": "x"})) == (
        [{"messages": [USER, USER], "stop": "x"}],
        True,
    )


def test_a_list_with_a_hole() -> None:
    """Where only some rows have a value nobody can say what was meant."""
    with pytest.raises(MlflowException, match="stop: only some of the rows") as refused:
        requests_of(of_command({"messages": [USER, USER], "stop": ["x", None]}))
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"


def test_numbers_of_numpy() -> None:
    """NumPy's numbers and arrays are sent as JSON's."""
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
        ({1: "a"}, "the key 1 is no text"),
    ],
)
def test_what_is_no_request(inputs: Any, reason: str) -> None:
    """What cannot be sent is an MlflowException that names it, and the caller's mistake; no server is asked."""
    with pytest.raises(MlflowException, match=reason) as refused:
        get_deploy_client("llm://127.0.0.1:1").predict("a", inputs)
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"


def test_streams() -> None:
    """A request that asks for a stream is sent to the method that has streams, and the other way round."""
    client = get_deploy_client("llm://127.0.0.1:1")
    with pytest.raises(MlflowException, match="predict_stream"):
        client.predict("a", {"prompt": "x", "stream": True})
    with pytest.raises(MlflowException, match="predict does not stream"):
        client.predict_stream("a", {"prompt": "x", "stream": False})


def test_one_name() -> None:
    """Deployments and endpoints are the same: two names for one call are refused, not one of them dropped."""
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
