"""The plugin's HTTP calls to a server; errors are raised as MLflow's exceptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import click
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes

from mlflow_llm.serving.cli.key_options import VARIABLE, Secret

KEY_VARIABLE = VARIABLE
CA_VARIABLE, CERT_VARIABLE = "MLFLOW_LLM_CA", "MLFLOW_LLM_CERT"  # PEM files: authorities; our certificate with its key
CONNECT_SECONDS = 10
TIMEOUT_SECONDS = 600.0
CODES = {
    400: codes.INVALID_PARAMETER_VALUE,
    401: codes.UNAUTHENTICATED,
    403: codes.PERMISSION_DENIED,
    404: codes.RESOURCE_DOES_NOT_EXIST,
    409: codes.RESOURCE_CONFLICT,
    429: codes.REQUEST_LIMIT_EXCEEDED,
    503: codes.TEMPORARILY_UNAVAILABLE,
}


def auth_headers() -> dict[str, str]:
    """Return the ``Authorization`` header for ``MLFLOW_LLM_KEY``, a key or ``@FILE`` with one; none if it is unset.

    Raises ``MlflowException``, which does not show the key.
    """
    said = os.environ.get(KEY_VARIABLE, "")
    if not said:
        return {}
    try:
        key = Secret().convert(said, None, None)
    except click.BadParameter as error:
        raise MlflowException.invalid_parameter_value(f"{KEY_VARIABLE}: {error.message}") from None
    return {"Authorization": f"Bearer {key}"}


def request(
    method: str, url: str, body: dict[str, Any] | None = None, *, stream: bool = False, seconds: float = TIMEOUT_SECONDS
) -> requests.Response:
    """Send an HTTP request and return the response; ``seconds`` is the timeout.

    Raises ``MlflowException`` if there is no response, or, with the server's own message, if its status is 400 or more.
    """
    timeout = (min(CONNECT_SECONDS, seconds), seconds)
    try:
        answer = requests.request(
            method,
            url,
            json=body,
            headers=auth_headers(),
            timeout=timeout,
            stream=stream,
            **_trust(),
        )
    except requests.exceptions.SSLError as error:
        raise _untrusted(url, error) from None
    except OSError as error:  # requests' exceptions are OSErrors, as is the error for a missing file
        raise MlflowException(f"no server answers at {url} ({type(error).__name__})") from None
    if answer.status_code >= 400:
        raise _refusal(answer)
    return answer


def is_ready(server: str, seconds: float) -> bool:
    """Return whether the server answers ``/ready`` with 200. Raises ``MlflowException`` if TLS fails."""
    try:
        return requests.get(f"{server}/ready", timeout=seconds, **_trust()).status_code == 200
    except requests.exceptions.SSLError as error:
        raise _untrusted(server, error) from None
    except requests.RequestException:
        return False


def _trust() -> dict[str, Any]:
    """Return the TLS arguments for ``requests``, which uses its own variable (REQUESTS_CA_BUNDLE) if ours is unset."""
    return {"verify": os.environ.get(CA_VARIABLE) or None, "cert": os.environ.get(CERT_VARIABLE) or None}


def _untrusted(url: str, error: Exception) -> MlflowException:
    reason = str(error).rpartition("(Caused by ")[2].removesuffix(")")[:300]
    return MlflowException(
        f"no server answers at {url} ({reason}); {CA_VARIABLE} names a PEM file with its CA certificates, "
        f"{CERT_VARIABLE} one with the client's certificate and key if the server requires them"
    )


def request_json(
    method: str, url: str, body: dict[str, Any] | None = None, *, seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Send a request and return the JSON object in the answer. Raises ``MlflowException``, also for any other body."""
    try:
        found = request(method, url, body, seconds=seconds).json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise unexpected_answer(url)
    return found


def unexpected_answer(url: str) -> MlflowException:
    """Return the error for an answer that this package's servers never give."""
    return MlflowException(f"{url} does not answer like an mlflow-llm server")


def _refusal(answer: requests.Response) -> MlflowException:
    try:
        said = answer.json()
        message = said.get("message") or said["error"]["message"]
        exists = said.get("error_code") == "RESOURCE_ALREADY_EXISTS"
    except (ValueError, KeyError, TypeError, AttributeError):
        message, exists = answer.text[:200], False
    status = answer.status_code
    code = CODES.get(status, codes.INTERNAL_ERROR if status >= 500 else codes.BAD_REQUEST)
    if status == 409 and exists:
        code = codes.RESOURCE_ALREADY_EXISTS
    return MlflowException(f"{status}: {message}", error_code=int(code))


def stream_chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the JSON chunks of a streamed reply. Raises ``MlflowException``, also for a truncated stream."""
    with request("POST", url, {**body, "stream": True}, stream=True) as answer:
        for line in _lines(answer):
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                return
            chunk = _chunk(url, line[6:])
            if "error_code" in chunk:
                raise MlflowException(chunk.get("message", "the stream ended with an error"))
            yield chunk
    raise MlflowException("the stream broke off before its end")


def _chunk(url: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise unexpected_answer(url)
    return found


def _lines(answer: requests.Response) -> Iterator[bytes]:
    try:
        yield from answer.iter_lines()
    except requests.RequestException as error:
        raise MlflowException(f"the stream broke off before its end ({type(error).__name__})") from None
