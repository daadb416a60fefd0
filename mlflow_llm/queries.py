"""Requests that a table's rows make, and their answers: the part of ``ai_query`` that no library of tables shapes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from .serving.cli.batch.backends import Backend, ModelBackend, ServerBackend, answer_all, patiently
from .serving.cli.batch.rows import Row
from .serving.cli.http import URL_VARIABLE
from .serving.cli.key_options import VARIABLE as KEY_VARIABLE
from .serving.cli.key_options import Secret
from .serving.interface.errors import PackagingError, ServingError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT, JSON, EMBEDDING = RETURN_TYPES = ("text", "json", "embedding")
FORMATS = ("text", "json_object")  # the values of response_format that need no schema


@dataclass(frozen=True)
class Query:
    """The arguments of an ``ai_query``, checked: all that is needed to answer rows, in this process or another."""

    endpoint: str
    fields: dict[str, Any]
    return_type: str
    fail_on_error: bool
    url: str
    key: str | None
    concurrency: int | None

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        """Connect to the server, or load the model. Raises ``MlflowException``."""
        stop = threading.Event()
        with _raised_by_mlflow():
            backend: Backend
            if is_model(self.endpoint):
                backend = ModelBackend(self.endpoint, {}, stop)
            else:
                backend = ServerBackend(self.url, self.key, self.endpoint)
        try:
            yield Answering(self, backend, stop)
        finally:
            backend.close()


def query_of(
    endpoint: str,
    return_type: str,
    fail_on_error: bool,
    model_parameters: dict[str, Any] | None,
    response_format: dict[str, Any] | str | None,
    url: str | None,
    key: str | None,
    concurrency: int | None,
) -> Query:
    """Return the query of these arguments. The server and the key come from the environment where they are None.

    Raises:
        MlflowException: an argument is not allowed.
    """
    if return_type not in RETURN_TYPES:
        raise refused("return_type", return_type, "one of " + ", ".join(RETURN_TYPES))
    if not isinstance(fail_on_error, bool):
        raise refused("fail_on_error", fail_on_error, "True or False")
    if model_parameters is not None and not isinstance(model_parameters, dict):
        raise refused("model_parameters", model_parameters, "a dict of request fields")
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise refused("concurrency", concurrency, "an integer of at least 1")
    fields = dict(model_parameters or {})
    if response_format is not None:
        fields["response_format"] = _format(response_format)
    said = os.environ.get(KEY_VARIABLE)
    if not key and said and not is_model(endpoint):
        with _raised_by_mlflow():
            key = Secret().convert(said, None, None)  # the key, or @FILE
    url = url or os.environ.get(URL_VARIABLE) or "http://127.0.0.1:8000"
    return Query(endpoint, fields, return_type, fail_on_error, url, key, concurrency)


def is_model(endpoint: str) -> bool:
    """Return whether ``endpoint`` is a model for the process that asks, and not a server's endpoint."""
    return ":/" in endpoint or os.path.isdir(endpoint)


class Answering:
    """A query whose server or model is there."""

    def __init__(self, query: Query, backend: Backend, stop: threading.Event) -> None:
        self._query = query
        self._backend = backend
        self._stop = stop

    def answers(self, requests: list[Any], first: int = 0, place: str = "row") -> list[Any]:
        """Return the answers to ``requests`` in their order. Errors name ``place`` and the number from ``first`` on."""
        rows = [
            None if _is_null(one) else self._row(number, one, place) for number, one in enumerate(requests, start=first)
        ]
        concurrency = self._query.concurrency or self._backend.concurrency
        with _raised_by_mlflow():
            return answer_all(partial(self._answer, place), rows, self._stop, concurrency=concurrency)

    def _row(self, number: int, value: Any, place: str) -> Row:
        """Return the request of a row. Raises ``MlflowException`` for a value that is none."""
        fields = self._query.fields
        if isinstance(value, dict):
            body = {**fields, **value}
        elif self._query.return_type == EMBEDDING:
            body = {**fields, "input": value}
        elif isinstance(value, str):
            body = {**fields, "messages": [{"role": "user", "content": value}]}
        elif hasattr(value, "__iter__") and all(isinstance(message, Mapping) for message in value):
            body = {**fields, "messages": [dict(message) for message in value]}
        else:
            raise refused(f"request, {place} {number}", value, "a text, a list of messages or a request body")
        return Row(number, str(number), str(number), None, body)

    def _answer(self, place: str, row: Row | None) -> Any:
        fail_on_error, return_type = self._query.fail_on_error, self._query.return_type
        if row is None:
            return None if fail_on_error else {"result": None, "errorMessage": None}
        answered = patiently(self._backend, self._stop, row, f"{place} {row.line}")
        error = None if answered.status < 400 else _message(answered.body)
        if fail_on_error:
            if error is not None:
                raise MlflowException(f"{place} {row.line}: {error}", error_code=INVALID_PARAMETER_VALUE)
            return _result(answered.body, return_type)
        result = None if error is not None else _result(answered.body, return_type)
        return {"result": result, "errorMessage": error}


def refused(name: str, value: Any, allowed: str) -> MlflowException:
    """Return the error for an argument that is not allowed."""
    text = f"{name}: {shown(value)} is not allowed; expected {allowed}"
    return MlflowException(text, error_code=INVALID_PARAMETER_VALUE)


@contextmanager
def _raised_by_mlflow() -> Iterator[None]:
    """Raise the errors of commands and of this package as ``MlflowException``."""
    try:
        yield
    except click.ClickException as error:
        raise MlflowException(error.message) from None
    except (ServingError, PackagingError) as error:
        raise MlflowException(str(error)) from None


def _format(value: dict[str, Any] | str) -> dict[str, Any]:
    """Return OpenAI's ``response_format``, which Databricks takes as JSON."""
    if isinstance(value, str):
        if value in FORMATS:
            return {"type": value}
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        expected = f"OpenAI's response_format as a dict or as JSON, or one of {', '.join(FORMATS)}"
        raise refused("response_format", value, expected)
    return value


def _is_null(value: Any) -> bool:
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _result(body: dict[str, Any], return_type: str) -> Any:
    if return_type == JSON:
        return json.dumps(body)
    if return_type == EMBEDDING:
        return body["data"][0]["embedding"]
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
