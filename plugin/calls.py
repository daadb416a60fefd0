"""HTTP calls of the plugin to a server, with MLflow's exceptions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import requests
from mlflow.exceptions import MlflowException

KEY_VARIABLE = "MLFLOW_LLM_KEY"
TIMEOUT = (10, 600)


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(method: str, url: str, body: dict[str, Any] | None = None, *, stream: bool = False) -> requests.Response:
    """The answer. Raises ``MlflowException`` with the server's own message for a status of 400 and above."""
    try:
        answer = requests.request(method, url, json=body, headers=_headers(), timeout=TIMEOUT, stream=stream)
    except requests.RequestException as error:
        raise MlflowException(f"no server answers at {url} ({type(error).__name__})") from None
    if answer.status_code >= 400:
        try:
            told = answer.json()
            message = told.get("message") or told["error"]["message"]
        except (ValueError, KeyError, TypeError, AttributeError):
            message = answer.text[:200]
        raise MlflowException(f"{answer.status_code}: {message}", error_code=_code(answer.status_code))
    return answer


def _code(status: int) -> int:
    from mlflow.protos import databricks_pb2 as codes

    named = {
        400: codes.INVALID_PARAMETER_VALUE,
        401: codes.UNAUTHENTICATED,
        403: codes.PERMISSION_DENIED,
        404: codes.RESOURCE_DOES_NOT_EXIST,
        429: codes.REQUEST_LIMIT_EXCEEDED,
        503: codes.TEMPORARILY_UNAVAILABLE,
    }
    return int(named.get(status, codes.INTERNAL_ERROR if status >= 500 else codes.BAD_REQUEST))


def chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON chunks of a streamed reply."""
    with ask("POST", url, {**body, "stream": True}, stream=True) as answer:
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                return
            chunk = json.loads(line[6:])
            if "error_code" in chunk:
                raise MlflowException(chunk.get("message", "the stream ended with an error"))
            yield chunk


def requests_of(inputs: Any) -> tuple[list[dict[str, Any]], bool]:
    """``(bodies, whether one was meant)`` of a dict, a list of dicts or a DataFrame (one row a request).

    A DataFrame that ``mlflow deployments predict -I`` made of one JSON object has its messages spread over the rows;
    they are put together again.
    """
    if isinstance(inputs, dict):
        return [inputs], True
    if hasattr(inputs, "to_dict"):
        rows = [_said(row) for row in inputs.to_dict(orient="records")]
        if rows and all(isinstance(row.get("messages"), dict) for row in rows):
            return [{**rows[0], "messages": [row["messages"] for row in rows]}], True
        return rows, len(rows) == 1
    if isinstance(inputs, list) and all(isinstance(row, dict) for row in inputs):
        return list(inputs), False
    raise MlflowException.invalid_parameter_value(
        f"inputs: expected a dict, a list of dicts or a DataFrame, not {type(inputs).__name__}"
    )


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the cells that pandas filled in, numbers as Python's own."""
    found = {}
    for key, value in row.items():
        value = value.item() if hasattr(value, "item") else value
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            found[str(key)] = value
    return found
